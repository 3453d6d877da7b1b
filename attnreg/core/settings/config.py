"""Settings: from a TOML file with `load`, or from Python with `settings_from`.

Both refuse unknown keys, list the first ten problems on lines of their own, and name their keys. `load` adds
the file and the line, and keeps them: a decision can name the line that it comes from.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from attnreg.core.settings import hub_names, toml_file
from attnreg.core.settings.environment import REFERENCE
from attnreg.core.settings.other_names import backend_meant, device_meant
from attnreg.core.settings.toml_file import KeyPath, Origin
from attnreg.errors import MOST_KNOWN, MOST_LISTED, ConfigError, did_you_mean, first_ten, nearest, short_repr

__all__ = [
    "DeviceSettings", "LoadedSettings", "Settings", "check_backends", "load", "settings_from",
]  # fmt: skip


# What `torch.device` accepts; written out, so that reading settings needn't import torch.
DEVICE_TYPES = (
    "cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla", "maia", "ipu", "hip", "ve", "fpga", "lazy", "meta",
    "mkldnn", "opengl", "opencl", "ideep", "vulkan", "privateuseone",
)  # fmt: skip
DEVICE_KEY = rf"^({'|'.join(DEVICE_TYPES)}|sm_[1-9][0-9]{{1,2}})$"


def expected(text: str) -> PydanticCustomError:
    """Return the error of a validator, in whose words `complaint` puts all others."""
    return PydanticCustomError("attnreg", "Expected {expected}", {"expected": text})


def refusal(*problems: tuple[KeyPath, object, str]) -> ValidationError:
    """Return an error that pydantic merges into its own, with the complete key of each problem.

    A problem is a key relative to the value that the validator was given, what was got, what was expected.
    """
    details = [InitErrorDetails(type=expected(text), loc=key, input=got) for key, got, text in problems]
    return ValidationError.from_exception_data("Settings", details)


# What pydantic expected, by the type of its error, in the wording of all other messages.
_EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "a table",
    "invalid_key": "the name of a setting",
    "missing": "a list of at least one name",
    "model_type": "a table",
    "path_type": "the path of a file",
    "string_too_short": "a name",
    "string_type": "a string",
    "too_short": "at least one name",
}


def complaint(detail: ErrorDetails) -> str:
    """Return what was got and what was expected, for one error of pydantic's or of a validator."""
    kind, got = detail["type"], detail["input"]
    expected = detail.get("ctx", {}).get("expected") or _EXPECTED.get(kind, detail["msg"])
    if kind == "literal_error":
        expected += did_you_mean(got if isinstance(got, str) else "", expected.split("'")[1::2])
    return (
        f"missing, expected {expected}"
        if kind == "missing"
        else f"got {short_repr(got)}, expected {expected}"
    )


def _in_order(names: object) -> object:
    # pydantic would accept a set too, whose order changes from run to run.
    if not isinstance(names, list | tuple):
        raise expected("a list of names")
    return names


def _as_list(names: object) -> object:
    if isinstance(names, str):
        return (names,)
    if not isinstance(names, list | tuple):
        # In TOML a dot in a key without quotes begins a table.
        unquoted = "; a pattern with dots needs quotes" if isinstance(names, dict) else ""
        raise expected(f"a name or a list of names{unquoted}")
    return names


def _each_once(names: tuple[str, ...]) -> tuple[str, ...]:
    first: dict[str, int] = {}
    places = [first.setdefault(name.casefold(), index) for index, name in enumerate(names)]
    repeats = [
        ((index,), names[index], f"each name once: [{place}] is the same name, as case doesn't matter")
        for index, place in enumerate(places)
        if place < index
    ]
    if repeats:
        raise refusal(*repeats)
    return names


