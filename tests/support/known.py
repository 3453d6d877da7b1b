"""A registry of a test's own."""

from attnreg import _registry
from attnreg.contract.discovery import Entry


def know(monkeypatch, *backends):
    """Have these backends known and no others; returns their entries, to be changed."""
    entries = {one.name.casefold(): Entry(one.name, "a test", one) for one in backends}
    monkeypatch.setattr(_registry, "_entries", entries)
    _registry.changed()
    return entries
