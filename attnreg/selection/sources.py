"""The sources of settings, read and checked as one value: the environment, files and the program.

Reading puts nothing in force; `policy` keeps what is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from attnreg import _registry
from attnreg.errors import BuildError, ConfigError, UnknownBackendError
from attnreg.selection.lockfile import VARIABLE as LOCK
from attnreg.selection.lockfile import Lockfile
from attnreg.selection.lockfile import load as load_lock
from attnreg.settings import environment
from attnreg.settings.environment import Environment
from attnreg.torchlib import building
from attnreg.tuning.table import load as load_table
from attnreg.tuning.tables import Named
from attnreg.tuning.traces import check_writable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attnreg.settings.config import LoadedSettings

UNSET = Environment()
REFERENCE = "math"


@dataclass(frozen=True, slots=True)
class Sources:
    """All sources of settings; None for one that isn't used.

    Attributes:
        environment: the variables.
        program: settings passed to `configure`.
        environment_file: the file of ATTNREG_CONFIG; weaker than `program`.
        file: the file passed to `configure`; weaker than both.
        tables: the measured tables that these name, the strongest first.
        lock: the lockfile of ATTNREG_LOCK.
    """

    environment: Environment = UNSET
    program: LoadedSettings | None = None
    environment_file: LoadedSettings | None = None
    file: LoadedSettings | None = None
    tables: tuple[Named, ...] = ()
    lock: Lockfile | None = None

    @property
    def loaded(self) -> tuple[LoadedSettings, ...]:
        """The settings of the program and of the files, the strongest first."""
        return tuple(s for s in (self.program, self.environment_file, self.file) if s is not None)


def read(before: Sources) -> Sources:
    """Read the environment and all files anew.

    Raises:
        ConfigError: one of them can't be read, or something in it is wrong.
    """
    now = environment.read()
    if now.config is None and before.file is None:
        return replace(before, environment=now, environment_file=None)
    from attnreg.settings import (
        config,
    )  # importing pydantic takes 0.1 s, and most programs need no settings file

    return Sources(
        now,
        before.program,
        config.load(now.config) if now.config is not None else None,
        config.load(before.file.source) if before.file is not None and before.file.source else before.file,
    )


def _check_routers(fresh: Sources) -> None:
    if fresh.environment.routers == "compiled":
        try:
            building.loaded()
        except BuildError as error:
            raise ConfigError(f"ATTNREG_ROUTERS=compiled: {error}") from error


def checked(fresh: Sources) -> Sources:
    """Check sources against the registry, the files that they name, and each other.

    Returns:
        The same with the measured tables and the lockfile that they name.

    Raises:
        ConfigError: an unknown name, a backend that is preferred and disabled, a disabled reference, a
            file that is no table or no lockfile, a recording that can't be written, or compiled
            routers that aren't there.
    """
    check_names(fresh)
    _check_routers(fresh)
    variables = fresh.environment
    if variables.record is not None:
        try:
            check_writable(variables.record)
        except ConfigError as error:
            raise ConfigError(f"ATTNREG_RECORD: {error}") from error
    return replace(fresh, tables=tuple(_tables(fresh)), lock=_lock(fresh))


def check_names(fresh: Sources) -> None:
    """Check the names of backends only, not the files that settings name.

    Raises:
        ConfigError: an unknown name, a backend that is preferred and disabled, or a disabled reference.
    """
    variables = fresh.environment
    for variable, names in (("ATTNREG_BACKEND", variables.backend), ("ATTNREG_DISABLE", variables.disable)):
        for name in names:
            try:
                _registry.find(name)
            except UnknownBackendError as error:
                raise ConfigError(f"{variable}: {error}") from None
    if fresh.loaded:
        from attnreg.settings import config

        for loaded in fresh.loaded:
            config.check_backends(loaded, [entry.name for entry in _registry.entries().values()])
    off = disabled(fresh)
    for name in variables.backend:
        if source := off.get(name.casefold()):
            raise ConfigError(f"ATTNREG_BACKEND asks for {name!r}, but it is disabled by {source}")
    if (source := off.get(REFERENCE)) and not strict(fresh):
        raise ConfigError(
            f"{source}: got {REFERENCE!r}, expected another backend, or strict as well "
            "(ATTNREG_STRICT=1, or strict = true in the settings): the reference runs what no other can"
        )


def _lock(now: Sources) -> Lockfile | None:
    if now.environment.lock is None:
        return None
    try:
        return load_lock(now.environment.lock)
    except ConfigError as error:
        raise ConfigError(f"{LOCK}: {error}") from error


def _tables(now: Sources) -> Iterator[Named]:
    for loaded in now.loaded:
        if loaded.settings.tuned is not None:
            source = loaded.describe(("tuned",))
            try:
                yield Named(load_table(loaded.settings.tuned), source)
            except ConfigError as error:
                raise ConfigError(f"{source}: tuned: {error}") from error


def disabled(now: Sources) -> dict[str, str]:
    """Return the disabled names in lower case, each with the strongest source that disables it."""
    found: dict[str, str] = {}
    for name, source in _disabled(now):
        found.setdefault(name.casefold(), source)
    return found


def _disabled(now: Sources) -> Iterator[tuple[str, str]]:
    for name in now.environment.disable:
        yield name, "ATTNREG_DISABLE"
    for loaded in now.loaded:
        for index, name in enumerate(loaded.settings.disabled):
            yield name, loaded.describe(("disabled", index))


def strict(now: Sources) -> str:
    """Return the strongest source that sets strict, if it sets it to true; else an empty string."""
    if now.environment.strict is not None:
        return "ATTNREG_STRICT" if now.environment.strict else ""
    for loaded in now.loaded:
        if "strict" in loaded.settings.model_fields_set:
            return loaded.describe(("strict",)) if loaded.settings.strict else ""
    return ""


def policy(now: Sources) -> tuple[str, str]:
    """Return what decides where no backend is preferred, and the source that sets it; empty by default."""
    if now.environment.policy:
        return now.environment.policy, "ATTNREG_POLICY"
    for loaded in now.loaded:
        if "policy" in loaded.settings.model_fields_set:
            return loaded.settings.policy, loaded.describe(("policy",))
    return "measured", ""


def without_implementation(now: Sources) -> Sources:
    """Return the sources without variables that change how calls are served, and not which backend runs."""
    return replace(now, environment=now.environment._replace(routers="", build=""))


def only_records(now: Sources) -> bool:
    """Whether settings ask for nothing, or only for calls to be recorded."""
    return without_implementation(now) == Sources(Environment(record=now.environment.record))


def log_level(now: Sources) -> str:
    """Return the log level of the strongest settings that have one, or an empty string."""
    named = (s.settings for s in now.loaded if "log_level" in s.settings.model_fields_set)
    return next((settings.log_level.upper() for settings in named), "")
