"""Promises of cuDNN's dropout: both directions drop the same weights; what it reads and refuses."""

import pytest
import torch
from support.packages import gpu_spec

from attnreg.backends import cudnn, fa2
from attnreg.core.contract.backend import Call
from attnreg.core.registry.entry import Entry
from attnreg.errors import InvalidInputError
from attnreg.tools.measure import CASES, measure

ENTRY = Entry("cuDNN", "a test", cudnn.BACKEND)
B, S_Q, S_K, H, D = 2, 40, 24, 4, 32
P = 0.4


def drawn(length_q=S_Q, length_k=S_K, heads_k=H):
    """Return query, key, value and gradient (B, S, H, D)."""
    generator = torch.Generator().manual_seed(3)
    shapes = (B, length_q, H, D), *[(B, length_k, heads_k, D)] * 2, (B, length_q, H, D)
    return [torch.randn(size, generator=generator).bfloat16() for size in shapes]


def call_of(length_q=S_Q, length_k=S_K, state=(5, 7), **options):
    rng_state = torch.tensor(state).view(torch.uint64)
    return Call(0.25, length_q, length_k, dropout=P, rng_state=rng_state, **options)


def run_both(kernels, q, k, v, grad, call):
    """Return output, LSE and the gradients."""
    out, lse = kernels.forward(q, k, v, call)
    return out, lse, *kernels.backward(grad, q, k, v, out, lse, call)


@pytest.mark.parametrize("name", ["dropout bfloat16", "dropout float16"])
def test_the_kit_finds_both_directions_right(kernels, name):
    (case,) = [case for case in CASES if str(case) == name]
    errors = measure(kernels, case)
    assert errors.keys() == {"out", "lse", "dq", "dk", "dv"}
    assert all(error.passed for error in errors.values())


@pytest.mark.parametrize("window", [(-1, 0), (8, 2), (8, 0)], ids=str)
@pytest.mark.parametrize("heads_k", [4, 2])
def test_a_mask_beside_dropout_is_aligned_top_left(kernels, module, heads_k, window):
    given = drawn(S_K, S_K, heads_k)
    call = call_of(S_K, S_K, window=window)
    out, *_, grad_v = run_both(kernels, *given, call)
    assert [graph.options["diagonal_alignment"] for graph in module.graphs] == ["TOP_LEFT"] * 2
    # The output is linear in the value, in the weights that the forward has dropped none of.
    of_value = (grad_v.double() * given[2].double()).sum()
    torch.testing.assert_close(of_value, (out.double() * given[3].double()).sum(), rtol=0.02, atol=0.5)
    whole, _ = kernels.forward(*given[:3], call._replace(window=(-1, -1)))
    assert not torch.equal(out, whole)


def test_seed_and_offset_are_read_where_they_lie(kernels, module):
    call = call_of()
    run_both(kernels, *drawn(), call)
    for graph in module.graphs:
        p, seed, offset = graph.options["dropout"]
        assert p == P
        addresses = [graph.running.addresses[one.uid] for one in (seed, offset)]
        assert addresses == [call.rng_state.data_ptr(), call.rng_state.data_ptr() + 8]


def test_other_states_drop_others_by_the_same_execution_plans(kernels, module):
    given = drawn()
    first, again, *others = (
        run_both(kernels, *given, call_of(state=state)) for state in ((5, 7), (5, 7), (6, 7), (5, 8))
    )
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    for other in others:
        assert not torch.equal(first[0], other[0])
        assert torch.equal(first[1], other[1])  # the LSE is of all weights
    assert len(module.graphs) == 2


def test_a_call_without_dropout_has_another_execution_plan(kernels):
    q, k, v, _ = drawn()
    plain = Call(0.25, S_Q, S_K)
    before, _ = kernels.forward(q, k, v, plain)
    out, _ = kernels.forward(q, k, v, call_of())
    assert not torch.equal(out, before)
    assert torch.equal(kernels.forward(q, k, v, plain)[0], before)


def test_without_a_random_state_it_is_the_callers_error(kernels, module):
    with pytest.raises(InvalidInputError, match=r"rng_state: got None with dropout_p 0\.4, expected"):
        kernels.forward(*drawn()[:3], call_of()._replace(rng_state=None))


def test_no_launcher_runs_a_call_with_dropout(kernels):
    q, k, v, grad = drawn()
    call = call_of()
    out, lse, *_ = run_both(kernels, q, k, v, grad, call)
    assert kernels.specialize("forward", (q, k, v), call) is None
    assert kernels.specialize("backward", (grad, q, k, v, out, lse), call) is None
    assert kernels.specialize("forward", (q, k, v), Call(0.25, S_Q, S_K)) is not None


# What it refuses

MASKED = "query and key must have the same length with dropout_p and a mask, got {} and {}"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"varlen": True}, "dropout_p must be 0 with packed tensors, got 0.3"),
        ({"dropout": 1.0}, "dropout_p must be below 1, got 1.0"),
        ({"bias": True}, "dropout_p must be 0 with attn_bias, got 0.3"),
        ({"max_k": 1}, "key must have more than one token with dropout_p, got 1"),
        ({"window": (-1, 0), "max_q": 8, "max_k": 9}, MASKED.format(8, 9)),
        ({"window": (4, 4), "max_q": 8, "max_k": 9}, MASKED.format(8, 9)),
    ],
)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_what_cudnn_does_not_take_beside_dropout_is_refused(direction, changes, reason):
    spec = gpu_spec(**{"dropout": 0.3, **changes})
    assert ENTRY.reasons(spec, direction) == (reason,)
    assert ENTRY.reasons(gpu_spec(dropout=0.3), direction) == ()
    assert ENTRY.reasons(gpu_spec(dropout=0.3, window=(-1, 0)), direction) == ()


def test_dropout_is_refused_on_another_compute_capability():
    reasons = ENTRY.reasons(gpu_spec("sm_80", dropout=0.3), "forward")
    assert reasons == ("compute capability must be 9.x with dropout, got 8.0",)


def test_with_dropout_torchs_kernel_comes_first():
    plain, dropped = gpu_spec(), gpu_spec(dropout=0.3)
    torchs = Entry("FA2", "a test", fa2.BACKEND)
    assert torchs.priority(dropped) > cudnn.BACKEND.priority_for(dropped)
    assert torchs.priority(plain) < cudnn.BACKEND.priority_for(plain)
