"""Fixtures of the tests of registration."""

import pytest

import attnreg
from attnreg import _registry, aten
from attnreg.contract.discovery import Entry
from attnreg.selection import policy


@pytest.fixture
def known(monkeypatch):
    """Make backends known, as if they had been discovered: `known(backend, ...)`; math stays."""

    def make(*backends):
        entries = {"math": _registry.find("math")}
        for backend in backends:
            entries[backend.name.casefold()] = Entry(backend.name, "a test", backend)
        monkeypatch.setattr(_registry, "_entries", entries)
        _registry.changed()

    return make


@pytest.fixture
def everything():
    """Return a function that reads all that a failing registration has to leave as it was."""

    def read():
        return (
            _registry.entries(),
            _registry.registrations(),
            policy.sources(),
            policy._active,
            aten._remove,
            attnreg.list_backends(),
        )

    return read
