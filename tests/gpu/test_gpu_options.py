"""On a GPU: a softcap, a gradient of the LSE and sinks are right in both directions."""

import pytest
import torch
from support import gpu
from support.sinks import assert_accurate

import attnreg
from attnreg.backends import fa4
from attnreg.measure import Case
from attnreg.testing import Conformance

pytestmark = pytest.mark.gpu

SHAPES = {
    "packed": {"lens_q": (113, 1, 64, 31, 203), "lens_k": (203, 65, 64, 33, 113), "varlen": True},
    "dense": {"lens_q": (113, 113), "lens_k": (203, 203)},
}


OPTIONS = {
    "softcap": {"softcap": 30.0, "magnitude": 3.0},
    "grad_lse": {"grad_lse": True},
    "both": {"softcap": 2.0, "grad_lse": True},
}


@pytest.mark.only_for("FA4")
@pytest.mark.parametrize("option", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("lengths", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (8, 2)], ids=str)
@pytest.mark.parametrize(("dim", "heads"), [(64, (4, 4)), (128, (6, 2))], ids=str)
def test_an_option_is_right_in_both_directions(named, option, lengths, window, dim, heads):
    kit = Conformance(fa4.BACKEND, "cuda")
    options = {"dims": (dim, dim), "heads": heads, "window": window, **option, **lengths}
    for dtype in ("bfloat16", "float16"):
        outcome = kit.run(Case(name=f"{options}", dtype=dtype, **options))
        assert outcome.passed, outcome
        assert outcome.errors.keys() == {"out", "lse", "dq", "dk", "dv"}, outcome.reasons


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)], ids=str)
def test_sinks_are_served_by_both_kernels_of_each_backend(named, ran, heads, dtype):
    """A gradient of the LSE, which not all of them have, isn't asked for."""
    query, key, value, *rest = gpu.packed((113, 1, 64, 31, 603), heads=heads, dtype=dtype, grad=False)
    sinks = torch.linspace(-1, 4, heads[0], device="cuda").to(dtype)

    def attend(query, key, value, sinks, *rest):
        options = {"is_causal": True, "enable_gqa": True, "return_aux": attnreg.AuxRequest(lse=True)}
        return attnreg.varlen_attn(query, key, value, *rest, sinks=sinks, backend=named, **options)

    for _ in range(3):  # by its plan, then by a launcher
        assert_accurate(attend, (query, key, value, sinks), *rest, causal=True)
        assert ran() == {named: (1, 1)}
