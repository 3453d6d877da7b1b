"""The routers of the ops that torch has for CUDA alone, put over the CPU's key to run without a GPU.

In the place of torch's own kernels stand originals written here, with the conventions of torch's: the
LSE of a row without keys is +inf, a causal mask of cuDNN's ops is aligned top-left. So do the ops below
`F.scaled_dot_product_attention`, whose kernels call those that are routed and do nothing else.
"""

import contextlib
import ctypes
import dataclasses
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support import truth
from support.fake_cudnn import memory

import attnreg
from attnreg import aten
from attnreg.aten import cudnn, flash, routing
from attnreg.aten.routing import router
from attnreg.backends import math
from attnreg.contract.launchers import AddressLauncher, OpLauncher
from attnreg.dispatch import call_cache
from attnreg.errors import UnsupportedInputError
from attnreg.torchlib import captured
from attnreg.torchlib.layout import contiguous_strides

CAUSAL = (-1, 0)
ROUTES = {route.op: route for route in (*cudnn.ROUTES, *flash.ROUTES)}
SDPA = {"flash": "_scaled_dot_product_flash_attention", "cudnn": "_scaled_dot_product_cudnn_attention"}
FORWARD = {"flash": "_flash_attention_forward", "cudnn": "_cudnn_attention_forward"}
BACKWARD = {"flash": "_flash_attention_backward", "cudnn": "_cudnn_attention_backward"}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=["python", "compiled"])
def route(request):
    """Register the routers at the CPU's key: `route({op: original, ...})`; other ops have no original."""
    if request.param == "compiled":
        request.getfixturevalue("compiled_routers")
    was_installed = aten.installed()
    aten.restore()
    torchs, routers = (torch.library.Library("aten", "IMPL") for _ in range(2))

    def remove():
        call_cache.remove_routers()
        routers._destroy()

    def register(originals=None):
        kernels = originals or {}
        module = call_cache.load()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Warning only once for all operators")
            for op, kernel in kernels.items():
                torchs.impl(op, kernel, "CPU")
            for op, found in ROUTES.items():
                function = router(found, kernels.get(op))
                if module is None:
                    routers.impl(op, aten._results_of(function), "CPU")
                else:
                    module.add_router(op, "CPU", tuple(found.layout), aten._described(function))
            for op, kernel in above().items():
                routers.impl(op, kernel, "CPU")
        # These are the routers now, so that registering a backend installs no others.
        aten._remove, captured.compiled = remove, module is not None

    yield register
    aten.restore()
    torchs._destroy()
    if was_installed:
        aten.ensure()


class Original:
    """Torch's own kernel of an op: keeps what it is called with."""

    def __init__(self, function):
        self.function = function
        self.calls = []

    def __call__(self, *args, **kwargs):
        self.calls.append((args, kwargs))
        return self.function(*args, **kwargs)


def random_state():
    return torch.tensor([3, 4], dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)


def as_torchs_lse(lse):
    return lse.masked_fill(lse == -torch.inf, torch.inf).float()


def above():
    """Return kernels of the ops below scaled_dot_product_attention, which do what torch's do on CUDA."""
    ops = torch.ops.aten

    def flash(query, key, value, p=0.0, causal=False, debug=False, *, scale=None):
        lengths = query.shape[2], key.shape[2]
        out, lse, *rest = ops._flash_attention_forward(
            *heads_second(query, key, value), None, None, *lengths, p, causal, debug, scale=scale
        )
        return out.transpose(1, 2), lse, None, None, *lengths, *rest

    def flash_backward(grad, query, key, value, out, *rest, scale=None):
        tensors = heads_second(grad, query, key, value, out)
        return heads_second(*ops._flash_attention_backward(*tensors, *rest, scale=scale))

    def cudnn(query, key, value, bias, *rest, scale=None):
        lengths = None, None, query.shape[2], key.shape[2]
        return ops._cudnn_attention_forward(query, key, value, bias, *lengths, *rest, scale=scale)

    return {
        SDPA["flash"]: flash,
        SDPA["flash"] + "_backward": flash_backward,
        SDPA["cudnn"]: cudnn,
        SDPA["cudnn"] + "_backward": ops._cudnn_attention_backward,
    }


def heads_second(*tensors):
    """Exchange heads and lengths."""
    return tuple(x.transpose(1, 2) for x in tensors)


def torchs_flash(query, key, value, cu_q, cu_k, max_q, max_k, p, is_causal, debug, *, scale=None):
    window = CAUSAL if is_causal else (-1, -1)
    out, lse = truth.dense(*heads_second(query, key, value), window=window, scale=scale)
    mask = query.new_ones(1) if debug else query.new_empty(0)
    return out.to(query.dtype).transpose(1, 2), as_torchs_lse(lse), *random_state(), mask


def torchs_flash_backward(grad, query, key, value, out, lse, cu_q, cu_k, max_q, max_k, p, is_causal, seed, offset, *, scale=None):  # fmt: skip # noqa: E501
    grad, *inputs = heads_second(grad, query, key, value)
    window = CAUSAL if is_causal else (-1, -1)
    return heads_second(*differentiated(grad, inputs, window=window, scale=scale))


def torchs_cudnn(query, key, value, bias, cu_q, cu_k, max_q, max_k, lse, p=0.0, is_causal=False, debug=False, *, scale=None):  # fmt: skip # noqa: E501
    window = CAUSAL if is_causal else (-1, -1)
    out, lse = truth.dense(query, key, value, bias, window=window, top_left=True, scale=scale)
    seed, offset = torch.tensor(3), torch.tensor(4)
    return out.to(query.dtype), lse.float()[..., None], None, None, max_q, max_k, seed, offset, None


def torchs_cudnn_backward(grad, query, key, value, out, lse, seed, offset, bias, cu_q, cu_k, max_q, max_k, p, is_causal, *, scale=None):  # fmt: skip # noqa: E501
    window = CAUSAL if is_causal else (-1, -1)
    return differentiated(grad, (query, key, value), bias, window=window, scale=scale, top_left=True)


def differentiated(grad, inputs, *bias, **options):
    def run():
        leaves = [x.detach().double().requires_grad_() for x in inputs]
        out, _ = truth.dense(*leaves, *bias, **options)
        return torch.autograd.grad(out, leaves, grad.double())

    return above_autograd(run, inputs)


def above_autograd(run, inputs):
    """Run a function that differentiates: a kernel can't, but another thread knows of no kernel."""
    with ThreadPoolExecutor(1) as thread:
        grads = thread.submit(run).result()
    return tuple(grad.to(x.dtype) for grad, x in zip(grads, inputs, strict=True))


def torchs_own():
    """Return originals of dense calls."""
    return {
        FORWARD["flash"]: Original(torchs_flash),
        BACKWARD["flash"]: Original(torchs_flash_backward),
        FORWARD["cudnn"]: Original(torchs_cudnn),
        BACKWARD["cudnn"]: Original(torchs_cudnn_backward),
    }


def tensors(len_q=6, len_k=6, heads=(4, 4), dim=8, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (2, heads[0], len_q, dim), (2, heads[1], len_k, dim), (2, heads[1], len_k, dim)
    made = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    return [x.requires_grad_() for x in made]


def random_like(tensor):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.dtype)


def call(kind, inputs, dropout=0.0, causal=False, debug=False, bias=None, scale=None):
    """Call one of the two dense ops; returns all that it returns."""
    op = getattr(torch.ops.aten, SDPA[kind])
    if kind == "flash":
        return op(*inputs, dropout, causal, debug, scale=scale)
    return op(*inputs, bias, True, dropout, causal, debug, scale=scale)


def check_against_truth(out, inputs, lse=None, **meant):
    expected, expected_lse = truth.dense(*inputs, **meant)
    truth.assert_near(out, expected)
    if lse is not None:
        truth.assert_near(lse, expected_lse, torch.float32)
    check_gradients(out, inputs, expected)


def check_gradients(out, inputs, expected):
    grad = random_like(out)
    got = torch.autograd.grad(out, inputs, grad)
    right = torch.autograd.grad(expected, inputs, grad.double(), materialize_grads=True)
    for one, other in zip(got, right, strict=True):
        truth.assert_near(one, other.double())


