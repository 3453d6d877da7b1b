"""The backend keeps attnreg's contract, is found once it is installed, and runs where it is asked for."""

import torch
import torch.nn.functional as F
from attnreg_example import BACKEND, NAME

import attnreg
from attnreg.testing import check_backend

# Of the last test's call, causal and in both directions: what your kernels can run.
HEADS, HEAD_DIM, DTYPE = (4, 2), 16, torch.float32


def test_it_keeps_the_contract() -> None:
    report = check_backend(BACKEND, device="cpu")
    ran = [outcome for outcome in report.outcomes if not outcome.refused]
    assert len(ran) > 50  # a backend that refuses more than you think passes, too
    assert "has no backward" not in report.refused


def test_it_is_found_where_the_package_is_installed() -> None:
    assert NAME in attnreg.list_backends()


def test_it_runs_where_it_is_asked_for_and_nowhere_else() -> None:
    of_query, of_key = HEADS
    query, key, value = (
        torch.randn(2, heads, 32, HEAD_DIM, dtype=DTYPE, requires_grad=True)
        for heads in (of_query, of_key, of_key)
    )
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    attnreg.reset_stats()
    with attnreg.use_backend(NAME):
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    out.sum().backward()
    assert attnreg.stats().calls == {NAME: {"forward": 1, "backward": 1}}
    torch.testing.assert_close(out, expected)
