"""Promises about failing kernels: errors pass through, counted; one that can't be set up gives way."""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import threading

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.dense import assert_right, qkv, with_gradients

import attnreg
from attnreg.backends import math as math_backend
from attnreg.backends.cpu import compiled
from attnreg.core import aten
from attnreg.core.dispatch.counters import Failure
from attnreg.core.launching.launchers import AddressLauncher, Prepared
from attnreg.core.policy import ranks
from attnreg.errors import is_of_device

LIMITS = attnreg.Capabilities(
    devices=("cpu",), dtypes=("float32", "float64"), varlen=True, causal=True, dropout=True
)
MATH = math_backend.BACKEND.load()
PROBLEM = "ptxas: unknown option\n  in kernel.cu"
ONE_LINE = "ptxas: unknown option in kernel.cu"
SAID = f"not tried again for calls like this: {ONE_LINE}"


class Failing:
    """A backend with plain math's kernels, each of which raises the error that is set for its direction."""

    def __init__(self, name="failing", **errors):
        self.errors, self.called = errors, []
        kernels = attnreg.Kernels(self.kernel("forward"), self.kernel("backward"))
        self.backend = attnreg.Backend(name=name, forward=LIMITS, backward=LIMITS, load=lambda: kernels)

    def kernel(self, direction):
        def run(*arguments):
            self.called.append(direction)
            if error := self.errors.get(direction):
                raise error
            return getattr(MATH, direction)(*arguments)

        return run


@pytest.fixture(params=["sdpa", "varlen"])
def attend(request, packed):
    """Return a function of a call: output and gradients, which it has checked; and its inputs."""
    inputs = qkv(5, 5, heads=3) if request.param == "sdpa" else packed([3, 4])

    def run():
        function = F.scaled_dot_product_attention if request.param == "sdpa" else attnreg.varlen_attn
        results = with_gradients(function(*inputs), inputs[:3])
        if request.param == "sdpa":
            assert_right(results, inputs)
        return results

    return run


def attend_dense():
    inputs = qkv(5, 5, heads=3)
    assert_right(with_gradients(F.scaled_dot_product_attention(*inputs), inputs), inputs)


def lines(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def in_a_thread(run):
    """Run a function in a thread of its own, as autograd runs backwards; raises what it raises."""
    raised = []

    def catching():
        try:
            run()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=catching)
    thread.start()
    thread.join()
    for error in raised:
        raise error


# Errors that pass through


@pytest.mark.pairwise("router_kind", "attend", "before", "direction")
@pytest.mark.usefixtures("router_kind")
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("before", [0, 4], ids=["the first call", "a repeated call"])
def test_an_error_passes_through_each_time_counted_and_said_once(attend, direction, before, ran, caplog):
    failing = Failing()
    with attnreg.register_backend(failing.backend):
        for _ in range(before):
            attend()
        ran()
        failing.called.clear()
        failing.errors[direction] = error = torch.OutOfMemoryError("CUDA out of memory")
        for _ in range(20):
            with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory") as caught:
                in_a_thread(attend)
            assert caught.value is error
        assert failing.called.count(direction) == 20, "each call has one attempt"
        row = Failure("failing", direction, "OutOfMemoryError", "CUDA out of memory", 20)
        assert attnreg.stats().failures == (row,)
        assert ran() == ({} if direction == "forward" else {"failing": (20, 0)})
    said = f"failing failed in a {direction}: OutOfMemoryError: CUDA out of memory"
    assert [line.partition(" (")[0] for line in lines(caplog)] == [said]


@pytest.mark.usefixtures("router_kind")
def test_errors_are_counted_by_class_and_direction_and_reset_with_the_rest(caplog):
    failing, inputs = Failing(), qkv(5, 5, heads=3)
    with attnreg.register_backend(failing.backend):
        for error in (ValueError("one"), ValueError("two"), RuntimeError("three")):
            failing.errors["forward"] = error
            with pytest.raises(type(error)):
                F.scaled_dot_product_attention(*inputs)
        counted = [(row.error, row.message, row.count) for row in attnreg.stats().failures]
        assert counted == [("ValueError", "one", 2), ("RuntimeError", "three", 1)]
        attnreg.reset_stats()
        assert attnreg.stats().failures == ()
        with pytest.raises(RuntimeError):
            F.scaled_dot_product_attention(*inputs)
    assert [row.count for row in attnreg.stats().failures] == [1]
    assert len(lines(caplog)) == 2