def _as_registered(names: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
    """Return the names as the registry has them; `info` may have the folder of the settings file."""
    return tuple(hub_names.canonical(name, (info.context or {}).get("folder")) for name in names)


# What people call the order of backends of a device.
_ORDER_ELSEWHERE = ("backend", "backends", "prefer", "preferred")


def _device(key: str) -> str:
    if not re.fullmatch(DEVICE_KEY, key):
        of_device = key in DeviceSettings.model_fields or key.casefold() in _ORDER_ELSEWHERE
        near = "; 'order' belongs to a device, such as [devices.cuda]" if of_device else ""
        near = near or device_meant(key, DEVICE_TYPES)
        raise expected(f"'cpu', 'cuda', another device type of torch or 'sm_NN'{near}")
    return key


def _file(path: object) -> object:
    if not isinstance(path, str | Path):
        return path  # for pydantic to refuse
    if not Path(path).name:  # "" as well as "."
        raise refusal(((), str(path), "the path of a file"))
    try:
        return Path(path).expanduser()
    except RuntimeError:
        homeless = "the path of a file (there is no home folder for its ~)"
        raise refusal(((), str(path), homeless)) from None


Name = Annotated[str, StringConstraints(strict=True, strip_whitespace=True, min_length=1)]
Names = Annotated[
    tuple[Name, ...], BeforeValidator(_in_order), AfterValidator(_as_registered), AfterValidator(_each_once)
]
DeviceKey = Annotated[str, AfterValidator(_device)]
Preferred = Annotated[Names, Field(min_length=1), BeforeValidator(_as_list)]
File = Annotated[Path, BeforeValidator(_file)]


class _Table(BaseModel):
    # Validates instances, too: `model_copy` and `model_construct` check nothing.
    model_config = ConfigDict(extra="forbid", frozen=True, revalidate_instances="always")

    if not TYPE_CHECKING:  # type checkers take the fields as its arguments

        def __init__(self, /, **values: Any) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise _config_error(error, type(self)) from None

        # Says that it does no more than pydantic's own: validating tables of a file doesn't call it.
        __init__.__pydantic_base_init__ = True


# The settings that name files.
FILES = ("tuned", "lock")


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
        description="Whether it is an error if no backend of the strongest source can run a call.",
    )
    disabled: Names = Field(default=(), description="Backends that must not run.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="warning", description="The least severe messages that the 'attnreg' logger lets pass."
    )
    policy: Literal["measured", "order", "adaptive", "batch_invariant"] = Field(
        default="measured",
        description="What decides where no backend is preferred. measured: a table of times, if there is one "
        "for the device. order: the default order alone. adaptive: the times of the program's own first "
        "calls, at which the backends take turns. batch_invariant: the default order of the backends whose "
        "results for a sequence don't depend on its batch.",
    )
    masks: Literal["as_given", "large", "recognise"] = Field(
        default="as_given",
        description="recognise: calls of F.scaled_dot_product_attention whose boolean mask is padding, "
        "causal, a window or documents run packed, without the mask. large: only large calls on a GPU do; "
        "the default where the policy measured or adaptive is set, and no lockfile.",
    )
    on_error: Literal["raise", "native"] = Field(
        default="raise",
        description="What a fault in this file, or in a file that it names, does. raise: each call raises "
        "the error. native: an error is logged, the settings are left out, and torch's own kernels run; with "
        "a lockfile each call raises the error.",
    )
    tuned: File | None = Field(
        default=None,
        description="A table measured by `attnreg tune`; relative to the folder of the settings file.",
    )
    lock: File | None = Field(
        default=None,
        description="A lockfile of `attnreg lock`; relative to the folder of the settings file. A call that "
        "can't run on its locked backend is an error.",
    )
    build: Literal["background", "now", "off"] = Field(
        default="background",
        description="How missing C++ libraries are compiled at the first call: background (by a process of "
        "low priority), now (the call waits) or off.",
    )
    transformers: Literal["off", "attnreg", "flash_attention_2"] = Field(
        default="off",
        description="attnreg: transformers knows attn_implementation='attnreg' as soon as it is imported. "
        "flash_attention_2: this name runs attnreg, too.",
    )
    devices: dict[DeviceKey, DeviceSettings] = Field(
        default_factory=dict,
        description="Settings by device: a device type ('cpu', 'cuda') or the stronger 'sm_NN'.",
        json_schema_extra={"propertyNames": {"pattern": DEVICE_KEY}},
    )
    modules: dict[Name, Preferred] = Field(
        default_factory=dict,
        description="Backends by module, for a program that calls attnreg.assign(model): a pattern for names "
        "of modules, and a backend, or several in order. The last pattern that matches decides.",
    )

    @model_validator(mode="after")
    def _free_of_contradictions(self) -> Self:
        if problems := list(_contradictions(*_named(self.model_dump()), self.strict)):
            raise refusal(*problems)
        return self


def _contradictions(
    ordered: Iterable[tuple[KeyPath, str]], disabled: Iterable[tuple[KeyPath, str]], is_strict: bool
) -> Iterator[tuple[KeyPath, object, str]]:
    """Yield the names, each with its key, that are asked for and disabled, and a disabled reference."""
    keys = {name.casefold(): (key, name) for key, name in disabled}
    for key, name in ordered:
        if name.casefold() in keys:
            text = toml_file.key_text(keys[name.casefold()][0])
            yield key, name, f"a backend that isn't disabled: {text} names it too"
    if REFERENCE in keys and not is_strict:
        yield (*keys[REFERENCE], "another backend, or strict = true: the reference runs what no other can")


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """Settings and their origin: a file, or without a path a call of `configure`."""

    settings: Settings
    origin: Origin = field(default_factory=Origin)


