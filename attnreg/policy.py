"""What was asked for, from all sides, as one `Policy`: strongest first.

1. The environment: the operator's override.
2. `register_backend` and `configure(Settings(...))`: the program.
3. The settings files: ATTNREG_CONFIG's, then the one given to `configure`.

(`use_backend` and `backend=` are stronger still; they hold for single calls and are added there.)
The environment and the files are read once, when they are first needed, and again by `reload`.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from attnreg import _registry, environment
from attnreg.environment import Environment
from attnreg.errors import AttnregError, ConfigError, UnknownBackendError
from attnreg.selection import Policy, Preference

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from attnreg.config import LoadedSettings, Settings

__all__ = ["activate", "configure", "current", "is_active", "reload", "sources"]

log = logging.getLogger("attnreg")


UNSET = Environment()


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


_sources: Sources | None = None
_unreadable: AttnregError | None = None
_active = False


def sources() -> Sources:
    """Return the settings in force; reads the environment and its file on the first call.

    Raises:
        ConfigError: they can't be read; the same error at every call until `reload` succeeds.
    """
    global _sources, _unreadable
    with _registry.lock:
        if _unreadable is not None:
            raise _unreadable
        if _sources is None:
            try:
                _sources = _checked(_read(Sources()))
                _take_effect(_sources)
            except AttnregError as error:
                _unreadable = error
                raise
        return _sources


def current() -> Policy:
    """Return everything that was asked for.

    Raises:
        ConfigError: the environment or its file can't be read.
    """
    now = sources()
    disabled: dict[str, str] = {}
    for name, source in _disabled(now):
        disabled.setdefault(name.casefold(), source)
    return Policy(tuple(_preferences(now)), disabled, _strict(now))


def is_active() -> bool:
    """Whether anything was asked for, so that torch's own entry points are to be served."""
    try:
        now = sources()
    except AttnregError:
        return True  # so that the calls that it would have governed say so
    return bool(_active or _registry.registrations() or now != Sources())


def activate(active: bool) -> None:
    """Serve torch's entry points (or no longer) though nothing else was asked for."""
    global _active
    with _registry.lock:
        _active = active
        _registry.changed()


def configure(path_or_settings: str | os.PathLike[str] | Settings | Mapping[str, Any]) -> None:
    """Apply a settings file, or settings made in the program, in place of the last ones of that kind.

    Everything is checked first; what is wrong changes nothing.

    Raises:
        ConfigError: the file can't be read, or something in it is wrong.
    """
    from attnreg import config  # pydantic is a tenth of a second that most programs needn't pay

    if isinstance(path_or_settings, str | os.PathLike):
        _apply(replace(sources(), file=config.load(path_or_settings)))
    else:
        _apply(replace(sources(), program=config.LoadedSettings(config.settings_from(path_or_settings))))


def reload() -> None:
    """Read the environment and the settings files again.

    Raises:
        ConfigError: something in them is wrong; what was in force stays so.
    """
    _apply(_read(_sources or Sources()))


def _apply(fresh: Sources) -> None:
    global _sources, _unreadable
    checked = _checked(fresh)
    with _registry.lock:
        _sources, _unreadable = checked, None
        _registry.changed()
    _take_effect(checked)


def _take_effect(now: Sources) -> None:
    for loaded in reversed(now.loaded):
        if "log_level" in loaded.settings.model_fields_set:
            log.setLevel(loaded.settings.log_level.upper())
        if loaded.settings.tuned is not None:
            log.warning(
                "%s: measured tables are not read by this version of attnreg; the default order decides",
                loaded.describe(("tuned",)),
            )


def _read(before: Sources) -> Sources:
    """Read the environment and all files anew."""
    now = environment.read()
    if now.config is None and before.file is None:
        return replace(before, environment=now, environment_file=None)
    from attnreg import config

    return Sources(
        now,
        before.program,
        config.load(now.config) if now.config is not None else None,
        config.load(before.file.source) if before.file is not None and before.file.source else before.file,
    )


def _checked(fresh: Sources) -> Sources:
    """Check the names of backends, which only the registry knows."""
    for variable, names in _named(fresh.environment):
        for name in names:
            try:
                _registry.find(name)
            except UnknownBackendError as error:
                raise ConfigError(f"{variable}: {error}") from None
    if fresh.loaded:
        from attnreg import config

        for loaded in fresh.loaded:
            config.check_backends(loaded, [entry.name for entry in _registry.entries().values()])
    disabled = {name.casefold(): source for name, source in _disabled(fresh)}
    for name in fresh.environment.backend:
        if source := disabled.get(name.casefold()):
            raise ConfigError(f"ATTNREG_BACKEND asks for {name!r}, but it is disabled by {source}")
    return fresh


def _named(variables: Environment) -> Iterator[tuple[str, Iterable[str]]]:
    yield "ATTNREG_BACKEND", variables.backend
    yield "ATTNREG_DISABLE", variables.disable


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


def _disabled(now: Sources) -> Iterator[tuple[str, str]]:
    for name in now.environment.disable:
        yield name, "ATTNREG_DISABLE"
    for loaded in now.loaded:
        for index, name in enumerate(loaded.settings.disabled):
            yield name, loaded.describe(("disabled", index))


def _strict(now: Sources) -> str:
    """Return the strongest source that says something about strict, if it says yes."""
    if now.environment.strict is not None:
        return "ATTNREG_STRICT" if now.environment.strict else ""
    for loaded in now.loaded:
        if "strict" in loaded.settings.model_fields_set:
            return loaded.describe(("strict",)) if loaded.settings.strict else ""
    return ""
