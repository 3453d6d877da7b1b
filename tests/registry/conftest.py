"""Fixtures of the tests of registration."""

import pytest
from support.known import know

import attnreg
from attnreg.backends import math as math_backend
from attnreg.core import aten, registry
from attnreg.core.policy import current as policy


@pytest.fixture
def known(monkeypatch):
    """Make backends known, as if they had been discovered: `known(backend, ...)`; math stays."""

    return lambda *backends: know(monkeypatch, math_backend.BACKEND, *backends)


@pytest.fixture
def everything():
    """Return a function that reads all that a failing registration has to leave as it was."""
    return lambda: (
        registry.entries(),
        registry.registrations(),
        policy.sources(),
        policy._active,
        aten._remove,
        attnreg.list_backends(),
    )
