"""Settings: from a TOML file with `load`, or from Python with `settings_from`.

Both refuse what they don't know, list every problem on a line of its own and name its key. `load`
adds the file, line and column, and keeps them: a decision can name the line that is behind it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from attnreg.errors import ConfigError, did_you_mean
from attnreg.settings import toml_file
from attnreg.settings.config_types import DEVICE_KEY, DeviceKey, Names, Problem, TableFile, complaint, refusal
from attnreg.settings.toml_file import Origin

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator
    from pathlib import Path
    from typing import Self

    from pydantic_core import ErrorDetails

    from attnreg.settings.toml_positions import KeyPath

__all__ = [
    "DeviceSettings",
    "LoadedSettings",
    "Settings",
    "check_backends",
    "load",
    "schema",
    "settings_from",
]

REFERENCE = "math"


class _Table(BaseModel):
    # Instances are checked again wherever they are given: `model_copy` and `model_construct` don't.
    model_config = ConfigDict(extra="forbid", frozen=True, revalidate_instances="always")


class DeviceSettings(_Table):
    """The settings of one kind of device."""

    order: Names = Field(
        min_length=1,
        description="Backends to prefer, the first most; all others follow in their default order.",
    )


class Settings(_Table):
    """Everything that can be set. The environment and the program's own calls are stronger."""

    strict: bool = Field(
        default=False,
        strict=True,
        description="Whether it is an error when a preferred backend can't run a call.",
    )
    disabled: Names = Field(default=(), description="Backends that must not run.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="warning", description="The least severe messages that the 'attnreg' logger lets pass."
    )
    policy: Literal["measured", "order"] = Field(
        default="measured",
        description="What decides where nothing is asked for: a measured table, where one is for the "
        "device, or the default order alone.",
    )
    tuned: TableFile | None = Field(
        default=None,
        description="A table measured by `attnreg tune`; relative to the folder of the settings file.",
    )
    devices: dict[DeviceKey, DeviceSettings] = Field(
        default_factory=dict,
        description="Settings by device: a device type ('cpu', 'cuda') or the stronger 'sm_NN'.",
        json_schema_extra={"propertyNames": {"pattern": DEVICE_KEY}},
    )

    @model_validator(mode="after")
    def _free_of_contradictions(self) -> Self:
        if problems := list(_contradictions(self)):
            raise refusal(*problems)
        return self


def _ordered(settings: Settings) -> Iterator[tuple[KeyPath, str]]:
    for device, table in settings.devices.items():
        for index, name in enumerate(table.order):
            yield ("devices", device, "order", index), name


def _disabled(settings: Settings) -> Iterator[tuple[KeyPath, str]]:
    for index, name in enumerate(settings.disabled):
        yield ("disabled", index), name


def _contradictions(settings: Settings) -> Iterator[Problem]:
    disabled = {name.casefold(): toml_file.key_text(key) for key, name in _disabled(settings)}
    for key, name in _ordered(settings):
        if by := disabled.get(name.casefold()):
            yield Problem(key, name, f"a backend that isn't disabled: {by} names it too")
    for key, name in _disabled(settings):
        if name.casefold() == REFERENCE and not settings.strict:
            yield Problem(
                key, name, "another backend, or strict = true: the reference runs what no other can"
            )


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """Settings and where they come from; without an origin they were given to `configure`."""

    settings: Settings
    origin: Origin = field(default_factory=Origin)

    @property
    def source(self) -> Path | None:
        """The absolute path of the file; None for a value."""
        return self.origin.path

    def describe(self, key: KeyPath = ()) -> str:
        """Return where a key stands, for example `attnreg.toml:7` for `("devices", "cuda", "order")`."""
        return self.origin.describe(key)


def load(path: str | os.PathLike[str]) -> LoadedSettings:
    """Read a settings file; an empty one gives the defaults.

    Raises:
        ConfigError: it can't be read, or something in it is wrong; lists every problem.
    """
    data, origin = toml_file.read(path)
    settings = _validated(data, origin)
    if settings.tuned is not None and origin.path is not None:
        settings = settings.model_copy(update={"tuned": origin.path.parent / settings.tuned})
    return LoadedSettings(settings, origin)


def settings_from(value: Settings | Mapping[str, Any]) -> Settings:
    """Return the settings that a program gave, checked.

    Raises:
        ConfigError: something in them is wrong; lists every problem in the words of `load`.
    """
    if not isinstance(value, Settings | Mapping):
        raise ConfigError(f"configure(...): got {value!r}, expected Settings or a mapping of its fields")
    return _validated(value, Origin())


def check_backends(loaded: LoadedSettings, known: Iterable[str]) -> None:
    """Refuse settings that name a backend that isn't among the known ones, whatever the case.

    Raises:
        ConfigError: lists every such name with its place, the known names and the nearest.
    """
    names = sorted(known, key=str.casefold)
    keys = {name.casefold() for name in names}
    problems = [
        loaded.origin.problem(
            key, f"got {name!r}, expected one of {', '.join(names)}{did_you_mean(name, names)}"
        )
        for key, name in (*_disabled(loaded.settings), *_ordered(loaded.settings))
        if name.casefold() not in keys
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def schema() -> dict[str, Any]:
    """Return the JSON schema of a settings file, for editors that complete and check it."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Settings.model_json_schema()}


def _validated(value: Settings | Mapping[str, Any], origin: Origin) -> Settings:
    try:
        return Settings.model_validate(value)
    except ValidationError as error:
        details = sorted(error.errors(include_url=False), key=lambda detail: origin.position(_key(detail)))
        # pydantic's own report would say the same again, in other words and without the places.
        raise ConfigError("\n".join(_problem(detail, origin) for detail in details)) from None


def _key(detail: ErrorDetails) -> KeyPath:
    return tuple(part for part in detail["loc"] if part != "[key]")


def _problem(detail: ErrorDetails, origin: Origin) -> str:
    key = _key(detail)
    if detail["type"] != "extra_forbidden":
        return origin.problem(key, complaint(detail))
    name, known = str(key[-1]), (Settings if len(key) == 1 else DeviceSettings).model_fields
    # Whatever follows a [table] belongs to it, which is easily forgotten when a line is added.
    misplaced = f"; {name!r} belongs above the first [table]" if name in Settings.model_fields else ""
    near = misplaced or did_you_mean(name, known)
    return origin.problem(key, f"unknown key, expected {' or '.join(known)}{near}")
