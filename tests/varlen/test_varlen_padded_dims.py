"""Promises of the fronts about head dims that a backend takes only when they are padded."""

import functools

import pytest
import torch
from support import dense, truth
from support.packed_calls import CAUSAL, LENGTHS_K, LENGTHS_Q, LSE, offsets, random_like, run_and_compare
from support.plan_counts import counting
from torch.nn.attention.varlen import varlen_attn as torch_varlen_attn

import attnreg
from attnreg import flash_attn
from attnreg.core.contract.capabilities import Range
from attnreg.errors import UnsupportedInputError

STEPS = {"head_dim": Range(8, 64, 8), "head_dim_v": Range(8, 64, 8)}


@pytest.fixture
def steps(fake):
    """Register a backend "mine" for head dims in steps of 8, and return what it is given."""
    recorder = fake("mine", **STEPS)
    with attnreg.register_backend(recorder.backend):
        yield recorder


def given_dims(recorder):
    """Return the head dims that the kernels were given since the last call, and forget these."""
    found = {x.shape[-1] for given in recorder.forwards for x in given[:3]}
    found |= {x.shape[-1] for given in recorder.backwards for x in given[:5]}
    recorder.forwards.clear()
    recorder.backwards.clear()
    return found


OPTIONS = {
    "none": ({}, {}),
    "causal and backend": ({"is_causal": True, "backend": "mine"}, {"window": CAUSAL}),
    "scale and softcap": ({"scale": 0.7, "softcap": 0.8}, {"scale": 0.7, "softcap": 0.8}),
}


@pytest.mark.each_value("front", "options")
@pytest.mark.parametrize(("options", "meant"), OPTIONS.values(), ids=OPTIONS)
def test_every_repeated_call_is_right_and_padded_whatever_is_called_between(
    front, packed, steps, ran, options, meant
):
    ran()
    for _ in range(3):
        for dim, wide in ((13, 16), (16, 16), (12, 16), (21, 24)):
            run_and_compare(packed(LENGTHS_Q, LENGTHS_K, dim=dim), meant, **options)
            assert given_dims(steps) == {wide}
            assert ran() == {"mine": (1, 1)}
    assert not attnreg.stats().fallbacks


def test_a_repeated_call_is_planned_no_more(compiled_routers, no_graph_trees, packed, steps, monkeypatch):
    planned, given = counting(monkeypatch), packed(LENGTHS_Q, dim=13)
    call = functools.partial(run_and_compare, given)
    counts = [planned(call) for _ in range(4)]
    assert counts[0] == 2
    assert counts[-1] == 0
    assert len(steps.forwards) == len(steps.backwards) == 4


def test_query_and_value_are_padded_each_for_itself(front, packed, steps, ran):
    query, key, _, *rest = packed(LENGTHS_Q, LENGTHS_K, dim=13)
    value = packed(LENGTHS_Q, LENGTHS_K, dim=33)[2]
    for _ in range(3):
        run_and_compare((query, key, value, *rest))
        assert given_dims(steps) == {16, 40}
    assert ran() == {"mine": (3, 3)}


def test_sinks_get_their_gradient(front, packed, fake, ran):
    recorder = fake("mine", **STEPS)
    given, sinks = packed(LENGTHS_Q, dim=13), torch.randn(4, requires_grad=True)
    with attnreg.register_backend(recorder.backend):
        found = attnreg.varlen_attn(*given, sinks=sinks, is_causal=True)
        grads = torch.autograd.grad(found.square().sum(), (*given[:3], sinks))
    assert given_dims(recorder) == {16}
    assert ran() == {"mine": (1, 1)}
    with attnreg.use_backend("math"):
        expected = attnreg.varlen_attn(*given, sinks=sinks, is_causal=True)
        wanted = torch.autograd.grad(expected.square().sum(), (*given[:3], sinks))
    for one, other in zip((found, *grads), (expected, *wanted), strict=True):
        truth.assert_near(one, other.double())