# ---- dense: (B, H, S, D)


@pytest.mark.parametrize("kind", SDPA)
@pytest.mark.parametrize("name", ["torch's own", "math"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_dense_call_that_came_before_is_the_same_and_takes_compiled_routers_no_python(
    route, kind, name, causal, monkeypatch, ran
):
    route(torchs_own())
    backend = {"flash": "FA2", "cudnn": "cuDNN"}[kind] if name == "torch's own" else "math"
    inputs = tensors(dtype=torch.float32)
    asked, original = [], routing.state

    def state():
        asked.append(1)
        return original()

    attnreg.install()  # torch's own kernels lead the default order of their ops
    with attnreg.register_backend("math") if backend == "math" else contextlib.nullcontext():
        for _ in range(4):  # the first is examined, the second known, the third told of
            first = call(kind, inputs, causal=causal)
            torch.autograd.grad(first[0], inputs, random_like(first[0]))
        monkeypatch.setattr(routing, "state", state)
        again = call(kind, inputs, causal=causal)
        for one, other in zip(first, again, strict=True):
            assert (one is None) == (other is None)
            if isinstance(one, torch.Tensor) and one.is_floating_point():
                assert torch.equal(one, other)
            elif not isinstance(one, torch.Tensor):
                assert one == other
        check_against_truth(again[0], inputs, window=CAUSAL if causal else (-1, -1))
        assert (asked == []) is bool(captured.compiled)
    assert ran() == {backend: (5, 5)}


@pytest.mark.parametrize("kind", SDPA)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_kernel_may_decline_a_dense_call_that_came_before(route, kind, direction, ran):
    route(torchs_own())
    reference, declining, inputs = math.BACKEND.load(), [], tensors(dtype=torch.float32)

    def choosy(which):
        def run(*arguments):
            if which in declining:
                raise UnsupportedInputError("not any more")
            return getattr(reference, which)(*arguments)

        return run

    limits = attnreg.Capabilities(devices=("cpu",), dtypes=("float32",))
    kernels = attnreg.Kernels(choosy("forward"), choosy("backward"))
    backend = attnreg.Backend(name="choosy", forward=limits, backward=limits, load=lambda: kernels)
    with attnreg.register_backend(backend):
        for turn in range(8):
            if turn == 5:
                declining.append(direction)
            results = call(kind, inputs)
            check_against_truth(results[0], inputs)
    assert attnreg.stats().fallbacks == (attnreg.dispatch.counters.Fallback("choosy", "not any more", 3),)
    torchs = {"flash": "FA2", "cudnn": "cuDNN"}[kind]
    own, others = ((5, 8), (3, 0)) if direction == "forward" else ((8, 5), (0, 3))
    assert ran() == {"choosy": own, torchs: others}


SHAPES = {"square": (6, 6), "fewer queries": (3, 6), "fewer keys": (6, 3)}


@pytest.mark.parametrize("kind", SDPA)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_dense_call_is_right_with_the_ops_own_alignment(route, ran, kind, causal, lengths, dtype):
    route()
    inputs = tensors(*lengths, dtype=dtype)
    attnreg.register_backend("math")
    out, lse, *_ = call(kind, inputs, causal=causal, scale=0.4)
    lse = lse.squeeze(-1) if kind == "cudnn" else lse
    window = CAUSAL if causal else (-1, -1)
    check_against_truth(out, inputs, lse, window=window, top_left=kind == "cudnn", scale=0.4)
    assert ran() == {"math": (1, 1)}


@pytest.mark.parametrize("kind", SDPA)
def test_fewer_key_heads_are_shared(route, kind):
    route()
    inputs = tensors(heads=(6, 2))
    out, *_ = call(kind, inputs)
    check_against_truth(out, inputs)


ADDED = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(6))
HIDING = ADDED.masked_fill(ADDED > 0.5, -torch.inf)


BIASES = {
    "added": ADDED,
    "the same everywhere": ADDED[:1, :1],
    "of the keys": ADDED[:, :, :1],
    "hiding": HIDING,
    "boolean": ADDED > 0,
}


@pytest.mark.parametrize("bias", BIASES.values(), ids=BIASES)
@pytest.mark.parametrize("causal", [False, True])
def test_a_bias_of_the_cudnn_op_counts_forward_and_backward(route, ran, bias, causal):
    route()
    inputs = tensors()
    attnreg.register_backend("math")
    out, lse, *_ = call("cudnn", inputs, bias=bias, causal=causal)
    window = CAUSAL if causal else (-1, -1)
    check_against_truth(out, inputs, lse.squeeze(-1), bias=bias, window=window, top_left=True)
    assert ran() == {"math": (1, 1)}


def test_a_bias_wider_than_the_keys_that_a_causal_mask_leaves_is_cut_with_them(route):
    route()
    inputs, bias = tensors(3, 6), ADDED[:, :, :3]
    out, *_ = call("cudnn", inputs, bias=bias, causal=True)
    check_against_truth(out, inputs, bias=bias, window=CAUSAL, top_left=True)


LAYOUTS = {
    "contiguous": lambda x: x,
    "lengths first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "part of a fused projection": lambda x: torch.stack((x, x, x), 3)[:, :, :, 1],
    "one for all heads": lambda x: x[:, :1].expand_as(x),
    "batch last": lambda x: x.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3),
}


def described(result):
    """Return what a compiler asserts of a result of an op."""
    return [
        (tuple(x.shape), x.dtype, x.stride()) if isinstance(x, torch.Tensor) and x.numel() else None
        for x in result
    ]


@pytest.mark.parametrize("kind", SDPA)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("original", [False, True])
def test_shapes_dtypes_and_strides_are_those_of_torchs_meta_function(route, fake, kind, layout, pinned, original):  # fmt: skip # noqa: E501
    route(torchs_own() if original else None)
    inputs = [layout(x.detach()) for x in tensors(6, 5)]
    on_meta = [x.to("meta").as_strided(x.shape, x.stride()) for x in inputs]
    expected = call(kind, on_meta)
    assert [x.stride() for x in on_meta] == [x.stride() for x in inputs]

    with attnreg.register_backend(fake("scattered", load=lambda: SCATTERING).backend):
        if pinned:
            with attnreg.use_backend("scattered"):
                result = call(kind, inputs)
        else:
            result = call(kind, inputs)
        assert attnreg.stats().calls == {"scattered": {"forward": 1, "backward": 0}}
        assert described(result) == described(expected)
        grad = random_like(result[0])
        grads = backward(kind, inputs, result, grad)
    meta_grads = backward(kind, on_meta, expected, grad.to("meta"))
    assert described(grads) == described(meta_grads)
    assert attnreg.stats().calls == {"scattered": {"forward": 1, "backward": 1}}
    for one, other in zip(grads, differentiated(grad, inputs), strict=True):
        truth.assert_near(one, other.double())


def scattered(x):
    """Return the same values in strides that nobody expects."""
    return torch.stack((x, x), -1)[..., 0]


# A backend may lay out its results as it likes.
SCATTERING = attnreg.Kernels(
    lambda *arguments: tuple(map(scattered, math.forward(*arguments))),
    lambda *arguments: tuple(map(scattered, math.backward(*arguments))),
)


def backward(kind, inputs, result, grad, dropout=0.0, causal=False, bias=None):
    """Call the backward op by hand, as torch's derivative formula does."""
    out, lse, cu_q, cu_k, max_q, max_k, seed, offset, _ = result
    op = getattr(torch.ops.aten, SDPA[kind] + "_backward")
    lengths = (cu_q, cu_k, max_q, max_k)
    if kind == "flash":
        return op(grad, *inputs, out, lse, *lengths, dropout, causal, seed, offset)
    return op(grad, *inputs, out, lse, seed, offset, bias, *lengths, dropout, causal)


def test_values_of_another_head_dim_come_in_the_strides_that_torch_expects(route):
    route()
    query, key, value = tensors()
    narrow = value.detach()[..., :5].requires_grad_()
    for layout in (LAYOUTS["contiguous"], LAYOUTS["lengths first"]):
        inputs = [layout(x.detach()).requires_grad_() for x in (query, key, narrow)]
        result = call("cudnn", inputs)
        expected = call("cudnn", [x.detach().to("meta") for x in inputs])
        assert described(result) == described(expected)
        check_against_truth(result[0], inputs)


