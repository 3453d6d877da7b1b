"""Calls as JSON, and the file of a recorded workload: a line with counts for each distinct call."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

from attnreg.core.contract.spec import AttentionSpec, Device, Direction
from attnreg.core.times import table
from attnreg.core.torchlib import caches, locks
from attnreg.errors import MOST_LISTED, ConfigError, InvalidInputError, file_errors, first_ten, short_repr

log = logging.getLogger("attnreg")

_FIELDS = {field.name: field.default for field in fields(AttentionSpec)}

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


class Recorded(NamedTuple):
    """A call of a workload, and how often each direction ran."""

    spec: AttentionSpec
    forward: int
    backward: int


def spec_to(spec: AttentionSpec) -> dict[str, Any]:
    """Return a call as plain data, without its device and without fields at their defaults."""
    data = {}
    for name, default in _FIELDS.items():
        value = getattr(spec, name)
        if name != "device" and (default is MISSING or value != default):
            data[name] = list(value) if isinstance(value, tuple) else value
    return data


def spec_from(data: object, device: Device) -> AttentionSpec:
    """Return the call of the plain data of `spec_to`; raises `InvalidInputError` if it is no call."""
    if not isinstance(data, dict):
        raise InvalidInputError(f"spec: got {short_repr(data)}, expected an object")
    if unknown := sorted(data.keys() - (_FIELDS.keys() - {"device"})):
        raise InvalidInputError(f"spec.{unknown[0]}: unknown key")
    try:
        return AttentionSpec(device=device, **data)
    except TypeError as error:
        raise InvalidInputError(f"spec: {error}") from None


def read(path: Path, most: int = MOST_LISTED) -> list[Recorded]:
    """Return the calls of a recorded workload in the order of the file, each once.

    Raises:
        ConfigError: the file can't be read, or a line isn't of `attnreg.record`; `most` such lines are named.
    """
    with file_errors(path, "read"):
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return _recorded(lines, path, most)


def merge(path: Path, counts: Mapping[tuple[AttentionSpec, Direction], int], seconds: float = 10.0) -> None:
    """Add counts to a file; waits up to `seconds` for each other process that writes the file.

    Raises:
        ConfigError: the file can't be written, for instance on a full disk, or isn't a recorded workload. The
            file is unchanged.
    """
    with file_errors(path), locks.rewriting(path, seconds):
        before = read(path) if path.exists() else []
        known = {call.spec: [call.forward, call.backward] for call in before}
        for (spec, direction), count in counts.items():
            known.setdefault(spec, [0, 0])[DIRECTIONS.index(direction)] += count
        caches.write_whole(path, "".join(_line(spec, *both) for spec, both in known.items()))


def check_writable(path: str | os.PathLike[str]) -> Path:
    """Return the path of a file for recording, before the first call; raises `ConfigError` if it is unfit."""
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"record: got {path!r}, expected the path of a file")
    try:
        file = Path(path).absolute()
        table.check_writable(file)
    except FileNotFoundError as error:
        raise ConfigError(
            f"record: got {str(path)!r}, expected an absolute path: the current folder has been removed"
        ) from error
    except ConfigError:
        raise
    except ValueError as error:  # a NUL, or what is no text
        raise ConfigError(f"record: got {path!r}, expected the path of a file: {error}") from error
    if file.exists():
        read(file)
    return file


def _recorded(lines: Iterable[str], path: Path, most: int = MOST_LISTED) -> list[Recorded]:
    calls: dict[AttentionSpec, Recorded] = {}
    faults: list[str] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            call = _parsed(line)
            hash(call.spec)
        except (InvalidInputError, ValueError, TypeError, RecursionError) as error:
            if not line.endswith("\n") and number > 1:
                # The process was killed while it wrote this line.
                log.warning("%s:%d: left out: the line is incomplete", path, number)
                break
            problem = f"got no recorded call ({error}), expected a line of `attnreg.record`"
            faults.append(f"{path}:{number}: {problem}")
            continue
        before = calls.get(call.spec, Recorded(call.spec, 0, 0))
        calls[call.spec] = Recorded(call.spec, before.forward + call.forward, before.backward + call.backward)
    if faults:
        raise ConfigError("\n".join(first_ten(faults, most=most)))
    return list(calls.values())


def _parsed(line: str) -> Recorded:
    data = json.loads(line)
    check_form("the line", data, _OF_LINE)
    counts = data["forward"], data["backward"]
    if min(counts) < 0:
        raise ValueError(f"counts {counts}")
    return Recorded(spec_from(data["spec"], device_from(data["device"])), *counts)


def check_form(place: str, value: Any, form: Any) -> None:
    """Check a value of JSON: types, lists of one form, objects with at least these keys, or any keys of text.

    Raises ValueError, which says which value is wrong; `place` is the name of `value`.
    """
    of_key = form.get(str) if isinstance(form, dict) else None
    kind = type(form) if isinstance(form, dict | list) else form
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        raise ValueError(f"{place} is no {' or '.join(_IN_WORDS[each] for each in kinds)}")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise ValueError(f"{place} is out of range")
    if isinstance(form, list):
        for number, item in enumerate(value):
            check_form(f"{place}[{number}]", item, form[0])
    elif of_key is not None:
        for key, item in dict(value).items():
            check_form(f"{place}.{key}", item, of_key)
    elif isinstance(form, dict):
        for key, of_value in dict(form).items():
            if key not in value:
                raise ValueError(f"{place} has no {key!r}")
            check_form(key if place == "the line" else f"{place}.{key}", value[key], of_value)


_IN_WORDS = {
    dict: "object", list: "list", str: "text", int: "whole number", float: "number", NoneType: "null",
}  # fmt: skip
OF_DEVICE: dict[Any, Any] = {"type": str, "capability": (list, NoneType), "name": str}
_OF_LINE: dict[Any, Any] = {"device": OF_DEVICE, "forward": int, "backward": int, "spec": dict}


def device_to(device: Device) -> dict[str, Any]:
    """Return a device as plain data, without its index."""
    return {name: getattr(device, name) for name in OF_DEVICE}


def device_from(data: dict[str, Any]) -> Device:
    """Return the device of the plain data of `device_to`, which has the form `OF_DEVICE`."""
    capability = data["capability"] and tuple(data["capability"])
    return Device(data["type"], capability, name=data["name"])


def _line(spec: AttentionSpec, forward: int, backward: int) -> str:
    of_device = device_to(spec.device)
    row = {"forward": forward, "backward": backward, "spec": spec_to(spec), "device": of_device}
    return json.dumps(row, separators=(",", ":")) + "\n"
