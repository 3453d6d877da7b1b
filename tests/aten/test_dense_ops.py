"""Promises about dense calls of the ops that torch has for CUDA alone: values, layouts, and who runs them."""

import contextlib
import dataclasses
import threading

import pytest
import torch
from support import truth
from support.cuda_ops import (
    BACKWARD,
    FLASH_OPTIONS,
    FORWARD,
    NATIVE,
    SDPA,
    NativeKernel,
    assert_call_right,
    backward,
    call,
    described,
    flash_varlen,
    native_kernels,
)
from support.dense import (
    ADDED,
    CAUSAL,
    LAYOUTS,
    OPEN,
    SCATTERING,
    assert_near,
    assert_right,
    qkv,
    random_like,
    transposed,
    with_gradients,
)
from support.known import know

import attnreg
from attnreg.backends import math
from attnreg.core.aten.routing import router
from attnreg.core.torchlib import versions
from attnreg.core.torchlib.layout import aligned
from attnreg.errors import UnsupportedInputError

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES = {
    "square": {},
    "fewer queries": {"len_q": 3},
    "fewer keys": {"len_k": 3},
    "fewer key heads": {"heads": 6, "heads_k": 2},
}


@pytest.mark.pairwise("dtype", "shape", "causal", "kind")
@pytest.mark.parametrize("kind", SDPA)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_dense_call_is_right_with_the_ops_own_alignment(route, ran, kind, causal, shape, dtype):
    route()
    inputs = qkv(**shape, dtype=dtype)
    attnreg.register_backend("math")
    result = call(kind, inputs, causal=causal, scale=0.4)
    window = CAUSAL if causal else OPEN
    assert_call_right(kind, result, inputs, window=window, top_left=kind == "cudnn", scale=0.4)
    assert ran() == {"math": (1, 1)}


BIASES = {
    "added": ADDED,
    "the same everywhere": ADDED[:1, :1],
    "of the keys": ADDED[:, :, :1],
    "hiding": ADDED.masked_fill(ADDED > 0.5, -torch.inf),
    "boolean": ADDED > 0,
}


@pytest.mark.parametrize("bias", BIASES.values(), ids=BIASES)
@pytest.mark.parametrize("causal", [False, True])
def test_a_bias_of_the_cudnn_op_counts_forward_and_backward(route, ran, bias, causal):
    route()
    inputs = qkv()
    attnreg.register_backend("math")
    result = call("cudnn", inputs, bias=bias, causal=causal)
    assert_call_right("cudnn", result, inputs, bias=bias, window=CAUSAL if causal else OPEN, top_left=True)
    assert ran() == {"math": (1, 1)}


MISALIGNED = {
    "one element after the start": lambda x: torch.cat((x.new_zeros(1), x.flatten()))[1:].view_as(x),
    "odd rows": lambda x: torch.nn.functional.pad(x, (0, 1))[..., :-1],
    "every other element": lambda x: torch.stack((x, x), -1)[..., 0],
}


@pytest.mark.parametrize("kind", SDPA)
@pytest.mark.parametrize("layout", MISALIGNED.values(), ids=MISALIGNED)
def test_torchs_own_kernel_is_given_tensors_that_it_can_load(route, ran, kind, layout):
    kernels = native_kernels()
    route(kernels)
    attnreg.core.policy.current.activate(True)
    inputs = [
        layout(x.detach().transpose(1, 2)).transpose(1, 2).requires_grad_()
        for x in qkv(6, 6, dim=16, dtype=torch.bfloat16)
    ]
    for _ in range(3):
        assert_call_right(kind, call(kind, inputs), inputs)
    assert ran() == {NATIVE[kind]: (3, 3)}
    forwards, backwards = kernels[FORWARD[kind]].calls, kernels[BACKWARD[kind]].calls
    loaded = [x for args, _ in forwards for x in args[:3]] + [x for args, _ in backwards for x in args[:5]]
    assert len(loaded) == 3 * 8
    assert all(aligned(x) for x in loaded)
    # Torch's kernels lay the output out as the query, and torch.compile asserts that.
    as_came = inputs[0] if kind == "cudnn" else inputs[0].transpose(1, 2)
    assert forwards[0][0][0].stride() == torch.empty_like(as_came).stride()


@pytest.mark.parametrize("kind", SDPA)
@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_torchs_own_kernel_on_a_gpu_is_not_given_a_scale_that_is_not_above_0(route, ran, kind, scale):
    kernels = native_kernels()
    route(kernels)
    attnreg.core.policy.current.activate(True)
    inputs = qkv(6, 6)
    for _ in range(3):
        assert_call_right(kind, call(kind, inputs, scale=scale), inputs, scale=scale)
    assert NATIVE[kind] not in ran()
    assert not any(kernel.calls for kernel in kernels.values())


