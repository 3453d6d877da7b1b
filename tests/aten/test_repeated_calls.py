"""Promises about repeated dense calls of CUDA's ops: the same results, and no Python from compiled routers.

What the call cache keeps, drops and counts for any op is in tests/dispatch.
"""

import contextlib
import ctypes
import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from support import truth
from support.cuda_ops import (
    BACKWARD,
    FORWARD,
    NATIVE,
    SDPA,
    assert_call_right,
    call,
    described,
    native_kernels,
    random_state,
)
from support.dense import CAUSAL, OPEN, assert_right, qkv, with_gradients
from support.fake_cudnn import memory

import attnreg
from attnreg.core.launching.launchers import AddressLauncher, OpLauncher, Prepared
from attnreg.core.torchlib import captured
from attnreg.core.torchlib.layout import contiguous_strides

pytestmark = pytest.mark.usefixtures("one_thread")


def in_order(inputs, order):
    """Return leaves of the same values whose dimensions lie in memory in another order."""
    back = [order.index(dim) for dim in range(4)]
    return [x.detach().permute(order).contiguous().permute(back).requires_grad_() for x in inputs]


def everything_of(kind, inputs, **options):
    """Return all results of a call, and its gradients."""
    results = call(kind, inputs, **options)
    return *results, *with_gradients(results[0], inputs)[1:]


def assert_alike(results, others, exact=True):
    """Check that results are equal; of a random state only size, dtype and strides."""
    for one, other in zip(results, others, strict=True):
        assert type(one) is type(other)
        if not isinstance(one, torch.Tensor):
            assert one == other
            continue
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
        if exact and one.is_floating_point():
            assert torch.equal(one, other)
        elif one.is_floating_point():
            truth.assert_near(one, other.double())


@pytest.mark.each_value("causal", "native", "kind")
@pytest.mark.parametrize("kind", SDPA)
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_a_repeated_call_is_right_and_planned_again_only_in_python(
    route, routes, ran, fake, kind, native, causal
):
    planned, both = [], [FORWARD[kind], BACKWARD[kind]]
    for op in both:
        serve = routes[op].serve
        routes[op] = routes[op]._replace(serve=lambda *x, serve=serve, op=op: planned.append(op) or serve(*x))
    kernels = native_kernels()
    route(kernels)
    attnreg.install()  # torch's own kernels lead the default order
    name = NATIVE[kind] if native else "mine"
    window = CAUSAL if causal else OPEN
    registered = contextlib.nullcontext() if native else attnreg.register_backend(fake("mine").backend)
    with registered:
        for scale in (None, 0.3):
            results = []
            for attempt in range(4):
                planned.clear()
                inputs = qkv(seed=attempt % 3)
                result = everything_of(kind, inputs, causal=causal, scale=scale)
                # The results of a backend's first call are checked, and nothing is kept of it.
                needed = 2 if scale is None and not native else 1
                assert planned == (both if attempt < needed or not captured.call_cache_in_use else []), (
                    attempt
                )
                assert ran() == {name: (1, 1)}
                assert_call_right(kind, result, inputs, result[-3:], window=window, scale=scale)
                results.append(result)
            assert_alike(results[0], results[3])
        planned.clear()
        longer = qkv(8, 8)
        result = everything_of(kind, longer, causal=causal, scale=0.3)
        assert_call_right(kind, result, longer, result[-3:], window=window, scale=0.3)
        assert planned == ([] if captured.call_cache_in_use else both)  # of the same kind
        planned.clear()
        for other in (qkv(heads_k=2), qkv(dtype=torch.bfloat16)):
            assert_call_right(
                kind, call(kind, other, causal=True, scale=0.3), other, window=CAUSAL, scale=0.3
            )
        assert_call_right(kind, call(kind, inputs, scale=0.7), inputs, scale=0.7)
        assert planned == both * 3
    assert [len(kernels[op].calls) for op in both] == ([12, 12] if native else [0, 0])


@pytest.mark.parametrize("kind", SDPA)
def test_a_repeated_call_with_tensors_of_two_dtypes_is_still_an_error(route, ran, fake, kind):
    route(native_kernels())
    query, key, value = (x.detach() for x in qkv())
    with attnreg.register_backend(fake("mine").backend):
        for _ in range(3):
            call(kind, (query, key, value))
        assert ran() == {"mine": (3, 0)}
        for others in ((key, value.double()), (key.double(), value)):
            with pytest.raises(attnreg.InvalidInputError, match="dtype"):
                call(kind, (query, *others))
        assert ran() == {}


