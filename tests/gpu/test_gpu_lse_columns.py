"""On a GPU: a gradient of the LSE is right on kernels that are given it in columns of the head dim."""

import pytest
import torch
from support import gpu, truth
from support.lse_gradients import beyond_the_rule, drawn

import attnreg
from attnreg.core import registry
from attnreg.core.adaptation.lse_columns import COLUMNS
from attnreg.errors import UnsupportedInputError
from attnreg.testing import Conformance
from attnreg.tools.measure import Case

pytestmark = pytest.mark.gpu

IN_COLUMNS = pytest.mark.only_for("FA2", "cuDNN")
BOTH = ("bfloat16", "float16")
PACKED = {"lens_q": (113, 1, 64, 0, 31, 7, 203), "lens_k": (203, 65, 64, 9, 33, 0, 113), "varlen": True}
SHAPES = {
    "packed": PACKED,
    "packed, rows of no sequence": PACKED | {"tail": 17, "poison": True},
    "dense": {"lens_q": (113, 113), "lens_k": (203, 203)},
}


def hold(name, *cases):
    """Run cases in both directions by the rule; none may be refused or declined."""
    kit = Conformance(name, "cuda")
    for case in cases:
        outcome = kit.run(case)
        assert outcome.passed, outcome
        assert outcome.errors.keys() == {"out", "lse", "dq", "dk", "dv"}, outcome.reasons


def with_lse(**options):
    return Case(name=f"{options}", grad_lse=True, **options)


def attend(case, given, **options):
    """Return output and LSE of a packed case, from leaves, and these."""
    call, leaves = given.call, [x.detach().requires_grad_() for x in given[:3]]
    lengths = call.cu_seqlens_q, call.cu_seqlens_k, call.max_q, call.max_k
    options |= {"window_size": case.window, "scale": case.scale, "enable_gqa": True}
    return leaves, attnreg.varlen_attn(*leaves, *lengths, return_aux=attnreg.AuxRequest(lse=True), **options)


# ---- values


@IN_COLUMNS
@pytest.mark.parametrize("lengths", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (8, 2)], ids=str)
@pytest.mark.parametrize(("dim", "heads"), [(64, (4, 4)), (128, (6, 2)), (40, (8, 1))], ids=str)
def test_every_layout_and_mask_is_right_in_both_directions(named, lengths, window, dim, heads):
    options = {"dims": (dim, dim), "heads": heads, "window": window, **lengths}
    hold(named, *(with_lse(dtype=dtype, **options) for dtype in BOTH))


FURTHER = {
    "sinks": {"sinks": True, "heads": (4, 2), "window": (-1, 0)},
    "scale": {"scale": 0.3},
    "large values": {"magnitude": 5.0},
    "gradient of a sum": {"grad_layout": "expanded"},
    "strided": {"layout": "last dim strided"},
    "rows that aren't aligned": {"layout": "odd rows"},
}


@IN_COLUMNS
@pytest.mark.parametrize("options", FURTHER.values(), ids=FURTHER)
def test_further_options_are_right(named, options):
    hold(named, *(with_lse(dtype=dtype, **PACKED, **options) for dtype in BOTH))


@pytest.mark.only_for("cuDNN")
def test_lengths_in_use_are_right(named):
    used = (200, 0, 1, 9, 33, 0, 65)
    hold(named, *(with_lse(dtype=dtype, seqused_k=used, window=(-1, 0), **PACKED) for dtype in BOTH))


@pytest.mark.only_for("FA2")
def test_deterministic_gradients_and_dropout_are_right(named):
    dropped = {"lens_q": (33, 7, 65), "lens_k": (64, 3, 33), "varlen": True, "dropout": 0.3}
    dense = {"lens_q": (33, 33), "lens_k": (64, 64), "dropout": 0.3}
    for options in (PACKED | {"deterministic": True, "window": (-1, 0)}, dropped, dense):
        hold(named, *(with_lse(dtype=dtype, **options) for dtype in BOTH))


@pytest.mark.only_for("FA2")
def test_fa2_takes_head_dims_up_to_248(named):
    capability = torch.cuda.get_device_capability()
    is_small = (8, 6) <= capability <= (8, 9) or capability >= (12, 0)  # too little shared memory
    dims = (8, 96, 128, 184) if is_small else (8, 96, 128, 192, 216, 248)
    hold(named, *(with_lse(dims=(dim, dim), window=(-1, 0), **PACKED) for dim in dims))


@pytest.mark.only_for("cuDNN")
def test_cudnn_takes_the_head_dims_of_most_models(named):
    dims = [(64, 64), (96, 96), (120, 120), (64, 96)]
    if torch.cuda.get_device_capability()[0] in (9, 10):
        dims += [(128, 128), (184, 120)]
    hold(named, *(with_lse(dims=pair, window=(-1, 0), **PACKED) for pair in dims))