def test_the_lse_and_its_gradient_are_right(front, packed, steps, ran):
    given = packed(LENGTHS_Q, LENGTHS_K, dim=13)
    out, lse = truth.varlen(*given[:5])
    grads = random_like(out), random_like(lse)
    wanted = torch.autograd.grad((out, torch.where(lse.isfinite(), lse, 0.0)), given[:3], grads)
    for _ in range(2):
        results = attnreg.varlen_attn(*given, return_aux=LSE)
        found = torch.autograd.grad(results, given[:3], [x.float() for x in grads])
        for one, other in zip(found, wanted, strict=True):
            truth.assert_near(one, other.double())
    assert (ran(), given_dims(steps)) == ({"mine": (2, 2)}, {16})


def test_pages_are_not_copied(front, packed, steps, ran):
    query, *_ = packed((2, 3), dim=13)
    pool = torch.randn(2, 6, 4, 4, 13)
    table = torch.tensor([[4, 0], [2, 5]], dtype=torch.int32)
    rest = offsets(2, 3), None, 3, 7
    pages = {"seqused_k": torch.tensor([7, 3], dtype=torch.int32), "block_table": table}
    with torch.no_grad():
        attnreg.varlen_attn(query, *pool, *rest, **pages)
        assert "mine" not in ran()
        with pytest.raises(UnsupportedInputError, match="head_dim must be 8 to 64 in steps of 8, got 13"):
            attnreg.varlen_attn(query, *pool, *rest, backend="mine", **pages)
    assert given_dims(steps) == set()


def test_a_compiled_program_gets_results_of_its_own_head_dims(packed, steps, ran, inductor):
    given = packed(LENGTHS_Q, LENGTHS_K, dim=13)
    torch._dynamo.reset()
    attend = torch.compile(attnreg.varlen_attn, fullgraph=True, backend=inductor)
    run_and_compare(given, {"window": CAUSAL}, attend, is_causal=True)
    torch._dynamo.reset()
    assert (ran(), given_dims(steps)) == ({"mine": (1, 1)}, {16})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_dense_batch_is_right_forward_and_backward(steps, ran, dtype):
    q, k, v = (torch.randn(2, length, 4, 13).to(dtype).requires_grad_() for length in (5, 9, 9))
    for causal in (False, True, False):
        out, lse, _ = flash_attn.flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
        window = CAUSAL if causal else (-1, -1)
        expected, expected_lse = truth.dense(*(x.transpose(1, 2) for x in (q, k, v)), window=window)
        dense.assert_near(dense.with_gradients(out, (q, k, v)), (q, k, v), expected.transpose(1, 2))
        truth.assert_near(lse, expected_lse, dtype)
        assert out.is_contiguous()
    assert (ran(), given_dims(steps)) == ({"mine": (3, 3)}, {16})


def test_the_weights_that_dropout_has_dropped_are_those_of_the_output(steps, ran):
    q, k, v = (torch.randn(2, 11, 2, 13) for _ in "qkv")
    out, _, weights = flash_attn.flash_attn_func(q, k, v, dropout_p=0.3, return_attn_probs=True)
    assert 0 < weights.signbit().sum() < weights.numel()
    whole = weights.abs() / weights.abs().sum(-1, keepdim=True)
    kept = torch.where(weights.signbit(), 0.0, whole / 0.7)
    expected = torch.einsum("bhqk,bkhd->bqhd", kept.double(), v.double())
    truth.assert_near(out, expected)
    assert set(ran()) == {"mine"}
    assert given_dims(steps) == {16}


def test_calls_of_torchs_own_varlen_attn_are_padded(packed, steps, ran):
    given = packed(LENGTHS_Q, LENGTHS_K, dim=13)
    for _ in range(3):
        out = torch_varlen_attn(*given)
        expected, _ = truth.varlen(*given[:5])
        dense.assert_near(dense.with_gradients(out, given[:3]), given[:3], expected)
    assert (ran(), given_dims(steps)) == ({"mine": (3, 3)}, {16})


def test_calls_of_pytorchs_own_function_are_padded(steps, ran):
    inputs = [torch.randn(2, 4, 7, 13, requires_grad=True) for _ in "qkv"]
    for _ in range(3):
        out = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)
        expected, _ = truth.dense(*inputs, window=CAUSAL)
        dense.assert_near(dense.with_gradients(out, inputs), inputs, expected)
    assert (ran(), given_dims(steps)) == ({"mine": (3, 3)}, {16})