def test_rows_without_a_key_are_right_each_time(route, ran, fake):
    route(native_kernels())
    inputs = qkv(6, 3)
    with attnreg.register_backend(fake("mine").backend):
        for causal in (False, True):
            for _ in range(4):
                results = with_gradients(call("flash", inputs, causal=causal)[0], inputs)
                assert_right(results, inputs, window=CAUSAL if causal else OPEN)
                assert ran() == {"mine": (1, 1)}


# ---- launchers, of tensors (B, S, H, D), below the cuDNN op, whose tensors are (B, H, S, D)


class Specializing:
    """A backend that offers launchers for repeated calls.

    Attributes:
        backend: the backend.
        specialized: the directions of the calls of `specialize`.
        called: what Python called: launch functions, and kernels of torch's.
    """

    def __init__(self, full, make):
        self.kernels, self.make = full.load(), make
        self.specialized, self.called = [], []
        kernels = self.kernels._replace(specialize=self.specialize)
        self.backend = dataclasses.replace(full, load=lambda: kernels)

    def specialize(self, direction, tensors, call):
        self.specialized.append(direction)
        return self.make(self, direction, tensors, call) if self.make else None


def flash_op(self, direction, tensors, call, prefix=""):
    """Return the flash op's native kernel as a launcher."""
    lengths = None, None, call.max_q, call.max_k, 0, call.causal
    if direction == "forward":
        op, rest, results = FORWARD["flash"], (*lengths, False), 2
    else:
        op, rest, results = BACKWARD["flash"], (*lengths, *random_state()), 3
    return OpLauncher(prefix + op, "CPU", rest, {"scale": call.scale}, results)


def unrouted_op(self, *given):
    """Return a launcher of an op of which the compiled routers have no kernel."""
    return flash_op(self, *given, prefix="another")


def on_addresses(self, direction, tensors, call):
    """Return the backend's own kernel as a launcher that is given addresses."""
    kernel = getattr(self.kernels, direction)
    shapes = [x.shape for x in tensors]  # their lengths may be others in later calls
    of_keys = (1, 2) if direction == "forward" else (2, 3)

    def prepare(batch, max_q, max_k, tokens_q, tokens_k, strides):
        assert (tokens_q, tokens_k) == (batch * max_q, batch * max_k)
        rows = [max_k if place in of_keys else max_q for place in range(len(shapes))]
        given = [
            (batch, shape[1], count) if len(shape) == 3 else (batch, count, *shape[2:])
            for shape, count in zip(shapes, rows, strict=True)
        ]
        heads = shapes[0][2]
        results = [given[0], (batch, heads, max_q)] if direction == "forward" else given[1:4]
        sizes = [*zip(given, strides, strict=True), *((x, contiguous_strides(x)) for x in results)]

        def launch(addresses, workspace, stream):
            assert (workspace, stream) == (0, 0)
            self.called.append(direction)
            pointers = (ctypes.c_void_p * len(sizes)).from_address(addresses)
            operands = [memory(at, torch.float32, *how) for at, how in zip(pointers, sizes, strict=True)]
            values = kernel(*operands[: len(shapes)], call._replace(max_q=max_q, max_k=max_k))
            for result, value in zip(operands[len(shapes) :], values, strict=True):
                result.copy_(value)
            return True

        return Prepared(launch, tuple(range(len(sizes))))

    return AddressLauncher(lambda *given: kernel(*given, call), prepare)


LAUNCHERS = {"its kernel": None, "an op": flash_op, "an unrouted op": unrouted_op, "addresses": on_addresses}


@pytest.fixture
def specializing(route, fake, monkeypatch):
    """Register the routers; makes a backend with launchers, and the stand-ins for torch's kernels."""

    def make(launcher, kernels=None):
        kernels = native_kernels() if kernels is None else kernels
        made = Specializing(fake("mine").backend, launcher)

        def kernel(op, key):
            native = kernels[op.removeprefix("another")]
            return lambda *args, **options: made.called.append(op) or native(*args, **options)

        monkeypatch.setattr(captured, "kernel", kernel)
        route(kernels)
        return made, kernels

    return make


