"""What packages leave behind holds on to no tensor of the call that they ran in."""

import gc
import sys
import threading
import weakref
from contextlib import suppress

import fake_cudnn
import pytest
import torch

from attnreg.apart import apart, bare
from attnreg.backend import Backend, Call
from attnreg.backends import _fa2_package, _fa4_package, cudnn
from attnreg.capabilities import Capabilities
from attnreg.discovery import Entry
from attnreg.errors import BackendUnavailableError


@pytest.fixture(autouse=True)
def no_collection():
    """Leave garbage where it is: it is found when it is found."""
    gc.collect()
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


def test_a_cycle_that_is_left_in_a_thread_holds_no_tensor_of_the_caller():
    assert call_with_tensors(leave_a_cycle)() is not None  # without it, and it would have to be collected
    assert call_with_tensors(lambda: apart(leave_a_cycle))() is None


def test_what_comes_of_it_is_returned_or_raised():
    assert apart(lambda: (threading.current_thread() is threading.main_thread(), 5)) == (False, 5)
    with pytest.raises(RuntimeError, match="no engine"):
        apart(fail)
    with pytest.raises(SystemExit):
        apart(sys.exit)


def test_an_error_that_goes_through_holds_no_tensor_once_it_is_handled():
    def caught():
        with suppress(RuntimeError):
            apart(fail)

    assert call_with_tensors(caught)() is None


def test_an_error_that_is_kept_says_where_it_came_from_and_holds_no_tensor():
    kept = []

    def keep():
        try:
            try:
                fail()
            except RuntimeError as error:
                raise ImportError("outer") from error
        except ImportError as error:
            kept.append(bare(error))

    assert call_with_tensors(keep)() is None
    (error,) = kept
    assert (error.__traceback__, error.__cause__.__traceback__) == (None, None)
    (note,) = error.__notes__
    assert note.startswith("Raised here:\n")
    assert 'raise ImportError("outer") from error' in note
    assert not hasattr(bare(ValueError("never raised")), "__notes__")


def test_a_backend_that_fails_to_load_in_a_call_keeps_nothing_of_it():
    able = Capabilities(devices=("cpu",), dtypes=("float32",))
    entry = Entry("broken", "a test", Backend(name="broken", forward=able, backward=None, load=fail))

    def called():
        with suppress(BackendUnavailableError):
            entry.kernels()

    assert call_with_tensors(called)() is None
    assert str(entry.cause) == "no engine"


def test_a_package_that_fails_to_load_keeps_nothing_of_the_call(monkeypatch):
    monkeypatch.setattr(_fa2_package, "import_module", lambda name: fail())
    _fa2_package._loaded.cache_clear()
    try:
        assert call_with_tensors(_fa2_package._loaded)() is None
        assert str(_fa2_package._loaded()) == "no engine"
    finally:
        _fa2_package._loaded.cache_clear()


def test_importing_fa4_keeps_nothing_of_the_call_that_needed_it(monkeypatch):
    monkeypatch.setattr(_fa4_package, "import_module", lambda name: leave_a_cycle())
    monkeypatch.setattr(_fa4_package, "_checked", lambda interface, name: fail)
    monkeypatch.setattr(_fa4_package, "_keep_compiled", lambda: None)
    assert call_with_tensors(_fa4_package.functions)() is None


def test_a_plan_of_cudnn_keeps_nothing_of_the_call_that_needed_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: type("Stream", (), {"cuda_stream": 7}))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr("attnreg.backends._cudnn_described.stream_of", lambda tensor: 7)
    monkeypatch.setattr(
        fake_cudnn.Graph, "validate", lambda graph: (leave_a_cycle(), graph.steps.append("validate"))
    )

    def planned():
        plans = cudnn.Plans(fake_cudnn.module())
        q, k, v = (torch.randn(2, 8, 2, 64).bfloat16() for _ in "qkv")
        cudnn.forward(plans, q, k, v, Call(0.125, 8, 8, (-1, -1)))
        assert plans.built == {"forward": 1, "backward": 0}

    assert call_with_tensors(planned)() is None
    monkeypatch.setattr("attnreg.backends._cudnn_plans.apart", lambda run: run())
    assert call_with_tensors(planned)() is not None