def test_arguments_that_a_kernel_refuses_are_no_failure_of_it():
    failing = Failing(forward=attnreg.InvalidInputError("offsets: got -1, expected 0 or more"))
    with attnreg.register_backend(failing.backend), pytest.raises(attnreg.InvalidInputError):
        F.scaled_dot_product_attention(*qkv())
    assert attnreg.stats().failures == ()


def test_an_error_whose_text_cannot_be_read_is_raised_all_the_same():
    class UnreadableError(RuntimeError):
        def __str__(self):
            raise ValueError

    for error in (UnreadableError(), MemoryError()):
        with attnreg.register_backend(Failing(forward=error).backend), pytest.raises(type(error)):
            F.scaled_dot_product_attention(*qkv())
    messages = [row.message for row in attnreg.stats().failures]
    assert messages == ["its text can't be read", "no message"]


def raising_function(direction, tensors, call):
    return raising


def on_addresses(launch):
    """Return a launcher as the C++ runs it."""
    return AddressLauncher(launch, lambda *_: Prepared(launch, (0, 1, 2)))


def raising_on_addresses(direction, tensors, call):
    return on_addresses(raising)


def breaking(direction, tensors, call):
    return lambda *tensors: (tensors[0],)


def raising(*_):
    raise ctypes.ArgumentError("a launch failed")


@pytest.mark.parametrize(
    ("specialize", "error"),
    [
        (raising_function, "ArgumentError"),
        (raising_on_addresses, "ArgumentError"),
        (breaking, "RuntimeError"),
    ],
)
def test_errors_of_launchers_are_counted_as_their_backends(compiled_routers, specialize, error, caplog):
    aten.restore()
    kernels, inputs = attnreg.Kernels(MATH.forward, MATH.backward, specialize), qkv(5, 5, heads=3)
    limited = attnreg.Backend(name="mine", forward=LIMITS, backward=LIMITS, load=lambda: kernels)
    with attnreg.register_backend(limited), torch.no_grad():
        for _ in range(2):  # the second is kept
            F.scaled_dot_product_attention(*inputs)
        for _ in range(3):
            with pytest.raises((ctypes.ArgumentError, RuntimeError)):
                F.scaled_dot_product_attention(*inputs)
    assert [(row.backend, row.error, row.count) for row in attnreg.stats().failures] == [("mine", error, 3)]
    assert attnreg.stats().calls == {"mine": {"forward": 2, "backward": 0}}
    assert len(lines(caplog)) == 1


@pytest.mark.usefixtures("router_kind")
def test_ctrl_c_in_a_kernel_is_no_failure_of_it(attend, caplog):
    failing = Failing()
    with attnreg.register_backend(failing.backend):
        for _ in range(4):  # the compiled routers have kept it
            attend()
        failing.errors["forward"] = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            attend()
    assert attnreg.stats().failures == ()
    assert lines(caplog) == []


class Interrupting(logging.Handler):
    def emit(self, record):
        raise KeyboardInterrupt


def test_a_kernel_that_calls_pytorchs_attention_is_told_why_it_does_not_end(caplog):
    def forward(query, key, value, call):
        return F.scaled_dot_product_attention(query, key, value), None

    backend = attnreg.Backend(
        name="again", forward=LIMITS, load=lambda: attnreg.Kernels(forward), priority=300
    )
    with attnreg.register_backend(backend), torch.no_grad(), pytest.raises(RecursionError):
        F.scaled_dot_product_attention(*qkv(5, 5, heads=3))
    said = "if the kernel calls PyTorch's attention, that call is sent to it again (said once;"
    assert [said in record.message for record in caplog.records] == [True]
    assert attnreg.stats().failures[0].message.endswith(said.removesuffix(" (said once;"))


