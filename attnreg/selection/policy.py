"""What was asked for, from all sides, as one `Policy`: strongest first.

1. The environment: the operator's override.
2. `register_backend` and `configure(Settings(...))`: the program.
3. The settings files: ATTNREG_CONFIG's, then the one given to `configure`.
4. Where none of them says anything, a measured table for the device, if there is one.

(`use_backend` and `backend=` are stronger still; they hold for single calls and are added there.)
A lockfile (ATTNREG_LOCK) holds all of this to what was decided before: see `replay`.
The environment and the files are read once, when they are first needed, and again by `reload`.
"""

from __future__ import annotations

import logging
import os
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from attnreg import _registry
from attnreg.errors import AttnregError, BuildError
from attnreg.selection.decision import Policy, Preference
from attnreg.selection.lockfile import Lock
from attnreg.selection.sources import (
    Sources,
    check_names,
    checked,
    disabled,
    log_level,
    read,
    strict,
    watching,
)
from attnreg.selection.sources import policy as decides_by
from attnreg.torchlib import building, captured
from attnreg.tuning.tables import Tables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from attnreg.settings.config import Settings

__all__ = [
    "activate",
    "apply",
    "changed_by",
    "current",
    "disabled_backends",
    "is_active",
    "reread",
    "serves",
    "set_aside",
    "sources",
    "watch",
]

log = logging.getLogger("attnreg")

_sources: Sources | None = None
_unreadable: AttnregError | None = None
_active = False
_watchers = 0


def sources() -> Sources:
    """Return the settings in force; reads the environment and its file on the first call.

    Raises:
        ConfigError: they can't be read; the same error at every call until `reload` succeeds.
    """
    global _sources, _unreadable
    with _registry.lock:
        if _unreadable is not None:
            raise copy(_unreadable)  # what is raised holds the tensors of its frames
        if _sources is None:
            try:
                _sources = reread()
            except AttnregError as error:
                _unreadable = copy(error)
                raise
            _take_effect(Sources(), _sources)
        return _sources


def disabled_backends() -> dict[str, str]:
    """Return the names in lower case that settings disable, each with the source that does so.

    Reads none of the tables and lockfiles that settings may name: for a command that is to make them.

    Raises:
        ConfigError: the environment or a settings file can't be read, or names a backend that isn't there.
    """
    with _registry.lock:
        now = _sources
        if now is None:
            now = read(Sources())
            check_names(now)
        return disabled(now)


def current() -> Policy:
    """Return everything that was asked for.

    Raises:
        ConfigError: the environment or its file can't be read.
    """
    now = sources()
    tables = None
    if decides_by(now)[0] == "measured":
        tables = Tables(now.tables, _registry.entries, _compiled(now))
    only_watching = serves(now) and watching(now) and not _active and not _registry.registrations()
    # Asking for one backend doesn't change calls that torch has sent to another; asking for measurement does.
    by_measurement = bool(decides_by(now)[1] or now.tables)
    lock = Lock(now.lock, _registry.entries) if now.lock is not None else None
    return Policy(
        tuple(_preferences(now)), disabled(now), strict(now), tables, only_watching, lock, by_measurement
    )


def _compiled(now: Sources) -> bool:
    """Whether routers are compiled ones, or will be as soon as a call needs them."""
    if captured.compiled is not None:
        return captured.compiled
    if now.environment.routers == "python":
        return False
    try:
        building.loaded()
    except BuildError:
        return False
    return True


def is_active() -> bool:
    """Whether anything was asked for, so that torch's own entry points are to be served."""
    try:
        now = sources()
    except AttnregError:
        return True  # so that the calls that it would have governed say so
    return serves(now)


def serves(now: Sources) -> bool:
    """Whether torch's own entry points are to be served under these settings."""
    asked = replace(now, environment=now.environment._replace(routers="", build=""))  # how, not what
    return bool(_active or _watchers or _registry.registrations() or asked != Sources())


def activate(active: bool) -> bool:
    """Serve torch's entry points, or no longer, though nothing else was asked for; returns what held."""
    global _active
    with _registry.lock:
        before, _active = _active, active
        _registry.changed()
        return before


def watch(more: int) -> None:
    """Have torch's entry points served so that one more, or with -1 one less, can record what they get."""
    global _watchers
    with _registry.lock:
        _watchers += more
        _registry.changed()


def changed_by(path_or_settings: str | os.PathLike[str] | Settings | Mapping[str, Any]) -> Sources:
    """Return the settings in force, but for a new file or new settings made in the program.

    Raises:
        ConfigError: the file can't be read, or something in it is wrong.
    """
    from attnreg.settings import config  # pydantic is a tenth of a second that most programs needn't pay

    if isinstance(path_or_settings, str | os.PathLike):
        return checked(replace(sources(), file=config.load(path_or_settings)))
    program = config.LoadedSettings(config.settings_from(path_or_settings))
    return checked(replace(sources(), program=program))


def reread() -> Sources:
    """Return the settings after reading the environment and the settings files again.

    Raises:
        ConfigError: something in them is wrong.
    """
    return checked(read(_sources or Sources()))


def apply(fresh: Sources) -> None:
    """Put settings in force that were checked."""
    global _sources, _unreadable
    with _registry.lock:
        before, _sources, _unreadable = _sources or Sources(), fresh, None
        _registry.changed()
    _take_effect(before, fresh)


def set_aside() -> Callable[[], None]:
    """Have no settings in force; returns what puts back those that were, or why they can't be read."""
    with _registry.lock:
        was, trouble = _sources, _unreadable
        apply(Sources())

    def back() -> None:
        global _sources, _unreadable
        with _registry.lock:
            apply(was or Sources())
            _sources, _unreadable = was, trouble

    return back


def _take_effect(before: Sources, now: Sources) -> None:
    level = log_level(now)
    if level or log_level(before):
        log.setLevel(level or logging.NOTSET)


def _preferences(now: Sources) -> Iterator[Preference]:
    if now.environment.backend:
        yield Preference("ATTNREG_BACKEND", now.environment.backend)
    for registration in _registry.registrations():
        source = f"register_backend({registration.name!r})"
        yield Preference(source, (registration.name,), registration.devices, required=False)
    for loaded in now.loaded:
        # "sm_90" before "cuda": what is said of one architecture is stronger than of them all.
        for device in sorted(loaded.settings.devices, key=lambda key: not key.startswith("sm_")):
            order = loaded.settings.devices[device].order
            yield Preference(loaded.describe(("devices", device, "order")), order, (device,))
