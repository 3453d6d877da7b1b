"""A run of the GPU tests ends at the first CUDA error."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

REFUSED = "E       torch.AcceleratorError: CUDA error: invalid argument"


def failed_with(text, **changes):
    usual = {"failed": True, "keywords": {"gpu": 1}, "longreprtext": text, "nodeid": "test_x.py::test_y"}
    return SimpleNamespace(**usual | changes)


@pytest.fixture
def log_report(request):
    """Return the hook of the suite's `conftest.py`."""
    folder = Path(__file__).parents[1]
    return request.config.pluginmanager.get_plugin(str(folder / "conftest.py")).pytest_runtest_logreport


@pytest.fixture
def device(monkeypatch):
    """Return what the next wait for the device ends in; None if it ends well."""
    state = SimpleNamespace(error=None)

    def synchronize():
        if state.error is not None:
            raise state.error

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    return state


@pytest.mark.parametrize(
    ("text", "error", "quoted"),
    [
        (REFUSED, None, REFUSED[1:].strip()),
        (
            "E  assert 1 == 2",
            RuntimeError("CUDA error: unspecified launch failure\nhint"),
            "CUDA error: unsp",
        ),
    ],
)
def test_an_error_of_cuda_ends_the_run_and_is_quoted(log_report, device, text, error, quoted):
    device.error = error
    with pytest.raises(pytest.exit.Exception, match="test_y ended in a CUDA error") as ended:
        log_report(failed_with(text))
    assert quoted in str(ended.value)


@pytest.mark.parametrize(
    "report",
    [
        failed_with("E  assert 1 == 2"),
        failed_with(REFUSED, failed=False),
        failed_with(REFUSED, keywords={}),
    ],
    ids=["another failure", "passed", "not on a GPU"],
)
def test_other_outcomes_do_not_end_the_run(log_report, device, report):
    log_report(report)