@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
def test_the_efficient_kernels_are_given_it_too(dims):
    for dtype in ("float32", *BOTH):
        shape = {"lens_q": (113, 113), "lens_k": (203, 203), "dims": dims, "dtype": dtype}
        hold("efficient", with_lse(**shape), with_lse(window=(-1, 0), **shape))


# ---- through the front


@pytest.mark.parametrize("of_out", [1.0, 0.0], ids=["both", "of the LSE alone"])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3], ids=str)
@pytest.mark.parametrize("dtype", BOTH)
def test_a_gradient_of_every_size_is_right_at_every_repeated_call(named, ran, dtype, size, of_out):
    case = with_lse(dtype=dtype, heads=(4, 2), window=(-1, 0), **PACKED)
    for seed in range(3):
        given = drawn(case, size, of_out, "cuda", seed)
        leaves, results = attend(case, given, backend=named)
        grads = torch.autograd.grad(results, leaves, (given.grad_out, given.call.grad_lse))
        assert ran() == {named: (1, 1)}
        assert beyond_the_rule(case, given, grads) == {}
        assert all(grad.any() for grad in grads[:2])


@IN_COLUMNS
def test_a_gradient_beyond_float16_is_finite_and_right(named, ran):
    """Plain PyTorch in float16 has infinity for it, so the accuracy rule would admit anything."""
    lengths = {"lens_q": (9, 64), "lens_k": (600, 700), "varlen": True}
    case = with_lse(dtype="float16", **lengths)
    given = drawn(case, 1e5, device="cuda")
    assert given.call.grad_lse.abs().max() > 2 * torch.finfo(torch.float16).max
    leaves, results = attend(case, given, backend=named)
    grads = torch.autograd.grad(results, leaves, (given.grad_out, given.call.grad_lse))
    assert ran() == {named: (1, 1)}
    exact = [x.detach().double().requires_grad_() for x in leaves]
    out, lse = truth.varlen(*exact, given.call.cu_seqlens_q, given.call.cu_seqlens_k)
    incoming = given.grad_out.double(), given.call.grad_lse.double()
    for got, wanted in zip(grads, torch.autograd.grad((out, lse), exact, incoming), strict=True):
        atol = 4e-3 * float(wanted.abs().max())
        torch.testing.assert_close(got.double(), wanted, rtol=2e-2, atol=atol)


@IN_COLUMNS
def test_such_a_backward_of_a_registered_backend_goes_to_no_other(named, ran):
    case = with_lse(**PACKED)
    given = drawn(case, device="cuda")
    ran()
    with attnreg.register_backend(named):
        leaves, results = attend(case, given)
        grads = torch.autograd.grad(results, leaves, (given.grad_out, given.call.grad_lse))
    assert attnreg.stats().fallbacks == ()
    assert ran() == {named: (1, 1)}
    assert beyond_the_rule(case, given, grads) == {}


@pytest.mark.only_for("FA2")
def test_a_head_dim_without_room_for_columns_is_refused_with_the_reason(named, ran):
    case = with_lse(dims=(256, 256), **PACKED)
    given = drawn(case, device="cuda")
    leaves, (out, lse) = attend(case, given, backend=named)
    with pytest.raises(UnsupportedInputError, match=f"grad_lse takes {COLUMNS} more columns of the head dim"):
        torch.autograd.grad(lse, leaves[:2], given.call.grad_lse, retain_graph=True)
    torch.autograd.grad(out, leaves, given.grad_out)
    assert ran() == {named: (1, 1)}


@IN_COLUMNS
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)], ids=str)
def test_a_captured_backward_follows_its_gradients_and_waits_for_nothing(named, heads):
    case = with_lse(heads=heads, window=(-1, 0), **PACKED)
    given = drawn(case, device="cuda")
    grad_out, grad_lse = given.grad_out.clone(), given.call.grad_lse.clone()
    leaves, _ = attend(case, given, backend=named)

    def step():
        call = given.call
        lengths = call.cu_seqlens_q, call.cu_seqlens_k, call.max_q, call.max_k
        options = {"window_size": case.window, "enable_gqa": True, "backend": named}
        both = attnreg.varlen_attn(*leaves, *lengths, return_aux=attnreg.AuxRequest(lse=True), **options)
        return torch.autograd.grad(both, leaves, (grad_out, grad_lse))

    for _ in range(3):
        step()
    with gpu.no_waiting():
        step()
    graph, results = gpu.capture(step)
    for seed in (0, 1):
        later = drawn(case, 10.0**seed, device="cuda", seed=seed)
        grad_out.copy_(later.grad_out)
        grad_lse.copy_(later.call.grad_lse)
        now = given._replace(grad_out=later.grad_out, call=later.call)
        assert beyond_the_rule(case, now, gpu.replay(graph, results)) == {}


# ---- what the registry says of this machine


@IN_COLUMNS
def test_the_backend_declares_no_gradient_of_its_own(named):
    """Or the tests above would be about something else."""
    backward = registry.find(named).backend.backward
    assert backward.delta_from_out
    assert not backward.grad_lse