# ---- torch's own kernels


@pytest.mark.parametrize("kind", SDPA)
def test_with_nothing_registered_every_argument_reaches_the_original_untouched(route, ran, kind):
    originals = torchs_own()
    route(originals)
    inputs = tensors()
    result = call(kind, inputs, 0.0, True, scale=0.3)
    ((args, kwargs),) = originals[FORWARD[kind]].calls
    assert kwargs == {"scale": 0.3}
    # Below autograd the tensors are others, of the same memory.
    assert [x.data_ptr() for x in args[:3]] == [x.data_ptr() for x in inputs]
    assert True in args[3:]
    check_against_truth(result[0], inputs, window=CAUSAL, scale=0.3)
    assert len(originals[BACKWARD[kind]].calls) == 1
    assert ran() == {}


@pytest.mark.parametrize(("kind", "name"), [("flash", "FA2"), ("cudnn", "cuDNN")])
def test_installed_torchs_own_kernel_is_the_default_and_counted_by_name(route, ran, monkeypatch, kind, name):
    originals = torchs_own()
    route(originals)
    monkeypatch.setattr(attnreg.selection.policy, "_active", True)
    attnreg._registry.changed()
    inputs = tensors()
    for times in (1, 2):  # the second time by the short way
        out, *_ = call(kind, inputs, causal=True)
        check_against_truth(out, inputs, window=CAUSAL)
        assert ran() == {name: (1, 1)}
        assert len(originals[FORWARD[kind]].calls) == times
    out, *_ = call(kind, inputs, scale=0.3)
    check_against_truth(out, inputs, scale=0.3)
    assert ran() == {name: (1, 1)}


@pytest.mark.parametrize(("kind", "name"), [("flash", "FA2"), ("cudnn", "cuDNN")])
def test_a_backend_that_cannot_run_the_call_gives_way_to_torchs_own(route, ran, fake, kind, name):
    route(torchs_own())
    inputs = tensors()
    with attnreg.register_backend(fake("mine", causal=False).backend):
        out, *_ = call(kind, inputs, causal=True)
        check_against_truth(out, inputs, window=CAUSAL)
        (row,) = [row for row in attnreg.stats().fallbacks if row.backend == "mine"]
        assert (row.reason, row.count) == ("is_causal must be False, got True", 2)
        assert ran() == {name: (1, 1)}
        out, *_ = call(kind, inputs)
        check_against_truth(out, inputs)
        assert ran() == {"mine": (1, 1)}


@pytest.mark.parametrize("kind", SDPA)
@pytest.mark.parametrize("first", ["torch", "math"])
def test_a_forward_of_one_pairs_with_a_backward_of_the_other(route, ran, kind, first):
    originals = torchs_own()
    route(originals)
    inputs = tensors(dtype=torch.float64)
    name = "cuDNN" if kind == "cudnn" else "FA2"
    if first == "torch":
        out, *_ = call(kind, inputs, causal=True)
        handle = attnreg.register_backend("math")
        check_against_truth(out, inputs, window=CAUSAL)
        assert ran() == {"math": (0, 1)}
        handle.remove()
    else:
        with attnreg.register_backend("math"):
            out, *_ = call(kind, inputs, causal=True)
        check_against_truth(out, inputs, window=CAUSAL)
        assert ran() == {"math": (1, 0)}
        assert len(originals[BACKWARD[kind]].calls) == 1, name


@pytest.mark.parametrize("kind", SDPA)
@pytest.mark.parametrize("original", [False, True])
def test_a_scope_holds_for_the_backward_outside_of_it(route, ran, fake, kind, original):
    route(torchs_own() if original else None)
    inputs = tensors()
    with attnreg.register_backend(fake("mine").backend), attnreg.register_backend("math"):
        with attnreg.use_backend("mine"):
            out, *_ = call(kind, inputs, causal=True)
        check_against_truth(out, inputs, window=CAUSAL)
        assert ran() == {"mine": (1, 1)}
        with attnreg.use_backend("mine"):
            out, *_ = call(kind, inputs)
        thread = threading.Thread(target=out.sum().backward)
        thread.start()
        thread.join()
        assert ran() == {"mine": (1, 1)}
        assert inputs[0].grad is not None


@pytest.mark.parametrize("kind", SDPA)
def test_a_scope_holds_for_the_backward_though_torchs_own_kernel_ran_its_forward(route, ran, fake, kind):
    route(torchs_own())
    inputs = tensors()
    full = fake("mine").backend
    backend = dataclasses.replace(full, forward=dataclasses.replace(full.forward, causal=False))
    with attnreg.register_backend(backend):
        with attnreg.use_backend("mine"):
            *_, seed, offset, _ = result = call(kind, inputs, causal=True)
        name = "cuDNN" if kind == "cudnn" else "FA2"
        assert ran() == {name: (1, 0)}
        check_against_truth(result[0], inputs, window=CAUSAL)
        assert ran() == {"mine": (0, 1)}
    # What carries the scope to the backward keeps its value.
    assert torch.equal(seed.to(torch.int64), torch.tensor([3, 4] if kind == "flash" else 3))
    assert offset.item() == (0 if kind == "flash" else 4)


@pytest.mark.parametrize("kind", SDPA)
@pytest.mark.parametrize("original", [False, True])
def test_a_call_that_came_before_is_answered_without_a_look_at_its_arguments(
    route, ran, fake, monkeypatch, kind, original
):
    """Known by all that decided; another number, shape or dtype is another call."""
    asked = []
    for op in (FORWARD[kind], BACKWARD[kind]):
        serve = ROUTES[op].serve
        recorded = ROUTES[op]._replace(serve=lambda *x, serve=serve, op=op: (asked.append(op), serve(*x))[1])
        monkeypatch.setitem(ROUTES, op, recorded)
    originals = torchs_own()
    route(originals)
    both, name, served = [FORWARD[kind], BACKWARD[kind]], "mine", contextlib.nullcontext()
    if original:
        name = "cuDNN" if kind == "cudnn" else "FA2"
        attnreg.selection.policy.activate(True)
    else:
        served = attnreg.register_backend(fake("mine").backend)
    with served:
        for scale in (None, 0.3):
            for turn in range(4):
                asked.clear()
                inputs = tensors(seed=turn)
                out, lse, *_ = call(kind, inputs, causal=True, scale=scale)
                lse = lse.squeeze(-1) if kind == "cudnn" else lse
                check_against_truth(out, inputs, lse, window=CAUSAL, scale=scale)
                # A backend's first call of a kind is looked at; the next is kept.
                long = 2 if scale is None and not original else 1
                assert asked == (both if turn < long else []), (scale, turn)
                assert ran() == {name: (1, 1)}
        asked.clear()
        for other in (tensors(8, 8), tensors(heads=(4, 2)), tensors(dtype=torch.bfloat16)):
            out, *_ = call(kind, other, causal=True, scale=0.3)
            check_against_truth(out, other, window=CAUSAL, scale=0.3)
        out, *_ = call(kind, inputs, scale=0.3)
        check_against_truth(out, inputs, scale=0.3)
        assert asked == both * 4


def laid_out(inputs, order):
    """Return leaves of the same values whose dimensions lie in another order."""
    back = [order.index(dim) for dim in range(4)]
    return [x.detach().permute(order).contiguous().permute(back).requires_grad_() for x in inputs]


def results_of(inputs, **options):
    """Return everything that a call of the cuDNN op returns, and its gradients."""
    results = call("cudnn", inputs, **options)
    return *results, *torch.autograd.grad(results[0], inputs, random_like(results[0]))