@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
@pytest.mark.parametrize("counts_on_fa4", [True, False])
def test_head_dims_that_the_selector_passes_for_fa4_are_not_fa2s(
    route, ran, fake, monkeypatch, counts_on_fa4, layout
):
    """From torch 2.15 on the flash op gets 192 with values of 128, if torch was told to count on FA4."""
    monkeypatch.setattr(versions, "selector_counts_on_fa4", lambda: counts_on_fa4)
    kernels = native_kernels()
    route(kernels)
    know(monkeypatch, fake("FA2", head_dim_v=None).backend, math.BACKEND)
    attnreg.core.policy.current.activate(True)
    query, key, value = qkv(6, 6, dim=24, dtype=torch.bfloat16)
    if layout == "BSHD":
        query = query.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    narrow = value.detach()[..., :16].contiguous().requires_grad_()
    for _ in range(3):
        inputs = query, key, narrow
        result = call("flash", inputs)
        assert_call_right("flash", result, inputs)
        laid_out = result[0] if layout == "BHSD" else result[0].transpose(1, 2)
        assert not counts_on_fa4 or laid_out.is_contiguous()
    assert ran() == {"math" if counts_on_fa4 else "FA2": (3, 3)}
    equal = query, key, value
    for _ in range(3):
        assert_call_right("flash", call("flash", equal), equal)
    assert ran() == {"FA2": (3, 3)}


def test_torchs_cudnn_backward_is_given_a_gradient_laid_out_as_its_output(route, ran):
    """Torch looks its graph up without looking at the gradient's strides."""
    kernels = native_kernels()
    route(kernels)
    attnreg.core.policy.current.activate(True)
    inputs = [x.detach().requires_grad_() for x in qkv(6, 6, dim=16)]
    for layout in (lambda x: x, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)):
        for _ in range(3):
            out, *_ = call("cudnn", inputs)
            grad = layout(random_like(out))
            expected = truth.dense(*(double := [x.detach().double().requires_grad_() for x in inputs]))[0]
            expected = torch.autograd.grad(expected, double, grad.double())
            for got, right in zip(torch.autograd.grad(out, inputs, grad), expected, strict=True):
                truth.assert_near(got, right)
    assert ran() == {"cuDNN": (6, 6)}
    given = [args for args, _ in kernels[BACKWARD["cudnn"]].calls]
    assert [grad.stride() == out.stride() for grad, *_, out in (args[:5] for args in given)] == [True] * 6


def test_a_bias_wider_than_the_keys_that_a_causal_mask_leaves_is_cut_with_them(route):
    route()
    inputs, bias = qkv(3, 6), ADDED[:, :, :3]
    out, *_ = call("cudnn", inputs, bias=bias, causal=True)
    assert_right(with_gradients(out, inputs), inputs, bias=bias, window=CAUSAL, top_left=True)


def test_a_bias_is_not_lost_after_calls_without_one(route, ran):
    route(native_kernels())
    attnreg.core.policy.current.activate(True)
    inputs = qkv()
    for _ in range(2):
        call("cudnn", inputs)[0].sum().backward()
    for bias in BIASES.values():
        assert_call_right("cudnn", call("cudnn", inputs, bias=bias), inputs, bias=bias)
    assert ran() == {"cuDNN": (2 + len(BIASES), 2 + len(BIASES))}


def test_a_dense_call_of_the_flash_op_with_every_option(route, ran, fake):
    route()
    recorder = fake("mine")
    inputs = transposed(*(x.detach() for x in qkv(5, 7)))
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    options = {"scale": 0.3, "window_size_left": 2, "alibi_slopes": slopes, "num_splits": 3}
    options = {name: value for name, value in options.items() if name in FLASH_OPTIONS}
    with attnreg.register_backend(recorder.backend):
        out, lse, rng_state, unused, debug = flash_varlen(inputs, None, None, 5, 7, causal=True, **options)
    assert ran() == {"mine": (1, 0)}
    (*_, given) = recorder.forwards[0]
    assert (given.window, given.num_splits, given.scale) == ((2, 0), options.get("num_splits"), 0.3)
    assert given.alibi_slopes is slopes
    distance = (torch.arange(7) - torch.arange(5)[:, None] - 2).abs()
    bias = (-slopes.double()[:, None, None] * distance)[None]
    expected, expected_lse = truth.dense(*transposed(*inputs), bias, window=(2, 0), scale=0.3)
    truth.assert_near(out.transpose(1, 2), expected)
    truth.assert_near(lse, expected_lse)
    states = [(tuple(x.shape), x.dtype) for x in (rng_state, unused)]
    assert states == [((2,), torch.uint64), ((), torch.uint64)]
    assert debug.shape == (0,)