def load(path: str | os.PathLike[str]) -> LoadedSettings:
    """Read a settings file; an empty one gives the defaults; a `ConfigError` lists the problems."""
    data, origin = toml_file.read(path)
    settings = _validated(data, origin)
    named = {key: path for key in FILES if (path := getattr(settings, key)) is not None}
    if named and origin.path is not None:
        folder = origin.path.parent
        settings = settings.model_copy(update={key: folder / path for key, path in named.items()})
    return LoadedSettings(settings, origin)


def settings_from(value: Settings | Mapping[str, Any]) -> Settings:
    """Return the settings that a program passes to `configure`, checked as `load` does."""
    if not isinstance(value, Settings | Mapping):
        expected = "the path of a settings file, Settings, or a mapping such as {'policy': 'adaptive'}"
        raise ConfigError(f"configure(...): got {short_repr(value)}, expected {expected}")
    return _validated(value, Origin())


def written_as_settings(text: str) -> str:
    """Return what to write for settings that were given in place of a file's path; empty if none is near."""
    key = text.partition("=")[0].strip()
    if key in Settings.model_fields:
        return f"; for this setting write attnreg.configure({{{key!r}: ...}})"
    keys: dict[str, list[str]] = {}
    for name, about in Settings.model_fields.items():
        for value in get_args(about.annotation) if get_origin(about.annotation) is Literal else ():
            keys.setdefault(value, []).append(name)
    meant = nearest(text.strip(), keys, likeness=0.8)
    calls = [f"attnreg.configure({{{name!r}: {meant!r}}})" for name in keys.get(meant, ())]
    return f"; for this setting write {' or '.join(calls)}" if calls else ""


def check_backends(loaded: LoadedSettings, known: Iterable[str]) -> None:
    """Check that settings name known backends only; the case of a name doesn't matter.

    A `ConfigError` lists the unknown names with their lines, and the known names.
    """
    ordered, disabled = _named(loaded.settings.model_dump())
    _raise_if_any(_unknown_names(loaded.origin, [*disabled, *ordered], known), loaded.origin)


def ordered_names(settings: Settings) -> list[str]:
    """Return the names of all backends that settings ask for."""
    ordered, _ = _named(settings.model_dump())
    return [name for _, name in ordered]


def _named(data: Mapping[str, Any]) -> tuple[list[tuple[KeyPath, str]], list[tuple[KeyPath, str]]]:
    """Return the backends that settings, which may have any form, order, and those they disable.

    Each name has its key.
    """
    devices, modules = data.get("devices"), data.get("modules")
    tables = devices.items() if isinstance(devices, dict) else ()
    patterns = modules.items() if isinstance(modules, dict) else ()
    ordered: list[tuple[KeyPath, object]] = [
        *((("devices", key, "order"), own.get("order")) for key, own in tables if isinstance(own, dict)),
        *((("modules", pattern), _as_list(names)) for pattern, names in patterns),
    ]
    return _each_name(ordered), _each_name([(("disabled",), data.get("disabled"))])


def _each_name(lists: Iterable[tuple[KeyPath, object]]) -> list[tuple[KeyPath, str]]:
    """Return each name of some lists with its key; leaves out what is no list, and what is no name."""
    return [
        ((*key, index), name.strip())
        for key, names in lists
        for index, name in enumerate(names if isinstance(names, list | tuple) else ())
        if isinstance(name, str) and name.strip()
    ]


# The key of a fault, and a function that makes its line.
Problem = tuple[KeyPath, Callable[[], str]]


def _unknown_names(
    origin: Origin, named: Iterable[tuple[KeyPath, str]], known: Iterable[str]
) -> list[Problem]:
    """Return a problem for each unknown name."""
    names = sorted(known, key=str.casefold)
    keys = {name.casefold() for name in names}
    unknown = [
        (key, name)
        for key, name in named
        if name.casefold() not in keys and not hub_names.is_well_formed(name)
    ]
    expected = ", ".join(first_ten(names, most=MOST_KNOWN))

    def problem(key: KeyPath, name: str) -> str:
        if hub_names.is_hub_name(name):
            return origin.problem(key, hub_names.problem_of(name))
        near = hub_names.suggested(name) or backend_meant(name, names)
        return origin.problem(key, f"got {short_repr(name)}, expected one of {expected}{near}")

    return [(of[0], functools.partial(problem, *of)) for of in unknown]


