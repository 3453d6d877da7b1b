"""Fixtures of the tests of `varlen_attn`: its three ways to autograd, and the kernels of a CPU."""

import pytest

import attnreg
from attnreg.backends.cpu import choice, compiled, torch_path
from attnreg.varlen import front as varlen_front


@pytest.fixture(autouse=True)
def installed(routers, one_thread):
    """Have the routers in, which torch's `varlen_attn` needs and attnreg's mustn't mind."""


@pytest.fixture(params=["call cache", "autograd function", "custom op"])
def front(request, monkeypatch, no_graph_trees):
    """Run a test on each way that a call can take to autograd."""
    request.getfixturevalue("compiled_routers" if request.param == "call cache" else "python_routers")
    if request.param == "custom op":
        monkeypatch.setattr(varlen_front, "_is_plain", lambda *tensors: False)
    return request.param


@pytest.fixture(params=["torch's kernel", "compiled kernel"])
def kernel_of_cpu(request, monkeypatch):
    """Have the cpu backend run calls by one of its two kernels alone."""
    found = None
    if request.param == "compiled kernel":
        found = request.getfixturevalue("cpu_kernel")
        monkeypatch.setattr(choice, "leaves_to_torch", lambda *call: False)
        for direction in ("forward", "backward"):
            monkeypatch.setattr(torch_path, direction, lambda *call: pytest.fail("torch's kernel was called"))
    monkeypatch.setattr(compiled, "load", lambda: found)
    monkeypatch.setattr(compiled, "is_there", lambda: found is not None)


@pytest.fixture
def mine(fake):
    """Register a backend "mine", and math, which comes first."""
    with attnreg.register_backend(fake("mine").backend), attnreg.register_backend("math"):
        yield
