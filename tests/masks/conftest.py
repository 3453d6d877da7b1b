"""What tests of calls with masks share."""

import pytest

import attnreg
from attnreg.masks import cache


@pytest.fixture
def recognise(routers):
    """Recognise masks."""
    cache._kept.clear()
    attnreg.configure({"masks": "recognise"})
    attnreg.reset_stats()


@pytest.fixture
def seen():
    """Return what masks were seen as since the last call, and of how many calls."""

    def read():
        rows = attnreg.stats().masks
        attnreg.reset_stats()
        return {row.seen: row.count for row in rows}

    return read


@pytest.fixture
def reads(monkeypatch):
    """Collect what is read back from a device."""
    read, found = cache.read, []
    monkeypatch.setattr(cache, "read", lambda numbers: found.append(numbers) or read(numbers))
    return found