@pytest.mark.pairwise("native", "layout", "kind")
@pytest.mark.parametrize("kind", SDPA)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("scoped", [False, True])
@pytest.mark.parametrize("native", [False, True])
def test_shapes_dtypes_and_strides_are_those_of_torchs_meta_function(route, fake, kind, layout, scoped, native):  # fmt: skip # noqa: E501
    route(native_kernels() if native else None)
    inputs = [layout(x.detach()) for x in qkv(6, 5)]
    on_meta = [x.to("meta").as_strided(x.shape, x.stride()) for x in inputs]
    expected = call(kind, on_meta)
    with attnreg.register_backend(fake("scattered", load=lambda: SCATTERING).backend):
        with attnreg.use_backend("scattered") if scoped else contextlib.nullcontext():
            result = call(kind, inputs)
        assert attnreg.stats().calls == {"scattered": {"forward": 1, "backward": 0}}
        assert described(result) == described(expected)
        grad = random_like(result[0])
        grads = backward(kind, inputs, result, grad)
    assert described(grads) == described(backward(kind, on_meta, expected, grad.to("meta")))
    assert attnreg.stats().calls == {"scattered": {"forward": 1, "backward": 1}}
    leaves = [x.requires_grad_() for x in inputs]
    assert_right([result[0], *grads], leaves)


@pytest.mark.parametrize("kind", SDPA)
def test_compiled_in_one_graph_the_choice_is_made_when_it_runs(route, whole_graph, ran, fake, kind):
    route()
    inputs = qkv()
    attend = whole_graph(lambda *x: call(kind, x, causal=True)[0].sin(), backend="aot_eager")
    for name, registered in (("math", "math"), ("mine", fake("mine").backend)):
        with attnreg.register_backend(registered):
            results = with_gradients(attend(*inputs), inputs)
        assert_near(results, inputs, truth.dense(*inputs, window=CAUSAL)[0].sin())
        assert ran() == {name: (1, 1)}


# ---- who runs a call


@pytest.mark.parametrize("kind", SDPA)
@pytest.mark.parametrize("debug", [False, True])
def test_every_argument_of_calls_that_are_torchs_own_reaches_its_kernel_untouched(route, ran, kind, debug):
    """With nothing registered all are; with a debug mask they always are."""
    kernels = native_kernels()
    route(kernels)
    inputs, dropout = qkv(), 0.25 if debug else 0.0
    with (
        attnreg.register_backend("math") if debug else contextlib.nullcontext(),
        torch.set_grad_enabled(not debug),
    ):
        result = call(kind, inputs, dropout, True, debug, scale=0.3)
    ((args, kwargs),) = kernels[FORWARD[kind]].calls
    assert kwargs == {"scale": 0.3}
    # Below autograd the tensors are others, of the same memory.
    assert [x.data_ptr() for x in args[:3]] == [x.data_ptr() for x in inputs]
    lengths, rest = (None, None, 6, 6), (dropout, True, debug)
    expected = (*lengths, *rest) if kind == "flash" else (None, *lengths, True, *rest)
    assert args[3:] == expected[: len(args) - 3]  # what has its default may be left out
    assert not any(expected[len(args) - 3 :])
    if not debug:
        assert_call_right(kind, result, inputs, window=CAUSAL, scale=0.3)
        assert len(kernels[BACKWARD[kind]].calls) == 1
    assert ran() == {}


@pytest.mark.parametrize("kind", SDPA)
def test_a_backend_that_cannot_run_the_call_gives_way_to_torchs_own(route, ran, fake, kind):
    route(native_kernels())
    inputs = qkv()
    with attnreg.register_backend(fake("mine", causal=False).backend):
        assert_call_right(kind, call(kind, inputs, causal=True), inputs, window=CAUSAL)
        (row,) = [row for row in attnreg.stats().fallbacks if row.backend == "mine"]
        assert (row.reason, row.count) == ("is_causal must be False, got True", 2)
        assert ran() == {NATIVE[kind]: (1, 1)}
        assert_call_right(kind, call(kind, inputs), inputs)
        assert ran() == {"mine": (1, 1)}


@pytest.mark.parametrize("kind", SDPA)
@pytest.mark.parametrize("native_first", [False, True])
def test_a_forward_of_one_pairs_with_a_backward_of_the_other(route, ran, kind, native_first):
    kernels = native_kernels()
    route(kernels)
    inputs = qkv(dtype=torch.float64)
    if native_first:
        result = call(kind, inputs, causal=True)
        attnreg.register_backend("math")
    else:
        with attnreg.register_backend("math"):
            result = call(kind, inputs, causal=True)
    assert_right(with_gradients(result[0], inputs), inputs, window=CAUSAL)
    assert ran() == {"math": (0, 1) if native_first else (1, 0)}
    assert len(kernels[BACKWARD[kind]].calls) == (0 if native_first else 1)


