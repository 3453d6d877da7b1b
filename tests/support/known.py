"""A registry of a test's own."""

from attnreg.core import registry
from attnreg.core.registry.entry import Entry


def know(monkeypatch, *backends):
    """Have these backends known and no others; returns their entries, to be changed."""
    entries = {one.name.casefold(): Entry(one.name, "a test", one) for one in backends}
    monkeypatch.setattr(registry, "_entries", entries)
    registry.changed()
    return entries
