"""The requests of all sources, as one `Policy`, the strongest first:

1. The environment: the operator's override.
2. `register_backend` and `configure(Settings(...))`: the program.
3. The settings files: first ATTNREG_CONFIG's, then `configure`'s.
4. If none of these names a backend: a measured table for the device, if there is one.

(`use_backend` and `backend=` are even stronger. They apply to single calls, which add them.)
With a lockfile (ATTNREG_LOCK, or the key `lock`) the result has to be the locked decision: see `decision`.
The environment and the files are read once, on first use, and again by `reload`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from attnreg.core import registry
from attnreg.core.policy.lockfile import LockInForce
from attnreg.core.policy.sources import (
    Sources,
    build,
    check_names,
    checked,
    disabled,
    keeps_native,
    load_settings,
    locked_by,
    log_level,
    only_records,
    read,
    strict,
    under_a_lock,
    without_implementation,
)
from attnreg.core.policy.sources import policy as decides_by
from attnreg.core.selection.decision import Policy, Preference
from attnreg.core.times.adaptive import AdaptiveTimes
from attnreg.core.times.tables import NamedTables
from attnreg.core.torchlib import building, captured
from attnreg.errors import AttnregError, BuildError, ConfigError

if TYPE_CHECKING:
    from attnreg.core.settings.config import Settings

log = logging.getLogger("attnreg")

_sources: Sources | None = None
_unreadable: AttnregError | None = None
_left_out = ""  # the fault of settings that `on_error = "native"` has left out
_active = False
_watchers = 0


NATIVE_KERNELS = "torch's own kernels run unless the program itself registers a backend"
EARLIER_SETTINGS = "the settings that were in force before stay"


def sources() -> Sources:
    """Return the settings in force; the first call reads the environment and its file.

    If they can't be read, every call raises the same `ConfigError` until `reload` succeeds; with
    `on_error = "native"` no settings are in force instead.
    """
    global _sources, _unreadable
    if _sources is None and _unreadable is None:
        registry.entries()  # discovers, which it mustn't do behind the lock
    with registry.lock:
        if _unreadable is not None:
            raise copy(_unreadable)  # a raised exception keeps the tensors of its frames alive
        if _sources is None:
            try:
                # A call needn't fail because it can't be recorded; `reload` and `attnreg run` raise the
                # error.
                _sources = reread(needs_record=False)
            except AttnregError as error:
                if not keeps_native():
                    _unreadable = under_a_lock(error)
                    raise copy(_unreadable) from error
                leave_out(error)
                _sources = Sources()
            _take_effect(Sources(), _sources)
        return _sources


def leave_out(error: AttnregError, instead: str = NATIVE_KERNELS) -> None:
    """Log an error of settings that `on_error = "native"` leaves out, and keep it for `left_out`.

    `instead` says what is in force.
    """
    global _left_out
    _left_out = str(error)
    log.error('attnreg\'s settings are left out, as on_error = "native" asks: %s. %s', instead, error)


def left_out() -> str:
    """Return the fault of the settings that `on_error = "native"` has left out; empty if there is none."""
    return _left_out


def disabled_backends() -> dict[str, str]:
    """Return the disabled names in lower case, each with the source that disables it; raises `ConfigError`.

    Doesn't read the tables and lockfiles that settings may name, because commands that write these call it.
    """
    with registry.lock:
        now = _sources
        if now is None:
            now = read(Sources())
            check_names(now)
        return disabled(now)


def current() -> Policy:
    """Return the requests in force; raises `ConfigError` if the environment or a file is wrong."""
    now = sources()
    tables = None
    adaptive = None
    batch_invariant = decides_by(now)[0] == "batch_invariant"
    if decides_by(now)[0] != "order" and not batch_invariant:
        tables = NamedTables(now.tables, registry.entries, _compiled(now))
        if decides_by(now)[0] == "adaptive" and now.lock is None:
            adaptive = AdaptiveTimes(tables, registry.entries, disabled(now))
    only_recording = serves(now) and only_records(now) and not _active and not registry.registrations()
    # A preferred backend doesn't change calls that torch sends to another op. Tables, if requested, do.
    by_measurement = bool(decides_by(now)[1] or now.tables)
    lock = None if now.lock is None else LockInForce(now.lock, registry.entries, locked_by(now)[1])
    return Policy(
        tuple(_preferences(now)), disabled(now), strict(now), tables, only_recording, lock, by_measurement,
        adaptive, batch_invariant,
    )  # fmt: skip


def _compiled(now: Sources) -> bool:
    """Whether routers are compiled, or will be when a call installs them."""
    if captured.call_cache_in_use is not None:
        return captured.call_cache_in_use
    if now.environment.routers == "python":
        return False
    try:
        building.loaded()
    except BuildError:
        return False
    return True


def are_read() -> bool:
    """Whether the environment and the settings files have been read; `sources` reads them on first use."""
    return _sources is not None


def is_active() -> bool:
    """Whether anything is requested, so that attnreg serves torch's own attention ops."""
    try:
        now = sources()
    except AttnregError:
        return True  # so that calls raise the error
    return serves(now)


