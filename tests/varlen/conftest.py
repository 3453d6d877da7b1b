"""Fixtures of the tests of `varlen_attn`: its three ways to autograd, and two backends."""

import pytest
import torch

import attnreg
from attnreg.core.varlen import front as varlen_front


@pytest.fixture(autouse=True)
def installed(routers, one_thread):
    """Have the routers in, which torch's `varlen_attn` needs and attnreg's mustn't mind."""


@pytest.fixture(params=["call cache", "autograd function", "custom op"])
def front(request, monkeypatch, no_graph_trees):
    """Run a test on each way that a call can take to autograd."""
    request.getfixturevalue("compiled_routers" if request.param == "call cache" else "python_routers")
    if request.param == "custom op":
        monkeypatch.setattr(varlen_front, "is_plain", lambda *tensors: False)
    return request.param


@pytest.fixture
def nothing_compiled():
    """Begin and end a test without compiled programs."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def mine(fake):
    """Register a backend "mine", and math, which comes first."""
    with attnreg.register_backend(fake("mine").backend), attnreg.register_backend("math"):
        yield