def assert_alike(one, other):
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
        assert not one.is_floating_point() or torch.equal(one, other)
    else:
        assert one == other


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)], ids=str)
@pytest.mark.parametrize("dim_v", [8, 16])
def test_compiled_routers_turn_tensors_as_those_in_python_do(route, ran, fake, order, dim_v):
    route(torchs_own())
    query, key, value = tensors(3, 6, heads=(4, 2))
    inputs = laid_out((query, key, value.repeat(1, 1, 1, dim_v // 8)), order)
    with attnreg.register_backend(fake("mine").backend):
        first, *further = (results_of(inputs, scale=0.4) for _ in range(5))
        for results in further:
            for one, other in zip(first, results, strict=True):
                assert_alike(one, other)
        if captured.compiled and dim_v == 8:  # nobody asks there whether Inductor may write to it
            assert further[-1][6].data_ptr() != further[-2][6].data_ptr()
        assert ran() == {"mine": (5, 5)}
        assert (results_of(inputs)[0] != first[0]).any()  # by another scale


def leading_to_flash(fake, monkeypatch, originals, prefix=""):
    """Return a backend that leads to the flash op's kernel; who was asked; what Python called of it."""
    asked, given = [], []

    def kernel(op, key):
        original = originals[op.removeprefix(prefix)]
        return lambda *args, **options: given.append(op) or original(*args, **options)

    monkeypatch.setattr(captured, "kernel", kernel)

    def again(direction, tensors, call):
        asked.append(direction)
        lengths = None, None, call.max_q, call.max_k, 0, call.causal
        if direction == "forward":
            op, rest, results = FORWARD["flash"], (*lengths, False), 2
        else:
            op, rest, results = BACKWARD["flash"], (*lengths, *random_state()), 3
        return OpLauncher(prefix + op, "CPU", rest, {"scale": call.scale}, results)

    full = fake("mine").backend
    kernels = full.load()
    return dataclasses.replace(full, load=lambda: kernels._replace(specialize=again)), asked, given


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)], ids=str)
def test_a_kernel_of_torchs_that_a_backend_leads_to_is_called_without_python(
    route, ran, fake, monkeypatch, order
):
    originals = torchs_own()
    route(originals)
    backend, _, given = leading_to_flash(fake, monkeypatch, originals)
    inputs = laid_out(tensors(heads=(4, 2)), order)
    with attnreg.register_backend(backend):
        first = results_of(inputs, scale=0.4, causal=True)
        for _ in range(5):
            for one, other in zip(first, results_of(inputs, scale=0.4, causal=True), strict=True):
                if isinstance(one, torch.Tensor) and one.is_floating_point():
                    assert one.stride() == other.stride()
                    truth.assert_near(one, other.double())
        assert ran() == {"mine": (6, 6)}
        entered = set()
        sys.setprofile(lambda frame, event, _: event == "call" and entered.add(frame.f_code.co_filename))
        try:
            out, lse, *_ = call("cudnn", inputs, scale=0.4, causal=True)
        finally:
            sys.setprofile(None)
        check_against_truth(out, inputs, lse.squeeze(-1), window=CAUSAL, scale=0.4)
    if captured.compiled:
        ours, theirs = Path(attnreg.__file__).parent, Path(torch.__file__).parent
        # Nor what torch has written in Python: for tensors that have no memory that is most of it.
        forbidden = (ours, *(theirs / part for part in ("_decomp", "_refs", "_prims", "_prims_common")))
        assert [file for file in entered if any(part in Path(file).parents for part in forbidden)] == []
    assert given == []
    for op in (FORWARD["flash"], BACKWARD["flash"]):
        assert (len(originals[op].calls) >= 4) is bool(captured.compiled)


def run_on(kernels, direction, call, sizes):
    """Return what launches a backend's kernel on dense tensors of these sizes, given their addresses."""
    kernel = kernels.forward if direction == "forward" else kernels.backward

    def launch(addresses, workspace, stream):
        assert (workspace, stream) == (0, 0)
        pointers = (ctypes.c_void_p * len(sizes)).from_address(addresses)
        there = [memory(at, torch.float32, *how) for at, how in zip(pointers, sizes, strict=True)]
        results = 2 if direction == "forward" else 3
        for result, value in zip(there[-results:], kernel(*there[:-results], call), strict=True):
            result.copy_(value)
        return True

    return launch


def test_seed_and_offset_are_memory_that_nobody_else_knows(route, fake, monkeypatch):
    """Not that of a kernel's other results, if those are in anybody's hands; if they aren't, a GPU shows."""
    originals, held = torchs_own(), random_state()
    flash = originals[FORWARD["flash"]]

    def with_states(*args, **options):
        out, lse, _, _, debug_mask = flash(*args, **options)
        return out, lse, *held, debug_mask

    route({**originals, FORWARD["flash"]: with_states})
    backend, *_ = leading_to_flash(fake, monkeypatch, originals)
    inputs = [x.detach() for x in tensors(heads=(4, 2))]
    with attnreg.register_backend(backend):
        for _ in range(4):
            *_, seed, offset, _ = call("cudnn", inputs)
            for word in (seed, offset):
                assert (word.shape, word.dtype, word.device.type) == ((), torch.int64, "cpu")
                assert word.data_ptr() not in [x.data_ptr() for x in held]
            seed.fill_(7)
            assert offset.fill_(8).item() == 8
            assert seed.item() == 7
    assert [x.tolist() for x in held] == [x.tolist() for x in random_state()]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)], ids=str)
def test_a_kernel_that_a_backend_leads_to_is_run_on_addresses(route, ran, fake, order):
    route(torchs_own())
    full = fake("mine").backend
    kernels, given = full.load(), []

    def again(direction, tensors, call):
        model = tensors[:1] if direction == "forward" else tensors[1:4]
        results = [(tuple(x.shape), contiguous_strides(x.shape), x.dtype) for x in model]
        if direction == "forward":
            batch, rows, heads, _ = tensors[0].shape
            results.append(((batch, heads, rows), contiguous_strides((batch, heads, rows)), torch.float32))
        sizes = [*((x.shape, x.stride()) for x in tensors), *(one[:2] for one in results)]
        run = kernels.forward if direction == "forward" else kernels.backward
        launch = run_on(kernels, direction, call, sizes)
        return AddressLauncher(
            lambda *tensors: run(*tensors, call),
            lambda *addresses: given.append(direction) or launch(*addresses),
            tuple(range(len(sizes))),
            tuple(results),
        )

    backend = dataclasses.replace(full, load=lambda: kernels._replace(specialize=again))
    inputs = laid_out(tensors(heads=(4, 2)), order)
    with attnreg.register_backend(backend):
        first = results_of(inputs, scale=0.4, causal=True)
        for _ in range(5):
            for one, other in zip(first, results_of(inputs, scale=0.4, causal=True), strict=True):
                assert_alike(one, other)
        assert ran() == {"mine": (6, 6)}
    assert given.count("forward") >= 4 * bool(captured.compiled)
    assert given.count("backward") >= 4 * bool(captured.compiled)
    assert bool(given) is bool(captured.compiled)


def test_one_that_no_router_covers_is_called_by_python(route, ran, fake, monkeypatch):
    originals = torchs_own()
    route(originals)
    backend, asked, given = leading_to_flash(fake, monkeypatch, originals, prefix="another")
    inputs = tensors(heads=(4, 2))
    with attnreg.register_backend(backend):
        for _ in range(12):
            check_against_truth(call("cudnn", inputs)[0], inputs)
        assert ran() == {"mine": (12, 12)}
    if captured.compiled:
        assert len(given) >= 16
        assert len(asked) <= 8  # and not at every call


def test_a_backend_is_asked_for_no_shorter_way_while_compiled_routers_rest(route, fake, monkeypatch):
    originals = torchs_own()
    route(originals)
    backend, asked, _ = leading_to_flash(fake, monkeypatch, originals)
    inputs = tensors()
    with attnreg.register_backend(backend), call_cache.paused():
        for _ in range(4):
            check_against_truth(call("cudnn", inputs)[0], inputs)
    assert asked == []


@pytest.mark.parametrize("changed", [lambda out, lse: (out,), lambda out, lse: (out, lse, lse)])
def test_a_kernel_whose_results_become_fewer_or_more_is_an_error_each_time(route, fake, changed):
    route(torchs_own())
    full = fake("mine").backend
    kernels, calls = full.load(), []

    def forward(*given):
        calls.append(1)
        results = kernels.forward(*given)
        return results if len(calls) < 3 else changed(*results)

    backend = dataclasses.replace(full, load=lambda: kernels._replace(forward=forward))
    inputs = [x.detach() for x in tensors()]
    with attnreg.register_backend(backend):
        for _ in range(2):
            call("cudnn", inputs)
        for _ in range(3):
            with pytest.raises((TypeError, ValueError, RuntimeError), match=r"results|argument|unpack"):
                call("cudnn", inputs)


