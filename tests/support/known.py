"""A registry of a test's own."""

from attnreg.core import registry
from attnreg.core.registry.entry import Entry


def know(monkeypatch, *backends):
    """Have these backends known and no others; returns their entries, to be changed."""
    entries = {one.name.casefold(): Entry(one.name, "a test", one) for one in backends}
    monkeypatch.setattr(registry, "_entries", entries)
    registry.changed()
    return entries


def replace(name, backend=None):
    """Have another backend of that name, or none."""
    others = {one: entry for one, entry in registry.entries().items() if one != name}
    registry._entries = others if backend is None else {**others, name: Entry(name, "a test", backend)}
    registry.changed()
