"""Fixtures of the GPU tests, most of them about repeated calls."""

import faulthandler
import sys

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from support import plan_counts

from attnreg.core import aten
from attnreg.core.dispatch import call_cache
from attnreg.core.dispatch.state import state
from attnreg.core.torchlib import captured


@pytest.fixture(autouse=True)
def crashing_says_where(request):
    """Install Python's handler of SIGSEGV anew: tvm_ffi, which FA4 imports, has one that pytest captures."""
    faulthandler.disable()
    faulthandler.enable(request.config.stash.get(fault_handler_stderr_fd_key, sys.__stderr__))


@pytest.fixture(autouse=True)
def as_in_a_new_process(no_graph_trees):
    """Hide what tests before have loaded."""


@pytest.fixture
def planned(monkeypatch):
    """Return a function that counts the plans in Python that another takes."""
    return plan_counts.counting(monkeypatch)


@pytest.fixture
def is_kept(planned):
    """Return whether a repeated call makes no plan, and with compiled routers isn't planned at all.

    A backend that may still offer a better launcher is asked ever more rarely: not at three calls running.
    """

    def is_kept(call):
        plans = _plans()
        counts = [planned(call) for _ in range(3)]
        return _plans() == plans and (call_cache.load() is None or 0 in counts)

    return is_kept


def _plans():
    return {(id(plan.kind), plan.key) for plan in state().plans()}


@pytest.fixture
def compiled_cache(compiled_routers):
    """Have the compiled call cache serve a test, whatever the run is about."""
    aten.restore()
    aten.ensure()
    assert captured.call_cache_in_use
    yield compiled_routers
    aten.restore()
