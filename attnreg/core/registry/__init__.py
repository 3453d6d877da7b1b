"""The one registry of a process: which backends there are, and which the program asked for.

Everything here, the settings in force and the routers are behind one lock. It changes by replacing whole
values, so a reader never sees half a change. `generation` is replaced at every change; what other modules
derive from the registry is valid for as long as the generation is the same object.

`entry` has what is known of one backend, `loading` which thread loads it. `discovery` finds backends;
`sourced` has those that a name brings, and `verification` what checks of them have found. `known_issues` has
kernels that are wrong in some versions. May import: `adaptation` and all below it, but no backend.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple

from attnreg.core.contract.backend import Backend
from attnreg.core.registry.discovery import discover
from attnreg.core.registry.entry import Entry
from attnreg.core.registry.sourced import SourcedEntry
from attnreg.core.settings import hub_names
from attnreg.core.settings.other_names import backend_meant
from attnreg.core.torchlib.locks import open_after_fork
from attnreg.errors import MOST_KNOWN, RegistrationError, UnknownBackendError, first_ten, short_repr

log = logging.getLogger("attnreg")


def _handle(record: logging.LogRecord) -> None:
    with contextlib.suppress(Exception):
        type(log).handle(log, record)


# A program's handler may raise, or write to a closed stream: that must not cost it its attention. Not done in
# `attnreg/__init__.py`: `python -m attnreg` imports that while the current folder is on the path.
log.handle = _handle  # type: ignore[method-assign]

lock = open_after_fork(threading.RLock())
generation: object = object()

_entries: dict[str, Entry] | None = None
_discovering = threading.local()
_registrations: tuple[Registration, ...] = ()
_listeners: list[Callable[[], object]] = []


class Registration(NamedTuple):
    """One `register_backend`: the backend and the settings keys of the devices where it is preferred."""

    entry: Entry
    devices: tuple[str, ...]


def changed() -> None:
    """Start a new generation."""
    global generation
    generation = object()
    forget_calls()


def forget_failures() -> None:
    """Have kernels from the hub that couldn't be loaded be loaded again when they are next needed."""
    for entry in entries().values():
        if isinstance(entry, SourcedEntry):
            entry.forget_failure()


def forget_calls() -> None:
    """Have caches of single calls forget them; decisions stay."""
    for tell in _listeners:
        tell()


def on_change(tell: Callable[[], object]) -> None:
    """Have a function called after each change, for caches that can't compare generations."""
    _listeners.append(tell)


def entries() -> Mapping[str, Entry]:
    """Return every known backend by its name in lower case; discovers them on the first call.

    Raises `RegistrationError` if a backend's module asks while it is itself being discovered.
    """
    global _entries
    if _entries is None:
        if getattr(_discovering, "now", False):
            raise RegistrationError(
                "backends are being discovered: a module that declares one can't use the registry "
                "while it is imported"
            )
        _discovering.now = True
        try:
            # Not behind the lock: a module that another thread is importing may wait for it, to register a
            # backend. Should two threads discover at once, what the first has found counts.
            discovered = discover()
        finally:
            _discovering.now = False
        with lock:
            if _entries is None:
                _entries = _by_name(discovered)
    return _entries


def find(name: str) -> Entry:
    """Return the backend of that name, whatever its case; an `UnknownBackendError` lists the known ones.

    A name that begins with `hub:` is that of a kernel from the hub, which loads when it is first needed.
    """
    known = entries()
    names = [other.name for other in known.values()]
    shown = first_ten(names, most=MOST_KNOWN)
    if not isinstance(name, str):
        got = f"a Backend named {name.name!r}" if isinstance(name, Backend) else short_repr(name)
        raise UnknownBackendError(f"got {got}, expected the name of a backend: {', '.join(shown)}")
    if hub_names.is_hub_name(name):
        return _from_hub(name)
    entry = known.get(name.strip().casefold())
    if entry is None:
        hint = hub_names.suggested(name) or backend_meant(name, names) or ";"
        named = short_repr(name)
        raise UnknownBackendError(f"no backend is named {named}{hint} known backends: {', '.join(shown)}")
    return entry


def _from_hub(name: str) -> Entry:
    """Return the kernel of a hub's name, which is known from now on; loads nothing."""
    global _entries
    try:
        source = hub_names.parse(name)
    except ValueError as error:
        raise UnknownBackendError(str(error)) from None
    with lock:
        key = str(source).casefold()
        present = entries().get(key)
        if present is None:
            _entries = {**entries(), key: (entry := SourcedEntry(source, changed))}
            changed()
            return entry
    if present.name != str(source):
        raise UnknownBackendError(
            f"got {short_repr(name)}, but {present.name!r} is known, expected the same upper and lower case: "
            "folders and revisions may differ in nothing else"
        )
    return present


def add(backend: Backend, origin: str) -> Entry:
    """Take in a backend of the program's own; the same object again is no change.

    Raises `RegistrationError` if another backend has that name.
    """
    global _entries
    entries()  # discovers, which it mustn't do behind the lock
    with lock:
        known = dict(entries())
        present = known.get(backend.name.casefold())
        if present is not None and present.backend is backend:
            return present
        if present is not None:
            removed = ", or that the first one's handle is removed before" if present.own else ""
            raise RegistrationError(
                f"a backend named {present.name!r} is there already ({present.origin}); "
                f"got another, {origin}, expected a name of its own{removed}"
            )
        entry = Entry(backend.name, origin, backend, own=True)
        known[backend.name.casefold()] = entry
        _entries = known
        changed()
        return entry


def discard(entry: Entry) -> None:
    """Drop a backend that `add` or `find` took in; no change if it is registered or isn't there."""
    global _entries
    with lock:
        registered = any(registration.entry is entry for registration in _registrations)
        if (
            (entry.own or entry.on_request)
            and not registered
            and entries().get(entry.name.casefold()) is entry
        ):
            _entries = {name: other for name, other in entries().items() if other is not entry}
            changed()


def registrations() -> tuple[Registration, ...]:
    """Return what the program registered, the newest first."""
    return _registrations


def prefer(entry: Entry, devices: tuple[str, ...]) -> Registration:
    """Put a backend first for some devices.

    Raises `RegistrationError` if another thread has dropped it, and a third has taken its name.
    """
    global _entries, _registrations
    with lock:
        present = entries().get(entry.name.casefold(), entry)
        if present is not entry:
            raise RegistrationError(f"a backend named {entry.name!r} is there already ({present.origin})")
        _entries = {**entries(), entry.name.casefold(): entry}
        registration = Registration(entry, devices)
        _registrations = (registration, *_registrations)
        changed()
        return registration


def forget(registration: Registration) -> bool:
    """Take a registration back; False if it was gone already."""
    global _registrations
    with lock:
        kept = tuple(other for other in _registrations if other is not registration)
        if len(kept) == len(_registrations):
            return False
        _registrations = kept
        changed()
        return True


def _by_name(discovered: list[Entry]) -> dict[str, Entry]:
    known: dict[str, Entry] = {}
    for entry in discovered:
        first = known.setdefault(entry.name.casefold(), entry)
        if first is not entry:
            log.warning(
                "two backends are named %r: %s is used, %s is not", entry.name, first.origin, entry.origin
            )
        if entry.cause is not None:
            log.info("backend %s is broken (%s): %r", entry.name, entry.origin, entry.cause)
    return known