@pytest.mark.parametrize("kind", SDPA)
def test_a_known_call_with_a_value_of_another_dtype_is_still_an_error(route, ran, fake, kind):
    route(torchs_own())
    query, key, value = (x.detach() for x in tensors())
    with attnreg.register_backend(fake("mine").backend):
        for _ in range(3):
            call(kind, (query, key, value))
        assert ran() == {"mine": (3, 0)}
        for others in ((key, value.double()), (key.double(), value)):
            with pytest.raises(attnreg.InvalidInputError, match="dtype"):
                call(kind, (query, *others))
        assert ran() == {}


def test_more_queries_than_keys_are_known_again_where_nothing_is_masked(route, ran, fake):
    route(torchs_own())
    inputs = tensors(6, 3)
    with attnreg.register_backend(fake("mine").backend):
        for _ in range(3):
            check_against_truth(call("flash", inputs)[0], inputs)
            assert ran() == {"mine": (1, 1)}
        for _ in range(4):  # rows without a key take what is put right for them
            check_against_truth(call("flash", inputs, causal=True)[0], inputs, window=CAUSAL)


# ---- debug masks


@pytest.mark.parametrize("kind", SDPA)
def test_a_debug_mask_passes_the_call_to_torchs_own_kernel_with_every_argument(route, ran, kind):
    originals = torchs_own()
    route(originals)
    inputs = [x.detach() for x in tensors()]
    with attnreg.register_backend("math"):
        call(kind, inputs, 0.25, True, True, scale=0.3)
    ((args, kwargs),) = originals[FORWARD[kind]].calls
    assert [x.data_ptr() for x in args[:3]] == [x.data_ptr() for x in inputs]
    lengths = (None, None, 6, 6)
    rest = (0.25, True, True)
    assert args[3:] == ((*lengths, *rest) if kind == "flash" else (None, *lengths, True, *rest))
    assert kwargs == {"scale": 0.3}
    assert ran() == {}


OPS_WITH_DEBUG_MASKS = {
    "_flash_attention_forward": lambda q, op: op(q, q, q, None, None, 6, 6, 0.0, False, True),
    "_cudnn_attention_forward": lambda q, op: op(q, q, q, None, None, None, 6, 6, True, 0.0, False, True),
}


@pytest.mark.parametrize(("op", "ask"), OPS_WITH_DEBUG_MASKS.items(), ids=OPS_WITH_DEBUG_MASKS)
def test_a_debug_mask_is_an_error_where_torch_has_no_kernel(route, op, ask):
    route()
    with pytest.raises(UnsupportedInputError) as error:
        ask(torch.randn(2, 6, 4, 8), getattr(torch.ops.aten, op))
    assert str(error.value) == f"aten::{op}: return_debug_mask, and torch has no kernel for this device"


# ---- dropout


def flash_op(query, key, value, p):
    """Call aten's flash op, whose tensors are (B, S, H, D)."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    lengths = (None, None, query.shape[1], key.shape[1])
    out, *_ = torch.ops.aten._flash_attention_forward(query, key, value, *lengths, p, False, False)
    return out.transpose(1, 2)


def cudnn_op(query, key, value, p):
    """Call aten's cuDNN op on packed sequences."""
    batch, _, length, _ = query.shape
    packed = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]
    cu = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32)
    out, *_ = torch.ops.aten._cudnn_attention_forward(*packed, None, cu, cu, length, length, True, p)
    return out.unflatten(0, (batch, length)).transpose(1, 2)


DROPPING = {
    "flash": lambda *inputs, p: call("flash", inputs, p)[0],
    "cudnn": lambda *inputs, p: call("cudnn", inputs, p)[0],
    "flash op": lambda *inputs, p: flash_op(*inputs, p),
    "cudnn op": lambda *inputs, p: cudnn_op(*inputs, p),
}