def test_python_enters_nothing_of_a_kept_call_of_one_of_torchs_kernels(specializing):
    made, _ = specializing(flash_op)
    inputs = qkv(heads_k=2)
    entered = set()
    with attnreg.register_backend(made.backend):
        for _ in range(4):
            call("cudnn", inputs, causal=True)
        sys.setprofile(lambda frame, event, _: event == "call" and entered.add(frame.f_code.co_filename))
        try:
            result = call("cudnn", inputs, causal=True)
        finally:
            sys.setprofile(None)
        assert_call_right("cudnn", result, inputs, window=CAUSAL)
    if captured.call_cache_in_use:
        ours, theirs = Path(attnreg.__file__).parent, Path(torch.__file__).parent
        # Nor what torch has written in Python: for tensors that have no memory that is most of it.
        forbidden = (ours, *(theirs / part for part in ("_decomp", "_refs", "_prims", "_prims_common")))
        found = [file for file in entered if any(part in Path(file).parents for part in forbidden)]
        assert found == [str(ours / "tools" / "measure" / "reference.py")]  # the stand-in for torch's kernel
    assert not made.called


ORDERS = [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)]


@pytest.mark.each_value("launcher", "order")
@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("launcher", LAUNCHERS.values(), ids=LAUNCHERS)
def test_every_launcher_gives_the_same_whatever_the_strides(specializing, ran, order, launcher):
    made, kernels = specializing(launcher)
    inputs = in_order(qkv(heads_k=2), order)
    with attnreg.register_backend(made.backend):
        results = [everything_of("cudnn", inputs, scale=0.4, causal=True) for _ in range(12)]
        assert ran() == {"mine": (12, 12)}
        assert_call_right("cudnn", call("cudnn", inputs), inputs)  # another scale
    for other in results[1:]:
        assert_alike(results[0], other, exact=launcher not in (flash_op, unrouted_op))
    if not captured.call_cache_in_use:
        assert not made.specialized
        assert not made.called
        return
    assert len(made.specialized) <= 10  # and not at every call
    run = [kernels[name["flash"]].calls for name in (FORWARD, BACKWARD)]
    assert all(len(calls) >= 8 for calls in run) is (launcher in (flash_op, unrouted_op))
    assert (len(made.called) >= 16) is (launcher in (unrouted_op, on_addresses))


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_values_of_another_head_dim_are_right_and_the_same_each_time(specializing, ran, order):
    made, _ = specializing(None)
    query, key, value = qkv(3, 6, heads_k=2)
    inputs = in_order((query, key, value.repeat(1, 1, 1, 2)), order)
    with attnreg.register_backend(made.backend):
        first, *further = (everything_of("cudnn", inputs, scale=0.4) for _ in range(5))
    on_meta = [x.detach().to("meta") for x in inputs]
    assert described(first[:-3]) == described(call("cudnn", on_meta, scale=0.4))
    assert_call_right("cudnn", first, inputs, first[-3:], scale=0.4)
    for results in further:
        assert_alike(first, results)
    assert ran() == {"mine": (5, 5)}


def test_seed_and_offset_share_no_memory_with_each_other_or_what_a_kernel_holds(specializing):
    kernels, held = native_kernels(), random_state()
    flash = kernels[FORWARD["flash"]]

    def with_states(*args, **options):
        out, lse, _, _, debug_mask = flash(*args, **options)
        return out, lse, *held, debug_mask

    made, _ = specializing(flash_op, {**kernels, FORWARD["flash"]: with_states})
    inputs = [x.detach() for x in qkv(heads_k=2)]
    seeds = []
    with attnreg.register_backend(made.backend):
        for _ in range(4):
            *_, seed, offset, _ = call("cudnn", inputs)
            for word in (seed, offset):
                assert (word.shape, word.dtype, word.device.type) == ((), torch.int64, "cpu")
                assert word.data_ptr() not in [x.data_ptr() for x in (*held, *seeds)]
            seed.fill_(7)
            assert offset.fill_(8).item() == 8
            assert seed.item() == 7
            seeds.append(seed)  # so that its memory stays in use
    assert [x.tolist() for x in held] == [x.tolist() for x in random_state()]
