"""A fake package in place of flash-attn-4, of which nothing has been compiled."""

import functools
import sys
import types

import pytest
from support import fake_fa4, fake_fa4_kernels, fake_fa4_masks

from attnreg.backends.fa4 import BACKEND, compiled_kinds, softcap
from attnreg.backends.fa4 import package as fa4_package
from attnreg.core.launching import offsets


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch):
    monkeypatch.setenv(fa4_package.SWITCH, "0")  # no disk cache
    fake_fa4.forget(monkeypatch)


@pytest.fixture
def install(monkeypatch):
    return functools.partial(fake_fa4.install, monkeypatch)


@pytest.fixture
def package(install):
    return install()


@pytest.fixture
def kernels(package):
    return BACKEND.load()


@pytest.fixture
def on_hopper(monkeypatch):
    """Take tensors of a CPU for those of a Hopper; functions of scores compute with torch's operations."""
    for name, module in fake_fa4_masks.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(compiled_kinds, "major_of", lambda device: 9)
    softcap._on_scores.cache_clear()
    yield
    softcap._on_scores.cache_clear()


@pytest.fixture
def rounds(kernels, package):
    """Run calls of one kind; returns which directions entered the package's Python, by round."""
    return functools.partial(fake_fa4.entered_by_round, kernels, package)


@pytest.fixture
def many_are_few(monkeypatch):
    """Return how many sequences need no launch of their own that sums up their tiles: fewer than really."""
    for module in (fake_fa4_kernels, compiled_kinds):
        monkeypatch.setattr(module, "MANY", 8)
    return 8


@pytest.fixture
def no_unused_rows(monkeypatch):
    """Have it known of packed batches that every row belongs to a sequence, which is never known on a CPU."""
    found = types.SimpleNamespace(no_unused_rows=True)
    monkeypatch.setattr(offsets, "facts", lambda *arguments: found)
    return found