@pytest.mark.usefixtures("router_kind")
def test_ctrl_c_while_a_failure_is_counted_is_raised(attend):
    failing, handler = Failing(), Interrupting()
    with attnreg.register_backend(failing.backend):
        for _ in range(4):
            attend()
        failing.errors["forward"] = RuntimeError("a launch failed")
        logging.getLogger("attnreg").addHandler(handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                attend()
        finally:
            logging.getLogger("attnreg").removeHandler(handler)
        with pytest.raises(RuntimeError, match="a launch failed"):
            attend()
    assert [row.count for row in attnreg.stats().failures] == [2]


def test_explain_says_how_the_backend_that_would_run_a_call_has_failed():
    failing, inputs = Failing(forward=RuntimeError("no image")), qkv(5, 5, heads=3)
    with attnreg.register_backend(failing.backend):
        for _ in range(2):
            with pytest.raises(RuntimeError):
                F.scaled_dot_product_attention(*inputs)
        note = "failing failed 2 times in a forward of this process: RuntimeError: no image"
        assert note in attnreg.explain(*inputs).notes
        with attnreg.use_backend("cpu"):
            assert note not in attnreg.explain(*inputs).notes


# Kernels that can't be loaded, compiled or planned


@pytest.mark.pairwise("router_kind", "attend", "before", "direction")
@pytest.mark.usefixtures("router_kind")
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("before", [0, 5], ids=["the first call", "a repeated call"])
def test_a_kernel_that_cannot_be_set_up_gives_way_to_the_next_backend(attend, direction, before, ran, caplog):
    failing = Failing()
    with attnreg.register_backend(failing.backend):
        expected = attend()
        for _ in range(before - 1):
            attend()
        if not before:
            attnreg.core.registry.changed()  # no plan is left
        ran()
        failing.errors[direction] = attnreg.BackendUnavailableError(PROBLEM)
        failing.called.clear()
        for _ in range(5):
            torch.testing.assert_close(attend(), expected)
    assert failing.called.count(direction) == 1, "what the launcher raised isn't tried again"
    failures, what_ran = attnreg.stats().failures, ran()
    assert what_ran["failing"] == ((0, 5) if direction == "forward" else (5, 0))
    assert sum(map(sum, what_ran.values())) == 10
    assert failures == (Failure("failing", direction, "BackendUnavailableError", ONE_LINE, 1),)
    (fallback,) = lines(caplog)
    assert fallback.startswith("failing can't run this call, ")
    assert fallback.endswith(SAID)


def test_a_backend_is_set_aside_for_other_lengths_as_well_but_not_for_other_calls(ran):
    failing = Failing(forward=attnreg.BackendUnavailableError(PROBLEM))
    with attnreg.register_backend(failing.backend):
        for length in range(3, 9):
            F.scaled_dot_product_attention(*qkv(length, length, heads=3))
        assert failing.called == ["forward"]
        assert ran() == {"cpu": (6, 0)}
        explanation = attnreg.explain(*qkv(20, 20, heads=3))
        assert explanation.rejected["failing"] == (SAID,)
        assert explanation.backend == "cpu"
        failing.errors.clear()
        F.scaled_dot_product_attention(*qkv(5, 5, heads=3, dtype=torch.float64))
        assert ran() == {"failing": (1, 0)}
        attnreg.core.registry.changed()  # settings change: that doesn't make it compile
        F.scaled_dot_product_attention(*qkv(5, 5, heads=3))
        assert ran() == {"cpu": (1, 0)}
    assert [row.count for row in attnreg.stats().failures] == []  # `ran` has reset them


@pytest.mark.usefixtures("router_kind")
def test_a_backend_is_set_aside_for_other_lengths_that_it_has_run_before(ran):
    failing = Failing()
    lengths = {length: qkv(length, length, heads=3) for length in range(3, 11)}

    def attend():
        for inputs in lengths.values():
            assert_right(with_gradients(F.scaled_dot_product_attention(*inputs), inputs), inputs)

    with attnreg.register_backend(failing.backend):
        for _ in range(4):  # the compiled routers have kept all
            attend()
        ran()
        failing.errors["forward"] = attnreg.BackendUnavailableError(PROBLEM)
        failing.called.clear()
        for _ in range(3):
            attend()
    assert failing.called.count("forward") == 1
    assert ran() == {"failing": (0, 24), "cpu": (24, 0)}


def refusing(error, refused, kind):
    """Return a backend whose launchers of one direction raise an error, and the list of what was called."""
    failing = Failing("mine")

    def launch(*_):
        failing.called.append("launcher")
        raise error

    def specialize(direction, tensors, call):
        if direction != refused:
            return None
        return launch if kind == "function" else on_addresses(launch)

    kernels = failing.backend.load()._replace(specialize=specialize)
    return dataclasses.replace(failing.backend, load=lambda: kernels), failing.called


@pytest.mark.parametrize("kind", ["function", "addresses"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_launcher_that_cannot_be_set_up_gives_way_to_the_next_backend(
    compiled_routers, direction, kind, ran, caplog
):
    aten.restore()
    backend, called = refusing(attnreg.BackendUnavailableError(PROBLEM), direction, kind)
    inputs = qkv(5, 5, heads=3)
    with attnreg.register_backend(backend):
        for _ in range(6):  # the second is kept
            in_a_thread(attend_dense)
        explanation = (
            attnreg.explain(*inputs) if direction == "forward" else attnreg.explain(*inputs).backward
        )
    assert called.count("launcher") == 1
    assert called.count(direction) == 2
    assert explanation.rejected["mine"] == (SAID,)
    failure = Failure("mine", direction, "BackendUnavailableError", ONE_LINE, 1)
    assert attnreg.stats().failures == (failure,)
    assert ran() == {
        "mine": (2, 6) if direction == "forward" else (6, 2),
        "cpu": (4, 0) if direction == "forward" else (0, 4),
    }
    (fallback,) = lines(caplog)
    assert fallback == f"mine can't run this call, cpu runs it: {SAID}"


@pytest.mark.parametrize("kind", ["function", "addresses"])
def test_with_strict_a_launcher_that_cannot_be_set_up_is_an_error_with_the_reason(
    compiled_routers, kind, ran
):
    aten.restore()
    attnreg.configure(attnreg.Settings(strict=True))
    backend, called = refusing(attnreg.BackendUnavailableError(PROBLEM), "forward", kind)
    with attnreg.register_backend(backend):
        for _ in range(2):
            attend_dense()
        for _ in range(3):
            with pytest.raises(attnreg.UnsupportedInputError) as caught:
                attend_dense()
            assert caught.value.rejected["mine"] == (SAID,)
    assert called.count("launcher") == 1
    assert ran() == {"mine": (2, 2)}


@pytest.mark.parametrize("kind", ["function", "addresses"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_kernel_runs_a_call_that_its_launcher_declines(compiled_routers, direction, kind, ran, caplog):
    aten.restore()
    backend, called = refusing(attnreg.UnsupportedInputError("not on this stream"), direction, kind)
    with attnreg.register_backend(backend):
        for _ in range(6):
            in_a_thread(attend_dense)
    assert called.count("launcher") >= 2
    assert ran() == {"mine": (6, 6)}
    assert attnreg.stats().failures == ()
    assert lines(caplog) == []


def test_a_backend_is_set_aside_whatever_the_dropout(ran):
    failing = Failing(forward=attnreg.BackendUnavailableError(PROBLEM))
    query, key, value = (torch.randn(2, 5, 3, 8) for _ in "qkv")
    flash = torch.ops.aten._flash_attention_forward
    with attnreg.register_backend(failing.backend):
        for dropout in (0.1, 0.2, 0.3):
            flash(query, key, value, None, None, 5, 5, dropout, False, False)
        assert failing.called == ["forward"]
        failing.errors.clear()
        flash(query, key, value, None, None, 5, 5, 0.0, False, False)  # its kernel is another one
    serves = "math" if compiled.load() is None else "cpu"
    assert ran() == {serves: (3, 0), "failing": (1, 0)}


@pytest.mark.usefixtures("router_kind")
def test_a_rank_that_sets_a_backend_aside_is_named(monkeypatch, caplog):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(ranks, "agree", lambda *_: None)
    failing, inputs = Failing(forward=attnreg.BackendUnavailableError(PROBLEM)), qkv(5, 5, heads=3)
    with attnreg.register_backend(failing.backend):
        F.scaled_dot_product_attention(*inputs)
        (reason,) = attnreg.explain(*inputs).rejected["failing"]
    where = "on rank 1 (ranks that choose differently don't agree bitwise)"
    assert reason == f"not tried again for calls like this: {where}: {ONE_LINE}"
    assert lines(caplog) == [f"failing can't run this call, cpu runs it: {reason}"]


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "backend="])
def test_with_strict_or_with_backend_on_the_call_it_is_an_error_with_the_reason(strict, packed, ran):
    failing = Failing(forward=attnreg.BackendUnavailableError(PROBLEM))
    attnreg.configure(attnreg.Settings(strict=strict))
    with attnreg.register_backend(failing.backend):
        for _ in range(2):
            with pytest.raises(attnreg.UnsupportedInputError) as caught:
                attnreg.varlen_attn(*packed([3, 4]), **({} if strict else {"backend": "failing"}))
            assert caught.value.rejected["failing"] == (SAID,)
    assert failing.called == ["forward"]
    assert [row.count for row in attnreg.stats().failures] == [1]
    assert ran() == {}


def test_a_backward_with_dropout_has_no_other_backend_to_go_to():
    failing = Failing(backward=attnreg.BackendUnavailableError(PROBLEM))
    query, key, value = (torch.randn(2, 5, 3, 8) for _ in "qkv")
    flash = torch.ops.aten._flash_attention_forward
    with attnreg.register_backend(failing.backend):
        given = query, key, value, None, None, 5, 5, 0.5, False
        out, lse, state, unused, _ = flash(*given, False)
        with pytest.raises(attnreg.UnsupportedInputError, match="ptxas: unknown option in"):
            torch.ops.aten._flash_attention_backward(
                out, query, key, value, out, lse, None, None, 5, 5, 0.5, False, state, unused
            )


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("full"), True),
        (MemoryError(), True),
        (torch.AcceleratorError("an illegal memory access"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), True),
        (RuntimeError("cudaErrorLaunchFailure"), True),
        (RuntimeError("CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), True),
        (RuntimeError("ptxas fatal: out of shared memory"), False),
        (
            torch.AcceleratorError("CUDA error: no kernel image is available for execution on the device"),
            False,
        ),
        (RuntimeError("CUDA Error: cudaErrorNoKernelImageForDevice"), False),
        (RuntimeError("CUDA_ERROR_NO_BINARY_FOR_GPU"), False),
        (RuntimeError("CUDA_ERROR_UNSUPPORTED_PTX_VERSION (222)"), False),
        (RuntimeError("CUDA_ERROR_INVALID_PTX"), False),
        (RuntimeError("CUDA_ERROR_INVALID_IMAGE"), False),
        (RuntimeError("CUDA error: device kernel image is invalid"), False),
        (RuntimeError("CUDA error: the provided PTX was compiled with an unsupported toolchain."), False),
        (RuntimeError("CUDA error: invalid argument"), True),
        (AssertionError(), False),
    ],
)
def test_whether_an_error_or_its_cause_is_of_the_device(error, expected):
    assert is_of_device(error) is expected
    wrapped = RuntimeError("the package failed")
    wrapped.__cause__ = error
    assert is_of_device(wrapped) is expected
    error.__cause__ = wrapped  # causes in a circle
    assert is_of_device(wrapped) is expected
