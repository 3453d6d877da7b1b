"""Promises of isolation: errors that packages store keep no tensor of a call alive."""

import gc
import sys
import threading
import time
import weakref
from contextlib import suppress
from importlib.metadata import EntryPoint

import pytest
import torch
from support import fake_cudnn

from attnreg.backends import cudnn
from attnreg.backends.fa2 import flash_attn_package as fa2_package
from attnreg.backends.fa4 import package as fa4_package
from attnreg.core.contract.backend import Backend, Call
from attnreg.core.contract.capabilities import Capabilities
from attnreg.core.dispatch.state import state
from attnreg.core.policy import current as policy
from attnreg.core.registry import discovery
from attnreg.core.registry.entry import Entry
from attnreg.core.torchlib.isolation import run_in_thread, strip_tracebacks
from attnreg.errors import BackendUnavailableError, ConfigError


@pytest.fixture(autouse=True)
def no_collection():
    """Switch the garbage collector off: what a cycle holds stays alive."""
    gc.collect()
    gc.freeze()  # so that the next test has little to collect
    gc.disable()
    yield
    gc.enable()


def fail():
    raise RuntimeError("no engine")


def leave_a_cycle():
    """Catch an error and keep it in a variable of the frame that it holds."""
    kept = None
    try:
        fail()
    except RuntimeError as error:
        kept = error
    return kept is not None


def call_with_tensors(run):
    """Return a reference to a tensor of a frame that `run` was called from."""
    tensor = torch.ones(3)
    run()
    return weakref.ref(tensor)


def test_a_reference_cycle_made_in_a_thread_holds_no_tensor_of_the_caller():
    assert call_with_tensors(leave_a_cycle)() is not None  # without the thread it does
    assert call_with_tensors(lambda: run_in_thread(leave_a_cycle))() is None


def test_the_result_is_returned_and_an_error_raised():
    assert run_in_thread(lambda: (threading.current_thread() is threading.main_thread(), 5)) == (False, 5)
    with pytest.raises(RuntimeError, match="no engine"):
        run_in_thread(fail)
    with pytest.raises(SystemExit):
        run_in_thread(sys.exit)


def test_the_function_has_ended_when_ctrl_c_reaches_the_caller(monkeypatch):
    ended, joined = threading.Event(), []
    join = threading.Thread.join

    def interrupted(thread, timeout=None):
        joined.append(thread)
        if len(joined) == 1:
            raise KeyboardInterrupt
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_in_thread(lambda: (time.sleep(0.05), ended.set()))
    assert ended.is_set()


@pytest.mark.parametrize("end", ["finalizing", "no thread"])
def test_where_no_thread_can_be_started_it_runs_in_the_callers(monkeypatch, end):
    if end == "finalizing":
        monkeypatch.setattr(sys, "is_finalizing", lambda: True)
    monkeypatch.setattr(threading.Thread, "start", lambda thread: fail())
    assert run_in_thread(threading.current_thread) is threading.current_thread()


def test_an_error_that_is_raised_holds_no_tensor_once_it_is_handled():
    def caught():
        with suppress(RuntimeError):
            run_in_thread(fail)

    assert call_with_tensors(caught)() is None


def test_a_stored_error_says_where_it_and_its_causes_were_raised_and_none_holds_a_tensor():
    kept = []

    def keep():
        try:
            try:
                fail()
            except RuntimeError as error:
                raise ImportError("outer") from ExceptionGroup("parts", [error])
        except ImportError as error:
            kept.append(strip_tracebacks(error))

    assert call_with_tensors(keep)() is None
    (error,) = kept
    inner = error.__cause__.exceptions[0]
    for one, line in ((error, 'raise ImportError("outer") from'), (inner, "fail()")):
        assert one.__traceback__ is None
        (note,) = one.__notes__
        assert note.startswith("Raised here:\n") and line in note
    assert inner is error.__context__  # met twice, noted once
    assert not hasattr(strip_tracebacks(ValueError("never raised")), "__notes__")


def test_a_backend_that_fails_to_load_keeps_no_tensor_of_the_call():
    able = Capabilities(devices=("cpu",), dtypes=("float32",))
    entry = Entry("broken", "a test", Backend(name="broken", forward=able, backward=None, load=fail))

    def called():
        with suppress(BackendUnavailableError):
            entry.kernels()

    assert call_with_tensors(called)() is None
    assert str(entry.cause) == "no engine"


def test_a_broken_plugin_keeps_no_tensor_of_the_call_that_discovered_it():
    class Broken(EntryPoint):
        def load(self):
            fail()

    kept = []

    def looked_for():
        kept.append(discovery._entry(Broken("broken", "broken:BACKEND", discovery.GROUP), "a test"))

    assert call_with_tensors(looked_for)() is None
    assert str(kept[0].cause) == "no engine"


def test_settings_that_cannot_be_read_keep_no_tensor_of_the_call(monkeypatch):
    monkeypatch.setenv("ATTNREG_BACKEND", "unknown")

    def called():
        for look in (policy.sources, policy.sources, lambda: state().policy, lambda: state().policy):
            with suppress(ConfigError):
                look()
                pytest.fail("it was read")

    assert call_with_tensors(called)() is None


def test_a_package_that_fails_to_load_keeps_no_tensor_of_the_call(monkeypatch):
    monkeypatch.setattr(fa2_package, "import_module", lambda name: fail())
    fa2_package._loaded.cache_clear()
    try:
        assert call_with_tensors(fa2_package._loaded)() is None
        assert str(fa2_package._loaded()) == "no engine"
    finally:
        fa2_package._loaded.cache_clear()


@pytest.mark.parametrize("fails", [False, True])
def test_importing_fa4_keeps_no_tensor_of_the_call(monkeypatch, fails):
    def import_module(name):
        leave_a_cycle()
        if fails:
            raise ImportError(name)

    def called():
        with suppress(ImportError):
            fa4_package.functions()
            assert not fails

    monkeypatch.setattr(fa4_package, "import_module", import_module)
    monkeypatch.setattr(fa4_package, "_checked", lambda interface, name: fail)
    monkeypatch.setattr(fa4_package, "_keep_compiled", lambda: None)
    assert call_with_tensors(called)() is None


def test_a_cudnn_plan_keeps_no_tensor_of_the_call(monkeypatch):
    fake_cudnn.install(monkeypatch)
    monkeypatch.setattr(
        fake_cudnn.Graph, "validate", lambda graph: (leave_a_cycle(), graph.steps.append("validate"))
    )

    def planned():
        module = fake_cudnn.Module()  # plans hold it weakly
        plans = cudnn.ExecutionPlans(module)
        q, k, v = (torch.randn(2, 8, 2, 64).bfloat16() for _ in "qkv")
        cudnn.forward(plans, q, k, v, Call(0.125, 8, 8, (-1, -1)))
        assert plans.built == {"forward": 1, "backward": 0}

    assert call_with_tensors(planned)() is None
    monkeypatch.setattr("attnreg.backends.cudnn.execution_plans.run_in_thread", lambda run: run())
    assert call_with_tensors(planned)() is not None


def test_a_backward_in_the_thread_waits_for_no_thread_of_autograd():
    # On a GPU the caller may be autograd's thread of the device. A CPU has none, so the setting is looked at.
    assert not run_in_thread(torch._C._is_multithreading_enabled)
    assert torch._C._is_multithreading_enabled()