def serves(now: Sources) -> bool:
    """Whether attnreg serves torch's own attention ops under these settings."""
    return bool(_active or _watchers or registry.registrations() or without_implementation(now) != Sources())


def activate(active: bool) -> bool:
    """Set whether to serve torch's attention ops without any other request; return the previous setting."""
    global _active
    with registry.lock:
        before, _active = _active, active
        registry.changed()
        return before


def watch(more: int) -> None:
    """Add to the number of recordings (1 or -1); while it is above 0, torch's attention ops are served."""
    global _watchers
    with registry.lock:
        _watchers += more
        registry.changed()


def changed_by(path_or_settings: str | os.PathLike[str] | Settings | Mapping[str, Any]) -> Sources:
    """Return the settings in force with a new file, or new settings of the program; raises `ConfigError`."""
    if isinstance(path_or_settings, str | os.PathLike):
        try:
            file = load_settings(path_or_settings)
        except ConfigError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            raise ConfigError(f"{error}{_meant_by(os.fspath(path_or_settings))}") from error.__cause__
        return checked(replace(sources(), file=file))
    # Importing pydantic takes 0.1 s, and most programs need no settings file.
    from attnreg.core.settings import config

    program = config.LoadedSettings(config.settings_from(path_or_settings))
    return checked(replace(sources(), program=program))


def _meant_by(path: str) -> str:
    """Return what to write in place of a path of no file, if that is a setting or a backend."""
    from attnreg.core.settings import config

    names = {name.casefold(): entry.name for name, entry in registry.entries().items()}
    if backend := names.get(path.strip().casefold()):
        return f"; for this backend write attnreg.register_backend({backend!r})"
    return config.written_as_settings(path)


def reread(needs_record: bool = True) -> Sources:
    """Read the environment and the files again; return the checked settings."""
    return checked(read(_sources or Sources()), needs_record)


def apply(fresh: Sources) -> None:
    """Put checked settings in force."""
    global _sources, _unreadable, _left_out
    with registry.lock:
        before, _sources, _unreadable, _left_out = _sources or Sources(), fresh, None, ""
        registry.changed()
    _take_effect(before, fresh)


def set_aside() -> Callable[[], None]:
    """Put no settings in force; return a function that restores the earlier settings, or their error."""
    with registry.lock:
        was, trouble, fault = _sources, _unreadable, _left_out
        apply(Sources())

    def back() -> None:
        global _sources, _unreadable, _left_out
        with registry.lock:
            apply(was or Sources())
            _sources, _unreadable, _left_out = was, trouble, fault

    return back


def _take_effect(before: Sources, now: Sources) -> None:
    building.follow_setting(*build(now))
    building.require_kernel(now.lock is not None and now.lock.has_compiled_kernel)
    level = log_level(now)
    if level or log_level(before):
        log.setLevel(level or logging.NOTSET)


def _preferences(now: Sources) -> Iterator[Preference]:
    if now.environment.backend:
        yield Preference("ATTNREG_BACKEND", now.environment.backend)
    for registration in registry.registrations():
        name = registration.entry.name
        yield Preference(f"register_backend({name!r})", (name,), registration.devices, required=False)
    for loaded in now.loaded:
        # "sm_90" before "cuda": an architecture's own order is stronger than the order for all GPUs.
        for device in sorted(loaded.settings.devices, key=lambda key: not key.startswith("sm_")):
            order = loaded.settings.devices[device].order
            yield Preference(loaded.origin.describe(("devices", device, "order")), order, (device,))