def _raise_if_any(problems: list[Problem], origin: Origin, most: int = MOST_LISTED) -> None:
    """Raise an error with the first problems in the order of lines, if any; other lines aren't made."""
    if problems:
        problems = sorted(problems, key=lambda problem: origin.line(problem[0]))
        raise ConfigError("\n".join(first_ten(problems, lambda problem: problem[1](), most)))


def check_file(path: str | os.PathLike[str], known: Iterable[str], most: int = MOST_LISTED) -> None:
    """Check a settings file, and that it names known backends only.

    A `ConfigError` lists the first faults, `most` of them, and counts all. Unknown names of backends, and
    names that contradict each other, are among them, whatever else is wrong.
    """
    data, origin = toml_file.read(path)
    ordered, disabled = _named(data)
    problems = _unknown_names(origin, [*disabled, *ordered], known)
    try:
        Settings.model_validate(data, context=_context(origin))
    except ValidationError as error:
        problems = [*_problems(error, Settings, origin), *problems]
        keys = {key for key, _ in problems}
        for key, got, text in _contradictions(ordered, disabled, data.get("strict") is True):
            if key not in keys:  # pydantic looks for contradictions only where nothing else is wrong
                line = functools.partial(origin.problem, key, f"got {short_repr(got)}, expected {text}")
                problems.append((key, line))
    _raise_if_any(problems, origin, most)


def _validated(value: Settings | Mapping[str, Any], origin: Origin) -> Settings:
    try:
        return Settings.model_validate(value, context=_context(origin))
    except ValidationError as error:
        # `from None`: pydantic's own report has the same problems without their lines.
        raise _config_error(error, Settings, origin) from None


def _context(origin: Origin) -> dict[str, Path]:
    return {} if origin.path is None else {"folder": origin.path.parent}


def _config_error(error: ValidationError, table: type[_Table], origin: Origin | None = None) -> ConfigError:
    origin = origin or Origin(call=f"{table.__name__}(...)")
    return ConfigError("\n".join(first_ten(_problems(error, table, origin), lambda problem: problem[1]())))


def _problems(error: ValidationError, table: type[_Table], origin: Origin) -> list[Problem]:
    """Return each problem of an error of pydantic's, in the order of lines."""
    details = sorted(error.errors(include_url=False), key=lambda detail: origin.line(_key(detail)))
    # A key of another name is one fault: that the right one is missing says nothing more.
    unknown = [_key(detail) for detail in details if detail["type"] == "extra_forbidden"]
    renamed = {key[:-1] for key in unknown if not _belongs_elsewhere(key, table)}
    return [
        (_key(detail), functools.partial(_problem, detail, table, origin))
        for detail in details
        if detail["type"] != "missing" or _key(detail)[:-1] not in renamed
    ]


def _key(detail: ErrorDetails) -> KeyPath:
    return tuple(part for part in detail["loc"] if part != "[key]")


def _problem(detail: ErrorDetails, table: type[_Table], origin: Origin) -> str:
    key = _key(detail)
    if detail["type"] != "extra_forbidden":
        return origin.problem(key, complaint(detail))
    known = list(_fields_at(key, table))
    keys = f"one of {', '.join(known)}" if len(known) > 1 else "".join(known)
    name, meant = str(key[-1]), _meant(key, table)
    near = f"; did you mean {meant!r}?" if meant else ""
    if _belongs_elsewhere(key, table):
        # A frequent mistake: a line that is added after a [table] belongs to it.
        of_device = meant in DeviceSettings.model_fields
        place = "to a device, such as [devices.cuda]" if of_device else "above the first [table]"
        near = f"; {name!r} belongs {place}" if meant == name else f"{near} It belongs {place}"
    return origin.problem(key, f"unknown key, expected {keys}{near}")


def _fields_at(key: KeyPath, table: type[_Table]) -> Iterable[str]:
    """Return the names of the settings that are known where a key is."""
    return (table if len(key) == 1 else DeviceSettings).model_fields


def _meant(key: KeyPath, table: type[_Table]) -> str:
    """Return the setting that an unknown key may stand for, wherever that belongs; empty if none is near."""
    name = str(key[-1])
    if name.casefold() in _ORDER_ELSEWHERE:
        return "order"
    return nearest(name, [*_fields_at(key, table), *Settings.model_fields, *DeviceSettings.model_fields])


def _belongs_elsewhere(key: KeyPath, table: type[_Table]) -> bool:
    """Whether an unknown key stands for a setting of another place in the file."""
    meant = _meant(key, table)
    return bool(meant) and meant not in _fields_at(key, table)