@pytest.mark.parametrize("attend", DROPPING.values(), ids=DROPPING)
def test_the_backward_drops_what_the_forward_dropped(route, ran, attend):
    route()
    inputs = tensors(4, 4, heads=(2, 2), dim=3, dtype=torch.float64)
    grad = random_like(inputs[0])

    def loss(*tensors):
        torch.manual_seed(7)
        return (attend(*tensors, p=0.4) * grad).sum()

    with attnreg.register_backend("math"):
        exact = torch.autograd.grad(loss(*inputs), inputs)
        assert ran() == {"math": (1, 1)}
        with torch.no_grad():
            for which, tensor in enumerate(inputs):
                numeric = torch.empty_like(tensor)
                for index in range(tensor.numel()):
                    step = torch.zeros_like(tensor).flatten()
                    step[index] = 1e-5
                    moved = [
                        [x + sign * step.view(x.shape) if x is tensor else x for x in inputs]
                        for sign in (1, -1)
                    ]
                    numeric.view(-1)[index] = (loss(*moved[0]) - loss(*moved[1])) / 2e-5
                torch.testing.assert_close(exact[which], numeric, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("attend", DROPPING.values(), ids=DROPPING)
def test_dropout_drops_as_often_as_asked_and_scales_the_rest(route, attend):
    route()
    query, key, _ = tensors(64, 64, dim=64)
    value = torch.eye(64).expand(2, 4, 64, 64).contiguous()  # the output is then the weights
    attnreg.register_backend("math")
    plain = attend(query.detach(), key.detach(), value, p=0.0)
    dropped, again = (attend(query.detach(), key.detach(), value, p=0.3) for _ in range(2))
    gone = dropped == 0.0
    assert abs(gone.float().mean().item() - 0.3) < 0.02
    torch.testing.assert_close(dropped[~gone], plain[~gone] / 0.7)
    assert not torch.equal(gone, again == 0.0)
    for other in (gone[0, 0] == gone[0, 1], gone[0, 0] == gone[1, 0]):
        assert 0.4 < other.float().mean() < 0.75  # another mask for every head and batch


@pytest.mark.parametrize("attend", DROPPING.values(), ids=DROPPING)
def test_dropout_ties_the_backward_to_the_forwards_backend(route, ran, fake, attend):
    route()
    inputs = tensors()
    with attnreg.register_backend(fake("mine").backend):
        out = attend(*inputs, p=0.2)
        with attnreg.register_backend("math"), attnreg.use_backend("math"):
            out.sum().backward()
        assert ran() == {"mine": (1, 1)}
    with attnreg.register_backend(fake("half", backward=False).backend):
        attend(*inputs, p=0.2)
        assert "half" not in ran()
        attend(*inputs, p=0.0)
        assert ran()["half"] == (1, 0)


@pytest.mark.parametrize("kind", SDPA)
def test_a_dropout_mask_that_torchs_own_kernel_drew_stays_with_it(route, ran, kind):
    originals = torchs_own()
    route(originals)
    inputs = tensors()
    attnreg.selection.policy.activate(True)
    out, *_, seed, offset, _ = call(kind, inputs, 0.2)
    with attnreg.register_backend("math"):
        out.sum().backward()
    assert ran() == {"cuDNN" if kind == "cudnn" else "FA2": (1, 1)}
    # What the scope left in the offset doesn't change its value, nor that of the seed.
    ((args, _),) = originals[BACKWARD[kind]].calls
    own_seed, own_offset = (torch.tensor([3, 4]), 0) if kind == "flash" else (torch.tensor(3), 4)
    assert torch.equal(seed.to(torch.int64), own_seed)
    assert offset.item() == own_offset
    saved = args[12:14] if kind == "flash" else args[6:8]
    assert torch.equal(saved[0].to(torch.int64), own_seed)
    assert saved[1].item() == own_offset


@pytest.mark.parametrize("kind", SDPA)
def test_so_it_does_when_the_call_is_known_already(route, ran, kind):
    route(torchs_own())
    inputs = tensors()
    attnreg.selection.policy.activate(True)
    for _ in range(3):
        call(kind, inputs, 0.2)[0].sum().backward()
    assert ran() == {"cuDNN" if kind == "cudnn" else "FA2": (3, 3)}


@pytest.mark.parametrize("kind", SDPA)
def test_torchs_own_kernel_draws_its_dropout_as_without_attnreg(route, kind):
    def drawing(*args, original, **kwargs):
        drawn.append(torch.rand(()).item())
        return original(*args, **kwargs)

    drawn, originals = [], torchs_own()
    found = originals[FORWARD[kind]].function
    originals[FORWARD[kind]].function = lambda *args, **kwargs: drawing(*args, original=found, **kwargs)
    route(originals)
    attnreg.selection.policy.activate(True)
    for _ in range(2):
        torch.manual_seed(3)
        call(kind, [x.detach() for x in tensors()], 0.2)
    torch.manual_seed(3)
    assert drawn == [torch.rand(()).item()] * 2


def test_so_does_its_kernel_of_packed_sequences(route, packed):
    drawn = []

    def original(query, *rest, **options):
        drawn.append(torch.rand(()).item())
        return query.clone(), query.new_zeros(17, 4, 1), None, None, 8, 8, *random_state(), None

    *inputs, cu, _, longest, _ = packed(LENGTHS_Q, grad=False)
    route({FORWARD["cudnn"]: original})
    attnreg.selection.policy.activate(True)
    torch.manual_seed(3)
    cudnn_varlen(inputs, cu, cu, longest, longest, p=0.2)
    torch.manual_seed(3)
    assert drawn == [torch.rand(()).item()]


def test_a_bias_is_not_lost_after_calls_without_one(route, ran):
    route(torchs_own())
    attnreg.selection.policy.activate(True)
    inputs = tensors()
    for _ in range(2):
        call("cudnn", inputs)[0].sum().backward()
    for bias in BIASES.values():
        check_against_truth(call("cudnn", inputs, bias=bias)[0], inputs, bias=bias)
    assert ran() == {"cuDNN": (2 + len(BIASES), 2 + len(BIASES))}


@pytest.mark.parametrize("kind", SDPA)
@pytest.mark.parametrize("original", [False, True])
def test_a_dropout_mask_that_nobody_knows_the_owner_of_is_an_error(route, ran, kind, original):
    route(torchs_own() if original else None)
    inputs = [x.detach() for x in tensors()]
    attnreg.register_backend("math")
    result = [x.clone() if isinstance(x, torch.Tensor) else x for x in call(kind, inputs, 0.2)]
    ran()
    with pytest.raises(UnsupportedInputError) as error:
        backward(kind, inputs, result, torch.ones_like(result[0]), 0.2)
    assert str(error.value) == (
        f"aten::{BACKWARD[kind]}: dropout_p 0.2: can't tell which backend drew the mask, as its "
        "forward ran before attnreg was active or a hook copied what it saved; register backends earlier"
    )
    assert ran() == {}
    # Without dropout nothing is lost with it.
    result = [x.clone() if isinstance(x, torch.Tensor) else x for x in call(kind, inputs)]
    backward(kind, inputs, result, torch.ones_like(result[0]))
    assert ran() == {"math": (1, 1)}


def test_a_backend_that_is_asked_for_but_drops_nothing_gives_way(route, ran, fake):
    route()
    with attnreg.register_backend(fake("mine", dropout=False).backend):
        call("flash", tensors(), 0.2)[0].sum().backward()
        (row,) = [row for row in attnreg.stats().fallbacks if row.backend == "mine"]
        assert row.reason == "dropout_p must be 0, got 0.2"
        assert "mine" not in ran()


# ---- packed sequences through cuDNN's op

LENGTHS_Q, LENGTHS_K = (5, 1, 8, 3), (7, 4, 8, 1)


def cudnn_varlen(inputs, cu_q, cu_k, max_q, max_k, bias=None, p=0.0, causal=False, debug=False, **options):
    return torch.ops.aten._cudnn_attention_forward(
        *inputs, bias, cu_q, cu_k, max_q, max_k, True, p, causal, debug, **options
    )


def test_packed_sequences_are_right_forward_and_backward(route, packed, ran):
    route()
    *inputs, cu_q, cu_k, max_q, max_k = packed(LENGTHS_Q, LENGTHS_K)
    attnreg.register_backend("math")
    out, lse, got_q, got_k, got_max_q, got_max_k, *_ = cudnn_varlen(
        inputs, cu_q, cu_k, max_q, max_k, scale=0.3
    )
    expected, expected_lse = truth.varlen(*inputs, cu_q, cu_k, scale=0.3)
    truth.assert_near(out, expected)
    assert (got_q is cu_q, got_k is cu_k, got_max_q, got_max_k) == (True, True, 8, 8) or (
        torch.equal(got_q, cu_q) and torch.equal(got_k, cu_k) and (got_max_q, got_max_k) == (8, 8)
    )
    # Up to torch 2.13 this op has its LSE by tokens, with one dimension more.
    if cudnn.TOKEN_MAJOR_LSE:
        assert lse.shape == (17, 4, 1)
        lse = lse.squeeze(-1).t()
    truth.assert_near(lse, expected_lse)
    check_gradients(out, inputs, expected)
    assert ran() == {"math": (1, 1)}


@pytest.mark.parametrize("token_major", [False, True])
def test_the_lse_is_laid_out_as_the_torch_at_hand_does_and_back(
    route, packed, monkeypatch, fake, token_major
):
    monkeypatch.setattr(cudnn, "TOKEN_MAJOR_LSE", token_major)
    route()
    recorder = fake("mine")
    *inputs, cu_q, cu_k, max_q, max_k = packed(LENGTHS_Q, LENGTHS_K)
    attnreg.register_backend(recorder.backend)
    out, lse, *_ = cudnn_varlen(inputs, cu_q, cu_k, max_q, max_k)
    assert lse.shape == ((17, 4, 1) if token_major else (4, 17))
    assert lse.is_contiguous()
    expected, expected_lse = truth.varlen(*inputs, cu_q, cu_k)
    check_gradients(out, inputs, expected)
    truth.assert_near(recorder.backwards[0][5], expected_lse)


def test_causal_packed_sequences_of_equal_lengths_are_served(route, packed, ran):
    route()
    *inputs, cu, _, longest, _ = packed(LENGTHS_Q)
    out, *_ = cudnn_varlen(inputs, cu, cu, longest, longest, causal=True)
    expected, _ = truth.varlen(*inputs, cu, cu, window=CAUSAL)
    truth.assert_near(out, expected)
    check_gradients(out, inputs, expected)
    assert [sum(n) for n in zip(*ran().values(), strict=True)] == [1, 1]


ONLY_TORCHS_OWN = {
    "a bias": {"bias": torch.zeros(1, 1, 8, 8)},
    "causal with other lengths": {"causal": True},
    "a debug mask": {"debug": True},
}


@pytest.mark.parametrize("asked", ONLY_TORCHS_OWN.values(), ids=ONLY_TORCHS_OWN)
def test_packed_calls_with_another_alignment_or_a_bias_are_torchs_own(route, packed, ran, asked):
    *inputs, cu_q, cu_k, max_q, max_k = packed(LENGTHS_Q, LENGTHS_K, grad=False)
    answer = (inputs[0], inputs[0], None, None, 8, 8, cu_q, cu_q, None)
    original = Original(lambda *args, **kwargs: answer)
    route({"_cudnn_attention_forward": original})
    with attnreg.register_backend("math"):
        cudnn_varlen(inputs, cu_q, cu_k, max_q, max_k, **asked, scale=0.3)
    ((args, kwargs),) = original.calls
    assert all(x is y for x, y in zip(args[:3], inputs, strict=True))
    assert args[3] is asked.get("bias")
    assert args[4] is cu_q
    assert args[5] is cu_k
    assert args[6:9] == (8, 8, True)
    rest = (0.0, asked.get("causal", False), asked.get("debug", False))
    assert args[9:] == rest[: len(args) - 9]  # what has its default may be left out
    assert not any(rest[len(args) - 9 :])
    assert kwargs == {"scale": 0.3}
    assert ran() == {}


@pytest.mark.parametrize("asked", ONLY_TORCHS_OWN.values(), ids=ONLY_TORCHS_OWN)
def test_such_calls_are_an_error_where_torch_has_no_kernel(route, packed, asked):
    route()
    *inputs, cu_q, cu_k, max_q, max_k = packed(LENGTHS_Q, LENGTHS_K)
    with pytest.raises(UnsupportedInputError) as error:
        cudnn_varlen(inputs, cu_q, cu_k, max_q, max_k, **asked)
    assert str(error.value) == (
        "aten::_cudnn_attention_forward: a varlen call with a debug mask, a bias or a mask aligned "
        "top-left, and torch has no kernel for this device"
    )


def test_a_dense_call_of_cudnns_lower_op_is_the_dense_op(route, ran):
    route()
    inputs = tensors(3, 6)
    attnreg.register_backend("math")
    op = torch.ops.aten._cudnn_attention_forward
    out, lse, *_ = op(*inputs, None, None, None, 3, 6, True, 0.0, True)
    assert lse.shape == (2, 4, 3, 1)
    check_against_truth(out, inputs, lse.squeeze(-1), window=CAUSAL, top_left=True)
    assert ran() == {"math": (1, 1)}


def test_a_scope_holds_for_the_backward_of_cudnns_lower_op(route, packed, ran, fake):
    route()
    *inputs, cu, _, longest, _ = packed(LENGTHS_Q)
    with attnreg.register_backend(fake("mine").backend), attnreg.register_backend("math"):
        with attnreg.use_backend("mine"):
            out, *_ = cudnn_varlen(inputs, cu, cu, longest, longest)
        out.sum().backward()
        assert ran() == {"mine": (1, 1)}


# Arguments that torch 2.14 brought, which the dispatcher of an older one would refuse.
FORWARD_ONLY = {
    "seqused_k": {"seqused_k": torch.tensor([3, 0, 8, 1], dtype=torch.int32)},
    "block_table": {
        "seqused_k": torch.tensor([3, 0, 8, 1], dtype=torch.int32),
        "block_table": torch.arange(8, dtype=torch.int32).view(4, 2),
    },
}


@pytest.mark.parametrize("options", FORWARD_ONLY.values(), ids=FORWARD_ONLY)
@pytest.mark.parametrize("grad", [False, True])
def test_what_the_backward_is_not_told_is_refused_there_and_right_in_the_forward(packed, ran, options, grad):
    forward, backward = (
        router(ROUTES[f"_cudnn_attention_{direction}"], None) for direction in ("forward", "backward")
    )
    query, key, value, cu_q, cu_k, max_q, max_k = packed(LENGTHS_Q, LENGTHS_K, grad=grad)
    pages, cu_pages = [key, value], cu_k
    if "block_table" in options:
        pages, cu_pages = [torch.randn(8, 4, 4, 16) for _ in range(2)], None
        key, value = (x.flatten(0, 1) for x in pages)
        cu_k = torch.arange(0, 33, 8)
    lengths = (cu_q, cu_pages, max_q, max_k)
    result = forward(query, *pages, None, *lengths, True, scale=0.3, **options)
    used = options["seqused_k"].tolist()
    truth.assert_near(result[0], truth.varlen(query, key, value, cu_q, cu_k, used=used, scale=0.3)[0])
    arguments = (torch.ones(17, 4, 16), query, *pages, *result[:2], *result[6:8], None, *lengths, 0.0, False)
    if grad:
        with pytest.raises(UnsupportedInputError) as error:
            backward(*arguments)
        assert str(error.value) == (
            "seqused_k or block_table: aten::_cudnn_attention_backward receives neither, so its gradients "
            "would be wrong; call attnreg.varlen_attn, whose backward does"
        )
    assert [sum(n) for n in zip(*ran().values(), strict=True)] == [1, 0]


@pytest.mark.usefixtures("routers")
def test_a_dense_call_with_counted_keys_is_torchs_own():
    query, used = torch.randn(2, 4, 6, 8), torch.tensor([3, 4], dtype=torch.int32)
    arguments = (query, query, query, None, None, None, 6, 6, True)
    original = Original(lambda *args, **kwargs: "torch's")
    route = ROUTES["_cudnn_attention_forward"]
    with attnreg.use_backend("math"):
        assert router(route, original)(*arguments, seqused_k=used) == "torch's"
        assert original.calls == [(arguments, {"seqused_k": used})]
        with pytest.raises(UnsupportedInputError) as error:
            router(route, None)(*arguments, seqused_k=used)
    assert str(error.value) == (
        "aten::_cudnn_attention_forward: seqused_k or block_table of a dense call, "
        "and torch has no kernel for this device"
    )


# ---- aten's flash op beside an original of torch's


def flash_original(query, key, value, cu_q, cu_k, max_q, max_k, p, is_causal, debug, **options):
    window = (options.get("window_size_left", -1), 0 if is_causal else options.get("window_size_right", -1))
    window = tuple(-1 if bound is None else bound for bound in window)
    out, lse = truth.varlen(query, key, value, cu_q, cu_k, window=window, scale=options.get("scale"))
    return out.to(query.dtype), as_torchs_lse(lse), *random_state(), query.new_empty(0)


def flash_original_backward(grad, query, key, value, out, lse, cu_q, cu_k, max_q, max_k, p, is_causal, *rest, **options):  # fmt: skip # noqa: E501
    assert not (lse == -torch.inf).any(), "torch's own kernel knows +inf for a row without keys"

    def run():
        leaves = [x.detach().double().requires_grad_() for x in (query, key, value)]
        window = (-1, 0 if is_causal else -1)
        result, _ = truth.varlen(*leaves, cu_q, cu_k, window=window, scale=options.get("scale"))
        return torch.autograd.grad(result, leaves, grad.double())

    return above_autograd(run, (query, key, value))


def flash_originals():
    return {
        "_flash_attention_forward": Original(flash_original),
        "_flash_attention_backward": Original(flash_original_backward),
    }


def flash_varlen(inputs, *rest, p=0.0, causal=False, debug=False, **options):
    return torch.ops.aten._flash_attention_forward(*inputs, *rest, p, causal, debug, **options)


BLIND = ((6, 3), (2, 3))  # with a causal mask the first four rows see no key


@pytest.mark.parametrize("original", [False, True])
def test_the_lse_of_a_row_without_keys_is_that_of_torchs_own_kernel(route, packed, original):
    route(flash_originals() if original else None)
    *inputs, cu_q, cu_k, max_q, max_k = packed(*BLIND)
    attnreg.register_backend("math")
    out, lse, *_ = flash_varlen(inputs, cu_q, cu_k, max_q, max_k, causal=True)
    assert torch.equal(lse[:, :4], torch.full((4, 4), torch.inf if original else -torch.inf))
    assert lse[:, 4:].isfinite().all()
    expected, expected_lse = truth.varlen(*inputs, cu_q, cu_k, window=CAUSAL)
    truth.assert_near(out, expected)
    truth.assert_near(lse[:, 4:], expected_lse[:, 4:])
    check_gradients(out, inputs, expected)


@pytest.mark.parametrize("first", ["torch", "math"])
def test_rows_without_keys_survive_a_change_of_backend_before_the_backward(route, packed, ran, fake, first):
    originals = flash_originals()
    route(originals)
    *inputs, cu_q, cu_k, max_q, max_k = packed(*BLIND)
    expected, _ = truth.varlen(*inputs, cu_q, cu_k, window=CAUSAL)
    if first == "torch":
        out, *_ = flash_varlen(inputs, cu_q, cu_k, max_q, max_k, causal=True)
        recorder = fake("mine")
        with attnreg.register_backend(recorder.backend):
            check_gradients(out, inputs, expected)
        assert ran() == {"mine": (0, 1)}
        assert torch.equal(recorder.backwards[0][5][:, :4], torch.full((4, 4), -torch.inf))
        assert len(originals["_flash_attention_forward"].calls) == 1
    else:
        with attnreg.register_backend("math"):
            out, *_ = flash_varlen(inputs, cu_q, cu_k, max_q, max_k, causal=True)
        check_gradients(out, inputs, expected)
        assert ran() == {"math": (1, 0)}
        assert len(originals["_flash_attention_backward"].calls) == 1
    truth.assert_near(out, expected)


# another: that of a dropout mask, or none, as torch's own varlen_attn doesn't pass on what carries it. If the
# routers always spoke as torch's kernel does, attnreg.varlen_attn could turn the LSE that it returns.
def test_with_dropout_too_a_backend_is_given_minus_infinity(route, packed, ran, fake):
    route(flash_originals())
    recorder = fake("mine")
    *inputs, cu_q, cu_k, max_q, max_k = packed(*BLIND)
    with attnreg.register_backend(recorder.backend):
        flash_varlen(inputs, cu_q, cu_k, max_q, max_k, p=0.2, causal=True)[0].sum().backward()
    assert ran() == {"mine": (1, 1)}
    assert torch.equal(recorder.backwards[0][5][:, :4], torch.full((4, 4), -torch.inf))


def test_torchs_kernel_is_given_plus_infinity_though_a_scope_ran_the_forward(route, packed, ran):
    originals = flash_originals()
    route(originals)
    *inputs, cu_q, cu_k, max_q, max_k = packed(*BLIND, grad=False)
    lengths = (cu_q, cu_k, max_q, max_k)
    with attnreg.use_backend("math"):
        out, lse, rng_state, *_ = flash_varlen(inputs, *lengths, causal=True)
    assert ran() == {"math": (1, 0)}
    grad, lost = torch.ones_like(out), torch.empty(0)
    torch.ops.aten._flash_attention_backward(grad, *inputs, out, lse, *lengths, 0.0, True, rng_state, lost)
    assert len(originals["_flash_attention_backward"].calls) == 1


def test_attnregs_own_front_is_given_minus_infinity_and_zero_tails(packed, route):
    route(flash_originals())
    *inputs, cu_q, cu_k, max_q, max_k = packed((6, 3, 2), (2, 3, 2))
    aux = attnreg.AuxRequest(lse=True)
    out, lse = attnreg.varlen_attn(*inputs, cu_q[:3], cu_k[:3], max_q, max_k, True, aux)
    truth.assert_near(out, truth.varlen(*inputs, cu_q[:3], cu_k[:3], window=CAUSAL)[0])
    truth.assert_near(lse, truth.varlen(*inputs, cu_q[:3], cu_k[:3], window=CAUSAL)[1])


@pytest.mark.parametrize("packs", [False, True])
def test_shapes_dtypes_and_strides_of_the_flash_op_are_those_of_torchs_meta_function(route, packed, fake, packs):  # fmt: skip # noqa: E501
    route()
    if packs:
        *inputs, cu_q, cu_k, max_q, max_k = packed(LENGTHS_Q, LENGTHS_K, grad=False)
        lengths = (cu_q, cu_k, max_q, max_k)
    else:
        inputs = [x.detach().transpose(1, 2) for x in tensors(5, 7)]
        lengths = (None, None, 5, 7)
    on_meta = [x.to("meta").as_strided(x.shape, x.stride()) for x in inputs]
    meta_lengths = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in lengths]
    with attnreg.register_backend(fake("scattered", load=lambda: SCATTERING).backend):
        result = flash_varlen(inputs, *lengths)
        assert described(result) == described(flash_varlen(on_meta, *meta_lengths))
        grad = random_like(result[0])
        arguments = (grad, *inputs, *result[:2], *lengths, 0.0, False, *result[2:4])
        grads = torch.ops.aten._flash_attention_backward(*arguments)
        to_meta = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in arguments]
        to_meta[1:4] = on_meta
        assert described(grads) == described(torch.ops.aten._flash_attention_backward(*to_meta))
        assert attnreg.stats().calls == {"scattered": {"forward": 1, "backward": 1}}


