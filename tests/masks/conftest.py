"""What tests of calls with masks share."""

import pytest

import attnreg
from attnreg.core.launching import offsets
from attnreg.masks import cache


@pytest.fixture
def recognise(routers):
    """Recognise masks."""
    offsets._cache.clear()
    attnreg.configure({"masks": "recognise"})
    attnreg.reset_stats()


@pytest.fixture(params=[True, False], ids=["in place", "copied"])
def in_place(request, monkeypatch):
    """Leave padding where it is, as on a CPU, and copy what counts, as on a GPU."""
    of_numbers = cache.structure_of
    monkeypatch.setattr(
        cache, "structure_of", lambda *sizes, in_place: of_numbers(*sizes, in_place=request.param)
    )


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