@pytest.mark.parametrize("kind", SDPA)
@pytest.mark.parametrize("native", [False, True])
def test_a_scope_holds_for_the_backward_outside_of_it(route, ran, fake, kind, native):
    route(native_kernels() if native else None)
    inputs = qkv()
    with attnreg.register_backend(fake("mine").backend), attnreg.register_backend("math"):
        with attnreg.use_backend("mine"):
            result, other = call(kind, inputs, causal=True), call(kind, inputs)
        assert_right(with_gradients(result[0], inputs), inputs, window=CAUSAL)
        assert ran() == {"mine": (2, 1)}
        thread = threading.Thread(target=other[0].sum().backward)
        thread.start()
        thread.join()
        assert ran() == {"mine": (0, 1)}
        assert inputs[0].grad is not None


@pytest.mark.parametrize("kind", SDPA)
def test_a_scope_holds_for_the_backward_though_torchs_own_kernel_ran_its_forward(route, ran, fake, kind):
    route(native_kernels())
    inputs = qkv()
    full = fake("mine").backend
    backend = dataclasses.replace(full, forward=dataclasses.replace(full.forward, causal=False))
    with attnreg.register_backend(backend):
        with attnreg.use_backend("mine"):
            *_, seed, offset, _ = result = call(kind, inputs, causal=True)
        assert ran() == {NATIVE[kind]: (1, 0)}
        assert_right(with_gradients(result[0], inputs), inputs, window=CAUSAL)
        assert ran() == {"mine": (0, 1)}
    # The choice token keeps its value.
    assert torch.equal(seed.to(torch.int64), torch.tensor([3, 4] if kind == "flash" else 3))
    assert offset.item() == (0 if kind == "flash" else 4)


# ---- calls that are torch's own


QUERY, USED = torch.randn(2, 4, 6, 8), torch.tensor([3, 4], dtype=torch.int32)
OFFSETS, OTHERS = torch.tensor([0, 4, 12]).int(), torch.tensor([0, 5, 12]).int()
DENSE, PACKED = (QUERY, QUERY, QUERY, None, None, None, 6, 6), (*[QUERY.flatten(0, 1)] * 3, None)
VARLEN = "a packed call with a debug mask, a bias or a mask aligned top-left"
TORCHS_OWN = {
    "debug mask of flash": ("flash", (*DENSE[:3], *DENSE[4:], 0.0, False, True), {}, "return_debug_mask"),
    "debug mask": ("cudnn", (*DENSE, True, 0.0, False, True), {}, "return_debug_mask"),
    "counted keys": (
        "cudnn",
        (*DENSE, True),
        {"seqused_k": USED},
        "seqused_k or block_table of a dense call",
    ),
    "packed, a debug mask": ("cudnn", (*PACKED, OFFSETS, OTHERS, 8, 8, True, 0.0, False, True), {}, VARLEN),
    "packed, causal with other lengths": (
        "cudnn",
        (*PACKED, OFFSETS, OTHERS, 8, 8, True, 0.0, True),
        {},
        VARLEN,
    ),
    "packed, a bias": ("cudnn", (*PACKED[:3], ADDED, OFFSETS, OTHERS, 8, 8, True), {}, VARLEN),
}


@pytest.mark.parametrize(("kind", "args", "kwargs", "reason"), TORCHS_OWN.values(), ids=TORCHS_OWN)
def test_a_call_that_only_torch_understands_is_torchs_own_or_an_error(
    routes, ran, kind, args, kwargs, reason
):
    kernel = NativeKernel(lambda *args, **kwargs: "torch's")
    run, run_without = (router(routes[FORWARD[kind]], one) for one in (kernel, None))
    kwargs = {**kwargs, "scale": 0.3}
    with attnreg.use_backend("math"):
        assert run(*args, **kwargs) == ("torch's", None)
        assert kernel.calls == [(args, kwargs)]
        with pytest.raises(UnsupportedInputError) as error:
            run_without(*args, **kwargs)
    assert str(error.value) == f"aten::{FORWARD[kind]}: {reason}, and torch has no kernel for this device"
    (row,) = attnreg.stats().bypassed
    assert (row.op, row.kernel, row.reason, row.count) == (
        f"aten::{FORWARD[kind]}", routes[FORWARD[kind]].native.kernel, reason, 1,
    )  # fmt: skip
    assert ran() == {}
