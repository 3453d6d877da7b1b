"""Kernels, faked or of the CPU, run on one thread unless a test asks for more."""

import pytest
import torch
from support import flex_graphs as graphs
from support.cpu_calls import refuse

from attnreg.backends.cpu import choice
from attnreg.core.contract.backend import Kernels


@pytest.fixture(autouse=True)
def once_on_one_thread(references_once, one_thread, no_other_lengths):
    pass


@pytest.fixture
def kernels(cpu_kernel, monkeypatch):
    """Return the CPU's compiled kernel as its backend uses it; a call that would go to torch's fails."""
    monkeypatch.setattr(choice, "leaves_to_torch", lambda *call: False)
    return cpu_kernel.before(Kernels(refuse, refuse))


@pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.slow)])
def threads(request, once_on_one_thread):
    """Run a test with one thread and, in the slow tier, with two."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def flex_graphs(monkeypatch):
    """Have flex's graphs run on the CPU, uncompiled; returns its programs by kind."""
    return graphs.run_uncompiled(monkeypatch)
