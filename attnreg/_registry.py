"""The one registry of a process: which backends there are, and which the program asked for.

Everything here is behind one lock and changes by replacing whole values, so a reader never sees
half a change. `generation` is replaced at every change; whoever derives something from the registry
keeps it for as long as the generation is the same object.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING, NamedTuple

from attnreg.discovery import Entry, discover
from attnreg.errors import RegistrationError, UnknownBackendError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attnreg.backend import Backend

__all__ = [
    "Registration",
    "add",
    "changed",
    "discard",
    "entries",
    "find",
    "forget",
    "prefer",
    "registrations",
]

log = logging.getLogger("attnreg")

lock = threading.RLock()
generation: object = object()

_entries: dict[str, Entry] | None = None
_registrations: tuple[Registration, ...] = ()

if hasattr(os, "register_at_fork"):
    # A thread of the parent may hold the lock; in the child it would never be released.
    os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined]


class Registration(NamedTuple):
    """One `register_backend`: the backend's name and the settings keys of the devices it leads."""

    name: str
    devices: tuple[str, ...]
    token: object


def changed() -> None:
    """Start a new generation."""
    global generation
    generation = object()


def entries() -> Mapping[str, Entry]:
    """Return every known backend by its name in lower case; discovers them on the first call."""
    global _entries
    if _entries is None:
        with lock:
            if _entries is None:
                _entries = _by_name(discover())
    return _entries


def find(name: str) -> Entry:
    """Return the backend of that name, whatever its case.

    Raises:
        UnknownBackendError: there is none; lists the known ones and the nearest.
    """
    known = entries()
    entry = known.get(name.strip().casefold()) if isinstance(name, str) else None
    if entry is None:
        names = [other.name for other in known.values()]
        hint = did_you_mean(str(name), names) or ";"
        raise UnknownBackendError(f"no backend is named {name!r}{hint} known backends: {', '.join(names)}")
    return entry


def add(backend: Backend, origin: str) -> Entry:
    """Take in a backend of the program's own; the same object again is no change.

    Raises:
        RegistrationError: another backend has that name.
    """
    global _entries
    with lock:
        known = dict(entries())
        present = known.get(backend.name.casefold())
        if present is not None and present.backend is backend:
            return present
        if present is not None:
            raise RegistrationError(
                f"a backend named {present.name!r} is there already ({present.origin}); "
                f"got another from {origin}, expected a name of its own"
            )
        entry = Entry(backend.name, origin, backend)
        known[backend.name.casefold()] = entry
        _entries = known
        changed()
        return entry


def discard(entry: Entry) -> None:
    """Drop a backend that `add` took in; no change if it isn't there."""
    global _entries
    with lock:
        if _entries is not None and _entries.get(entry.name.casefold()) is entry:
            _entries = {name: other for name, other in _entries.items() if other is not entry}
            changed()


def registrations() -> tuple[Registration, ...]:
    """Return what the program registered, the newest first."""
    return _registrations


def prefer(name: str, devices: tuple[str, ...]) -> Registration:
    """Put a backend first for some devices."""
    global _registrations
    with lock:
        registration = Registration(name, devices, object())
        _registrations = (registration, *_registrations)
        changed()
        return registration


def forget(registration: Registration) -> bool:
    """Take a registration back; False if it was gone already."""
    global _registrations
    with lock:
        kept = tuple(other for other in _registrations if other.token is not registration.token)
        if len(kept) == len(_registrations):
            return False
        _registrations = kept
        changed()
        return True


def _by_name(found: list[Entry]) -> dict[str, Entry]:
    known: dict[str, Entry] = {}
    for entry in found:
        first = known.setdefault(entry.name.casefold(), entry)
        if first is not entry:
            log.warning(
                "two backends are named %r: %s is used, %s is not", entry.name, first.origin, entry.origin
            )
        if entry.cause is not None:
            log.info("backend %s is broken (%s): %r", entry.name, entry.origin, entry.cause)
    return known
