"""The sources of settings, read and checked as one value: the environment, files and the program.

Reading puts nothing in force; `current` keeps the settings in force.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnreg.core import registry
from attnreg.core.policy.lockfile import VARIABLE as LOCK
from attnreg.core.policy.lockfile import Lockfile
from attnreg.core.policy.lockfile import load as load_lock
from attnreg.core.settings import environment
from attnreg.core.settings.environment import (
    AS_GIVEN,
    LARGE,
    NATIVE,
    ON_ERROR,
    REFERENCE,
    EnvironmentSettings,
)
from attnreg.core.settings.hub_names import canonical, is_hub_name, is_well_formed
from attnreg.core.times.table import check_writable as check_file
from attnreg.core.times.table import load as load_table
from attnreg.core.times.tables import Named
from attnreg.core.times.traces import check_writable
from attnreg.core.torchlib import building
from attnreg.errors import AttnregError, BuildError, ConfigError, UnknownBackendError

if TYPE_CHECKING:
    from attnreg.core.settings.config import LoadedSettings, Settings

log = logging.getLogger("attnreg")

UNSET = EnvironmentSettings()
# The source of a setting that follows from the policy.
BY_POLICY = "the policy"


@dataclass(frozen=True, slots=True)
class Sources:
    """All sources of settings, the strongest first, and the files that they name; None for an unused source.

    `program` and `file` were passed to `configure`, `environment_file` is ATTNREG_CONFIG's.
    """

    environment: EnvironmentSettings = UNSET
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
    """Read the environment and all files anew; raises `ConfigError`."""
    variables = environment.read()
    backend, disable = (tuple(map(canonical, names)) for names in (variables.backend, variables.disable))
    now = replace(
        before, environment=variables._replace(backend=backend, disable=disable), environment_file=None
    )
    if now.environment.config is not None:
        now = replace(now, environment_file=load_settings(now.environment.config))
    if before.file is not None and before.file.origin.path:
        now = replace(now, file=load_settings(before.file.origin.path))
    return now


def load_settings(path: str | os.PathLike[str]) -> LoadedSettings:
    """Read a settings file; a `ConfigError` counts all faults, unknown names of backends among them."""
    # Importing pydantic takes 0.1 s, and most programs need no settings file.
    from attnreg.core.settings import config

    config.check_file(path, [entry.name for entry in registry.entries().values()])
    return config.load(path)


def checked(fresh: Sources, needs_record: bool = True) -> Sources:
    """Check sources against the registry, the files that they name, and each other.

    Returns the sources with the measured tables and the lockfile that they name. A recording or a
    file for stats that can't be written is an error only with `needs_record`; else it is logged and left out.

    Raises:
        ConfigError: a name is wrong, a file is no table or no lockfile, a recording can't be written, or
            compiled routers are requested but missing.
    """
    check_names(fresh)
    variables = fresh.environment
    if variables.routers == "compiled":
        before = building.follow_setting(*build(fresh))  # by which it may be compiled now
        try:
            building.loaded()
        except BuildError as error:
            building.follow_setting(*before)
            raise ConfigError(f"ATTNREG_ROUTERS=compiled: {error}") from error
    files = (
        ("record", check_writable, "calls are not recorded"), ("stats", check_file, "no stats"),
        ("report", check_file, "no report"),
    )  # fmt: skip
    for field, check, without in files:
        file = getattr(variables, field)
        try:
            if file is not None:
                with _named(f"ATTNREG_{field.upper()}"):
                    check(file)
        except ConfigError as error:
            if needs_record:
                raise
            log.warning("%s: %s", without, error)
            left_out: dict[str, Any] = {field: None}
            fresh = replace(fresh, environment=fresh.environment._replace(**left_out))
    tables = []
    for loaded in fresh.loaded:
        if loaded.settings.tuned is not None:
            source = loaded.origin.describe(("tuned",))
            with _named(f"{source}: tuned"):
                tables.append(Named(load_table(loaded.settings.tuned), source))
    lock = None
    file, source = locked_by(fresh)
    if file is not None:
        with _named(source):
            lock = load_lock(file)
            _know_hub_names({row.backend for row in lock.rows})
    return replace(fresh, tables=tuple(tables), lock=lock)


# The line of a settings file, at the top level or not: the file may be no TOML.
_NATIVE_LINE = re.compile(r"""^\s*on_error\s*=\s*(["'])native\1\s*(#.*)?$""", re.MULTILINE)
_LOCK_LINE = re.compile(r"""^\s*lock\s*=""", re.MULTILINE)


def keeps_native(file: str | os.PathLike[str] | None = None) -> bool:
    """Whether faulty settings are to be left out, so that torch's own kernels run.

    ATTNREG_ON_ERROR decides. Without it the line `on_error = "native"` decides, of the settings file `file`
    or else of ATTNREG_CONFIG's. Neither is read as settings are, because the fault may be anywhere.
    With a lockfile they aren't left out: see `under_a_lock`.
    """
    return _asks_for_native(file) and not _asks_for_lock(file)


def under_a_lock(error: AttnregError, file: str | os.PathLike[str] | None = None) -> AttnregError:
    """Return an error of settings; it says so where `on_error = "native"` doesn't apply to it.

    Calls that were left to torch's own kernels would run unlocked, which a lockfile forbids.
    """
    told = copy(error)
    if (asks := _asks_for_lock(file)) and _asks_for_native(file):
        told.args = (
            f'{error}\non_error = "native" doesn\'t apply: {asks} is set, so no call may run unlocked',
        )
    return told


def _asks_for_lock(file: str | os.PathLike[str] | None) -> str:
    """Return what asks for a lockfile, the variable or the key of a settings file; empty if neither does."""
    if environment.ignores_lock:
        return ""
    return LOCK if os.environ.get(LOCK, "").strip() else "lock" if _LOCK_LINE.search(_text_of(file)) else ""


def _asks_for_native(file: str | os.PathLike[str] | None) -> bool:
    if wanted := os.environ.get(ON_ERROR, "").strip():
        return wanted.casefold() == NATIVE
    return _NATIVE_LINE.search(_text_of(file)) is not None


def _text_of(file: str | os.PathLike[str] | None) -> str:
    """Return the text of a settings file, or else of ATTNREG_CONFIG's; empty if it can't be read."""
    try:
        return Path(file or os.environ.get("ATTNREG_CONFIG", "").strip()).expanduser().read_text("utf-8-sig")
    except (OSError, ValueError, RuntimeError):  # no such file, or not UTF-8
        return ""


@contextmanager
def _named(setting: str) -> Iterator[None]:
    """Prefix an error about a file with the setting that names the file."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{setting}: {error}") from error


def _know_hub_names(names: Iterable[str]) -> None:
    """Have the registry know the kernels from the hub among some names; loads none."""
    for name in names:
        if is_hub_name(name):
            try:
                registry.find(name)
            except UnknownBackendError as error:
                raise ConfigError(str(error)) from None


def check_names(fresh: Sources) -> None:
    """Check the names of backends only, not the files that settings name.

    Raises:
        ConfigError: a name is unknown, a backend is preferred and disabled, or the reference is disabled.
    """
    variables = fresh.environment
    for variable, names in (("ATTNREG_BACKEND", variables.backend), ("ATTNREG_DISABLE", variables.disable)):
        for name in names:
            if variable == "ATTNREG_DISABLE" and is_well_formed(name):
                continue  # nothing asks for it
            try:
                registry.find(name)
            except UnknownBackendError as error:
                raise ConfigError(f"{variable}: {error}") from None
    if fresh.loaded:
        from attnreg.core.settings import config

        for loaded in fresh.loaded:
            config.check_backends(loaded, [entry.name for entry in registry.entries().values()])
            _know_hub_names(config.ordered_names(loaded.settings))
    for line in contradictions(fresh):
        raise ConfigError(line)


def contradictions(fresh: Sources) -> Iterator[str]:
    """Yield a line for each name that is asked for and disabled, and one for a disabled reference."""
    off = disabled(fresh)
    for name in fresh.environment.backend:
        if source := off.get(name.casefold()):
            yield f"ATTNREG_BACKEND asks for {name!r}, but it is disabled by {source}"
    if (source := off.get(REFERENCE)) and not strict(fresh):
        yield (
            f"{source}: got {REFERENCE!r}, expected another backend, or strict as well "
            "(ATTNREG_STRICT=1, or strict = true in the settings): the reference runs what no other can"
        )


def disabled(now: Sources) -> dict[str, str]:
    """Return the disabled names in lower case, each with the strongest source that disables it."""
    sources_of = {name.casefold(): "ATTNREG_DISABLE" for name in now.environment.disable}
    for loaded in now.loaded:
        for index, name in enumerate(loaded.settings.disabled):
            sources_of.setdefault(name.casefold(), loaded.origin.describe(("disabled", index)))
    return sources_of


def strict(now: Sources) -> str:
    """Return the strongest source that sets strict, if it sets it to true; else an empty string."""
    if now.environment.strict is not None:
        return "ATTNREG_STRICT" if now.environment.strict else ""
    on, source = _strongest(now, "strict")
    return source if on else ""


def policy(now: Sources) -> tuple[str, str]:
    """Return the policy, which decides if no backend is preferred, and its source, empty by default."""
    if now.environment.policy:
        return now.environment.policy, "ATTNREG_POLICY"
    chosen, source = _strongest(now, "policy")
    return chosen or "measured", source


def masks(now: Sources) -> tuple[str, str]:
    """Return how boolean masks are handled, a value of the setting `masks`, and the source; empty by default.

    A program that asks for measured choices gets the masks recognised that are worth it. Calls of a lockfile
    keep their masks, because it knows them so.
    """
    if now.environment.masks:
        return now.environment.masks, "ATTNREG_MASKS"
    chosen, source = _strongest(now, "masks")
    if chosen:
        return chosen, source
    by, source = policy(now)
    is_measured = source and by in ("measured", "adaptive") and locked_by(now)[0] is None
    return (LARGE, BY_POLICY) if is_measured else (AS_GIVEN, "")


def modules(now: Sources) -> dict[str, tuple[tuple[str, ...], str]]:
    """Return the backends of each pattern for modules and their source; the strongest settings come last."""
    patterns: dict[str, tuple[tuple[str, ...], str]] = {}
    for loaded in reversed(now.loaded):
        for pattern, names in loaded.settings.modules.items():
            patterns.pop(pattern, None)
            patterns[pattern] = names, loaded.origin.describe(("modules", pattern))
    return patterns


def locked_by(now: Sources) -> tuple[Path | None, str]:
    """Return the lockfile that is asked for, if one is, and its source."""
    if environment.ignores_lock:
        return None, ""
    return (now.environment.lock, LOCK) if now.environment.lock is not None else _strongest(now, "lock")


def build(now: Sources) -> tuple[str, str]:
    """Return how settings other than ATTNREG_BUILD have missing libraries compiled, and their source."""
    mode, source = _strongest(now, "build")
    return mode or "", source


def transformers(now: Sources) -> str:
    """Return the setting `transformers`; "off" with ATTNREG_TRANSFORMERS, which `import torch` obeys."""
    return "off" if now.environment.transformers else _strongest(now, "transformers")[0] or "off"


def log_level(now: Sources) -> str:
    """Return the log level of the strongest settings with a log level, or an empty string."""
    return (_strongest(now, "log_level")[0] or "").upper()


def _strongest(now: Sources, field: str) -> tuple[Any, str]:
    """Return a field of the strongest settings that set it, of the program or a file, and their name."""
    for loaded in now.loaded:
        if field in loaded.settings.model_fields_set:
            return getattr(loaded.settings, field), loaded.origin.describe((field,))
    return None, ""


def without_implementation(now: Sources) -> Sources:
    """Return the sources without settings and variables that don't affect which backend runs.

    A variable that switches something off counts as unset here. (It still overrides a file.)
    """
    variables = now.environment
    off = {"strict": False, "masks": AS_GIVEN, "transformers": "0"}
    unset = {name: getattr(UNSET, name) for name, value in off.items() if getattr(variables, name) == value}
    loaded = (now.program, now.environment_file, now.file)
    program, environment_file, file = (s if s and _affects_choice(s.settings) else None for s in loaded)
    return replace(
        now,
        environment=variables._replace(
            config=None, routers="", build="", as_flash_attn=None, on_error="", stats=None, **unset
        ),
        program=program,
        environment_file=environment_file,
        file=file,
    )


def _affects_choice(settings: Settings) -> bool:
    """Whether settings affect which backend runs, beyond the modules that the program itself assigns."""
    off = {"strict": False, "masks": AS_GIVEN, "transformers": "off"}
    names = {name for name in settings.model_fields_set if off.get(name) != getattr(settings, name)}
    return bool(names - {"log_level", "on_error", "build", "modules"})


def only_records(now: Sources) -> bool:
    """Whether settings request nothing, or only recording and times."""
    variables = now.environment
    recording = EnvironmentSettings(record=variables.record, report=variables.report)
    return without_implementation(now) == Sources(recording)
