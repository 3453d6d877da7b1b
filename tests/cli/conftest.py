"""Fixtures for tests of the command line."""

from importlib.metadata import EntryPoint

import pytest
from support.command_line import invoke

from attnreg.backends import math as math_backend
from attnreg.core.registry import discovery


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch, one_thread, references_once, no_other_lengths):
    """Print for 80 columns, whatever terminal runs the tests."""
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("FORCE_COLOR", "NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def call():
    """Run a command in this process."""
    return invoke


@pytest.fixture
def plugins(monkeypatch):
    """Install entry points; each is given as name to what its loading returns or raises."""

    def install(**points):
        class Point(EntryPoint):
            def load(self):
                found = points[self.name]
                if isinstance(found, BaseException):
                    raise found
                return found

        made = [Point(name, f"{name}_package:BACKEND", discovery.GROUP) for name in points]
        monkeypatch.setattr(discovery, "entry_points", lambda group: made)

    return install


@pytest.fixture
def kernels():
    """Return the kernels of the reference, to be changed."""
    return math_backend.BACKEND.load()