def test_every_argument_of_the_flash_op_reaches_the_original(route, packed, ran):
    originals = flash_originals()
    original = originals["_flash_attention_forward"]
    original.function = lambda query, *args, **kw: (query, query, *random_state(), query)
    route(originals)
    *inputs, cu_q, cu_k, max_q, max_k = packed(LENGTHS_Q, LENGTHS_K, grad=False)
    options = {
        "scale": 0.3,
        "window_size_left": 3,
        "window_size_right": 1,
        "seqused_k": torch.tensor([1, 2, 3, 1], dtype=torch.int32),
        "alibi_slopes": torch.ones(4),
        "block_table": torch.zeros(4, 1, dtype=torch.int32),
        "num_splits": 2,
    }
    with attnreg.register_backend("math"):
        flash_varlen(inputs, cu_q, cu_k, max_q, max_k, p=0.25, causal=True, debug=True, **options)
    ((args, kwargs),) = original.calls
    assert all(x is y for x, y in zip(args[:5], (*inputs, cu_q, cu_k), strict=True))
    assert args[5:] == (8, 8, 0.25, True, True)
    assert kwargs.keys() == options.keys()
    assert all(kwargs[name] is value or kwargs[name] == value for name, value in options.items())
    assert ran() == {}


def test_a_dense_call_of_the_flash_op_with_every_option(route, ran, fake):
    route()
    recorder = fake("mine")
    query, key, value = (x.detach().transpose(1, 2).requires_grad_() for x in tensors(5, 7))
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    with attnreg.register_backend(recorder.backend), torch.no_grad():
        out, lse, rng_state, unused, debug = torch.ops.aten._flash_attention_forward(
            query, key, value, None, None, 5, 7, 0.0, True, False, scale=0.3, window_size_left=2,
            alibi_slopes=slopes, num_splits=3,
        )  # fmt: skip
    assert ran() == {"mine": (1, 0)}
    (*_, asked) = recorder.forwards[0]
    assert (asked.window, asked.num_splits, asked.scale) == ((2, 0), 3, 0.3)
    assert asked.alibi_slopes is slopes
    distance = (torch.arange(7) - torch.arange(5)[:, None] - 2).abs()
    bias = (-slopes.double()[:, None, None] * distance)[None]
    heads_first = [x.detach().transpose(1, 2) for x in (query, key, value)]
    expected, expected_lse = truth.dense(*heads_first, bias, window=(2, 0), scale=0.3)
    truth.assert_near(out.transpose(1, 2), expected)
    truth.assert_near(lse, expected_lse)
    assert (rng_state.shape, rng_state.dtype, unused.shape, unused.dtype) == (
        (2,), torch.uint64, (), torch.uint64,
    )  # fmt: skip
    assert debug.shape == (0,)


