"""Where settings come from, read and checked as one value: the environment, files and the program.

Nothing here is in force by being read; `policy` keeps what is.
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

__all__ = [
    "Sources",
    "check_names",
    "checked",
    "disabled",
    "log_level",
    "policy",
    "read",
    "strict",
    "watching",
]

UNSET = Environment()
REFERENCE = "math"


@dataclass(frozen=True, slots=True)
class Sources:
    """Where settings come from; None where there is none.

    Attributes:
        environment: the variables.
        program, environment_file, file: the settings, the strongest first.
        tables: the measured tables that these name, the strongest first.
        lock: the lockfile of the environment.
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
    from attnreg.settings import config  # pydantic is a tenth of a second that most programs needn't pay

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
    """Check what only the registry and the disk know, and what sources say against each other.

    Returns:
        The same with the measured tables and the lockfile that they name.

    Raises:
        ConfigError: an unknown name, a backend that is asked for and disabled, a disabled reference, a
            file that is no table or no lockfile, one to record in that can't be written, or compiled
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
    """Check what settings say of backends; of the files that they name nothing.

    Raises:
        ConfigError: an unknown name, a backend that is asked for and disabled, or a disabled reference.
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
    """Return the names in lower case that are disabled, with the strongest source that does so."""
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
    """Return the strongest source that says something about strict, if it says yes."""
    if now.environment.strict is not None:
        return "ATTNREG_STRICT" if now.environment.strict else ""
    for loaded in now.loaded:
        if "strict" in loaded.settings.model_fields_set:
            return loaded.describe(("strict",)) if loaded.settings.strict else ""
    return ""


def policy(now: Sources) -> tuple[str, str]:
    """Return what decides where nothing is asked for, and the source that says so; empty by default."""
    if now.environment.policy:
        return now.environment.policy, "ATTNREG_POLICY"
    for loaded in now.loaded:
        if "policy" in loaded.settings.model_fields_set:
            return loaded.settings.policy, loaded.describe(("policy",))
    return "measured", ""


def watching(now: Sources) -> bool:
    """Whether settings ask for nothing, or only for calls to be recorded."""
    how = now.environment  # ATTNREG_ROUTERS and ATTNREG_BUILD say how calls are served, not by what
    return now == Sources(Environment(record=how.record, routers=how.routers, build=how.build))


def log_level(now: Sources) -> str:
    """Return the level that the strongest settings name, or an empty string if none does."""
    named = (s.settings for s in now.loaded if "log_level" in s.settings.model_fields_set)
    return next((settings.log_level.upper() for settings in named), "")
