"""Where settings come from, read and checked as one value: the environment, files and the program.

Nothing here is in force by being read; `policy` keeps what is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from attnreg import _registry, environment
from attnreg.environment import Environment
from attnreg.errors import ConfigError, UnknownBackendError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attnreg.config import LoadedSettings

__all__ = ["Sources", "checked", "disabled", "log_level", "read", "strict"]

UNSET = Environment()
REFERENCE = "math"


@dataclass(frozen=True, slots=True)
class Sources:
    """Where settings come from; None where there is none."""

    environment: Environment = UNSET
    program: LoadedSettings | None = None
    environment_file: LoadedSettings | None = None
    file: LoadedSettings | None = None

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
    from attnreg import config  # pydantic is a tenth of a second that most programs needn't pay

    return Sources(
        now,
        before.program,
        config.load(now.config) if now.config is not None else None,
        config.load(before.file.source) if before.file is not None and before.file.source else before.file,
    )


def checked(fresh: Sources) -> Sources:
    """Check the names of backends, which only the registry knows, and what sources say against each other.

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
        from attnreg import config

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
    return fresh


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


def log_level(now: Sources) -> str:
    """Return the level that the strongest settings name, or an empty string if none does."""
    named = (s.settings for s in now.loaded if "log_level" in s.settings.model_fields_set)
    return next((settings.log_level.upper() for settings in named), "")