def test_the_inplace_op_writes_into_its_first_argument(route, packed, ran):
    route({"_flash_attention_forward_no_dropout_inplace": Original(None)})
    *inputs, cu_q, cu_k, max_q, max_k = packed(*BLIND, grad=False)
    attnreg.register_backend("math")
    out = torch.full_like(inputs[0], torch.nan)
    lse = torch.ops.aten._flash_attention_forward_no_dropout_inplace(
        out, *inputs, cu_q, cu_k, max_q, max_k, 0.0, True, False
    )
    truth.assert_near(out, truth.varlen(*inputs, cu_q, cu_k, window=CAUSAL)[0])
    truth.assert_near(lse, truth.varlen(*inputs, cu_q, cu_k, window=CAUSAL)[1])
    assert ran() == {"math": (1, 0)}


@pytest.mark.parametrize("kind", SDPA)
def test_compiled_in_one_graph_the_choice_is_made_when_it_runs(route, ran, fake, kind):
    route()
    torch._dynamo.reset()
    inputs = tensors()
    attend = torch.compile(
        lambda *x: call(kind, x, causal=True)[0].sin(), fullgraph=True, backend="aot_eager"
    )
    expected, _ = truth.dense(*inputs, window=CAUSAL)
    for name, registered in (("math", "math"), ("mine", fake("mine").backend)):
        with attnreg.register_backend(registered):
            out = attend(*inputs)
            check_gradients(out, inputs, truth.dense(*inputs, window=CAUSAL)[0].sin())
        truth.assert_near(out, expected.sin())
        assert ran() == {name: (1, 1)}
    torch._dynamo.reset()
