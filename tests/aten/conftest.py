"""Fixtures of the routers' tests.

Routers of the ops that torch has for CUDA alone are put over the CPU's key, to run without a GPU.
"""

import warnings

import pytest
import torch
from support import cuda_ops, efficient_ops
from support.kernels import tables

from attnreg.backends.cpu import compiled
from attnreg.core import aten
from attnreg.core.aten import cudnn, efficient, flash
from attnreg.core.aten.routing import router
from attnreg.core.dispatch import call_cache
from attnreg.core.torchlib import captured


@pytest.fixture
def routes():
    """Return the routes of the ops that this torch has for CUDA alone, by op; a test may replace some."""
    found = *cudnn.ROUTES, *flash.ROUTES, *efficient.ROUTES
    return {route.op: route for route in found if aten._is_present(route)}


def pytest_generate_tests(metafunc):
    """Run tests of either routers once where those of the command line are the compiled ones anyway."""
    if "either_routers" in metafunc.fixturenames:
        others = ["python"] * (metafunc.config.getoption("--routers") == "python")
        metafunc.parametrize("either_routers", [*others, "compiled"], indirect=True)


@pytest.fixture
def either_routers(request):
    """Have the routers of a test be those of the command line, and compiled."""
    if request.param == "compiled":
        request.getfixturevalue("compiled_routers")


@pytest.fixture(params=[False, True], ids=["torch's kernel", "compiled kernel"])
def either_cpu_kernel(request, monkeypatch):
    """Have the cpu backend be without its compiled kernel, or with it."""
    kernel = request.getfixturevalue("cpu_kernel") if request.param else None
    monkeypatch.setattr(compiled, "load", lambda: kernel)


@pytest.fixture
def route(either_routers, routes):
    """Register routers at the CPU's key: `route({op: kernel, ...})`; other ops have no native kernel."""
    was_installed = aten.installed()
    aten.restore()
    native, routers = (torch.library.Library("aten", "IMPL") for _ in range(2))

    def remove():
        call_cache.remove_routers()
        routers._destroy()

    def register(kernels=None):
        kernels = kernels or {}
        module = call_cache.load()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Warning only once for all operators")
            for op, kernel in kernels.items():
                native.impl(op, kernel, "CPU")
            # Up to torch 2.12 a kernel known to be in Python can't be overridden; torch's own aren't.
            torch.library._impls.difference_update(native._op_impls)
            for op, kernel in {**cuda_ops.sdpa_kernels(), **efficient_ops.sdpa_kernels()}.items():
                routers.impl(op, kernel, "CPU")
        for op, found in routes.items():
            if not aten._is_present(found):
                continue
            aten._register(module or routers, op, "CPU", router(found, kernels.get(op)), found.layout)
        # These are the routers now, so that registering a backend installs no others.
        aten._remove, captured.call_cache_in_use = remove, module is not None

    yield register
    aten.restore()
    native._destroy()
    if was_installed:
        aten.ensure()


@pytest.fixture
def whole_graph(inductor):
    """Return a function that compiles a function in one graph; start and leave no cache."""
    torch._dynamo.reset()
    yield lambda f, **options: torch.compile(f, fullgraph=True, **{"backend": inductor, **options})
    torch._dynamo.reset()


@pytest.fixture
def uninstalled(either_routers):
    """Start and end with torch's ops as they were."""
    was_installed = aten.installed()
    aten.restore()
    before = tables()
    yield
    aten.restore()
    assert tables() == before, "the test left a kernel behind"
    if was_installed:
        aten.ensure()
