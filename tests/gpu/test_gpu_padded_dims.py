"""On a GPU: head dims that are no multiple of 8 are right on kernels that take only multiples of 8."""

import functools

import pytest
import torch
from support import gpu, truth

import attnreg
from attnreg import flash_attn
from attnreg.backends.fa4 import WRONG_GRADIENTS
from attnreg.core import registry
from attnreg.errors import UnsupportedInputError
from attnreg.testing import Conformance
from attnreg.tools.measure import Case

pytestmark = [pytest.mark.gpu, pytest.mark.only_for("FA2", "FA4", "cuDNN")]

CAUSAL, OPEN = (-1, 0), (-1, -1)
BOTH = ("bfloat16", "float16")
DIMS = pytest.mark.parametrize("dim", [59, 111])
TENSORS = {"out", "lse", "dq", "dk", "dv"}
PACKED = {"lens_q": (113, 1, 64, 0, 31, 7, 203), "lens_k": (203, 65, 64, 9, 33, 0, 113), "varlen": True}
SHAPES = {
    "packed": PACKED,
    "packed, rows of no sequence": PACKED | {"tail": 17, "poison": True},
    "dense": {"lens_q": (113, 113), "lens_k": (203, 203)},
}


def computes_gradients(named, dim):
    """Whether a backend does, of the padded head dim."""
    is_hopper = torch.cuda.get_device_capability()[0] == 9
    return not (named == "FA4" and is_hopper and -(-dim // 8) * 8 in WRONG_GRADIENTS)


def hold(named, dim, **options):
    """Run a case in both dtypes by the rule; only a backward that computes no gradients may be left out."""
    kit = Conformance(named, "cuda")
    for dtype in BOTH:
        outcome = kit.run(Case(name=f"{options}", dims=(dim, dim), dtype=dtype, **options))
        assert outcome.passed, outcome
        if computes_gradients(named, dim):
            assert (outcome.errors.keys(), outcome.reasons) == (TENSORS, ())
        else:
            assert outcome.errors.keys() == {"out", "lse"}
            padding = f"head dims padded from {dim} to {-(-dim // 8) * 8}: "
            assert all(reason.startswith(padding) for reason in outcome.reasons), outcome.reasons


# ---- values


@DIMS
@pytest.mark.parametrize("lengths", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("window", [OPEN, CAUSAL, (8, 2)], ids=str)
def test_every_layout_and_mask_is_right_in_both_directions(named, dim, lengths, window):
    hold(named, dim, heads=(4, 2), window=window, **lengths)


FURTHER = {
    "sinks": {"sinks": True, "window": CAUSAL},
    "scale": {"scale": 0.3},
    "gradient of the LSE": {"grad_lse": True},
    "gradient of a sum": {"grad_layout": "expanded"},
    "strided": {"layout": "last dim strided"},
    "rows that aren't aligned": {"layout": "odd rows"},
}


@DIMS
@pytest.mark.parametrize("options", FURTHER.values(), ids=FURTHER)
def test_further_options_are_right(named, dim, options):
    hold(named, dim, **PACKED, **options)


OF_ONE = {
    "FA2": [{"dropout": 0.3, "lens_q": (33, 7, 50), "lens_k": (50, 3, 33)}, {"deterministic": True}],
    "FA4": [{"softcap": 5.0}, {"seqused_k": (200, 0, 1, 9, 33, 0, 65)}, {"deterministic": True}],
    "cuDNN": [{"seqused_k": (200, 0, 1, 9, 33, 0, 65)}],
}


@DIMS
def test_options_of_one_backend_are_right(named, dim):
    for options in OF_ONE[named]:
        hold(named, dim, **{**PACKED, **options})


@pytest.mark.parametrize("dims", [(59, 64), (64, 59)], ids=str)
def test_query_and_value_are_padded_each_for_itself(named, dims):
    kit = Conformance(named, "cuda")
    for shape in SHAPES.values():
        outcome = kit.run(Case(name="mine", dims=dims, window=CAUSAL, **shape))
        assert outcome.passed, outcome
        assert (outcome.errors.keys(), outcome.reasons) == (TENSORS, ())


# ---- through the fronts


def dense(dim, dtype):
    """Draw query, key and value, (B, S, H, D)."""
    return [x.detach().transpose(1, 2).requires_grad_() for x in gpu.bhsd(dim=dim, dtype=dtype)]


def expected_of_dense(inputs, window):
    leaves = [x.detach().cpu().double().requires_grad_() for x in inputs]
    out = truth.dense(*(x.transpose(1, 2) for x in leaves), window=window)[0].transpose(1, 2)
    return out, *torch.autograd.grad(out, leaves, gpu.incoming(inputs[0]).cpu().double())


def assert_ran(calls, named, both):
    """Check that a backend ran both directions; or the forward, and another one but `math` the backward."""
    assert calls.pop(named) == (1, int(both))
    assert list(calls.values()) == ([] if both else [(0, 1)])
    assert "math" not in calls


@DIMS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("is_causal", [False, True], ids=["open", "causal"])
def test_both_fronts_are_right_in_both_directions(named, dim, dtype, is_causal, ran):
    window, both = CAUSAL if is_causal else OPEN, computes_gradients(named, dim)
    given, inputs = gpu.packed(dim=dim, dtype=dtype), dense(dim, dtype)
    wanted = gpu.expected(given, window=window)[0], expected_of_dense(inputs, window)
    ran()
    for _ in range(3):  # the first decides, the second is kept, the third is found
        with attnreg.register_backend(named):
            found = gpu.run(functools.partial(attnreg.varlen_attn, is_causal=is_causal), given)
            assert_ran(ran(), named, both)
            gpu.assert_near(found, wanted[0], dtype)
            out = flash_attn.flash_attn_func(*inputs, causal=is_causal)
            grads = torch.autograd.grad(out, inputs, gpu.incoming(out))
            assert_ran(ran(), named, both)
            gpu.assert_near((out, *grads), wanted[1], dtype)
            assert out.is_contiguous() and found[0].is_contiguous()


@DIMS
def test_calls_of_other_head_dims_between_change_nothing(named, dim, ran):
    ran()
    for seed in range(4):
        for one in (dim, 64, dim):
            given = gpu.packed(dim=one, seed=seed).detached()
            out = attnreg.varlen_attn(*given, backend=named)
            wanted = truth.varlen(*(x.cpu() for x in given[:5]))[0]
            truth.assert_near(out.cpu(), wanted)
            assert ran() == {named: (1, 0)}


@DIMS
@pytest.mark.parametrize("varlen", [True, False], ids=["packed", "dense"])
def test_by_default_math_runs_none(named, dim, varlen, ran):
    """`named` says only that the kernels are there."""
    inputs = gpu.packed(dim=dim) if varlen else dense(dim, gpu.BF16)
    ran()
    if varlen:
        got, wanted = gpu.run(attnreg.varlen_attn, inputs), gpu.expected(inputs)[0]
    else:
        out = flash_attn.flash_attn_func(*inputs)
        got = out, *torch.autograd.grad(out, inputs, gpu.incoming(out))
        wanted = expected_of_dense(inputs, OPEN)
    calls = ran()
    assert "math" not in calls
    assert tuple(map(sum, zip(*calls.values(), strict=True))) == (1, 1)
    gpu.assert_near(got, wanted)


def test_torchs_own_varlen_attn_is_padded_too_where_something_asks_for_the_backend(named, ran):
    given = gpu.packed(dim=59)
    with attnreg.register_backend(named):
        found = gpu.run(gpu.torch_varlen_attn, given)
    assert ran() == {named: (1, 1)}
    gpu.assert_near(found, gpu.expected(given)[0])


def test_a_captured_step_waits_for_nothing_and_follows_its_inputs(named):
    given = gpu.packed(dim=59)
    grad = gpu.incoming(given.query)

    def step():
        out = attnreg.varlen_attn(*given, backend=named)
        return [out.detach(), *torch.autograd.grad(out, given.qkv, grad)]

    for _ in range(3):
        step()
    with gpu.no_waiting():
        step()
    graph, results = gpu.capture(step)
    with torch.no_grad():
        for x, other in zip(given.qkv, gpu.packed(dim=59, seed=1).qkv, strict=True):
            x.copy_(other)
    gpu.assert_near(gpu.replay(graph, results), gpu.expected(given)[0])


def test_a_program_of_one_graph_is_right(named, ran, inductor):
    given = gpu.packed(dim=59)
    torch._dynamo.reset()
    ran()
    attend = torch.compile(attnreg.varlen_attn, fullgraph=True, backend=inductor)
    found = gpu.run(attend, given, backend=named)
    torch._dynamo.reset()
    assert ran() == {named: (1, 1)}
    gpu.assert_near(found, gpu.expected(given)[0])


# ---- what isn't padded


@pytest.mark.only_for("FA4")
def test_gradients_that_fa4_computes_wrong_of_the_padded_head_dim_are_refused(named):
    if computes_gradients(named, 111):
        pytest.skip("its gradients are right here")
    with pytest.raises(UnsupportedInputError, match=r"padded from 111 to 112: head_dim must not be 8, 16, "):
        attnreg.varlen_attn(*gpu.packed(dim=111), backend=named)


def test_the_limits_of_the_backend_are_those_of_multiples_of_8(named):
    """Or the tests above would be about something else."""
    backend = registry.find(named).backend
    assert 59 not in backend.forward.head_dim and 64 in backend.forward.head_dim
    assert 59 not in backend.backward.head_dim and 64 in backend.backward.head_dim
