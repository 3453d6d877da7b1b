"""Calls as JSON, and the file of a recorded workload: a line with counts for each distinct call."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, NamedTuple

from attnreg.core.contract.spec import AttentionSpec, Device, Direction
from attnreg.core.times import table
from attnreg.core.torchlib import locks
from attnreg.errors import MOST_LISTED, ConfigError, InvalidInputError, first_ten, short_repr

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
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: can't be read: {getattr(error, 'strerror', None) or error}") from error
    return _recorded(lines, path, most)


def merge(path: Path, counts: Mapping[tuple[AttentionSpec, Direction], int], seconds: float = 10.0) -> None:
    """Add counts to a file; waits up to `seconds` for each other process that writes the file.

    Raises:
        ConfigError: the file can't be written, for instance on a full disk, or isn't a recorded workload. The
            file is unchanged.
    """
    try:
        with locks.rewriting(path, seconds):
            before = read(path) if path.exists() else []
            known = {call.spec: [call.forward, call.backward] for call in before}
            for (spec, direction), count in counts.items():
                known.setdefault(spec, [0, 0])[DIRECTIONS.index(direction)] += count
            table.write_whole(path, "".join(_line(spec, *both) for spec, both in known.items()))
    except OSError as error:
        raise ConfigError(f"{path}: can't be written: {error.strerror or error}") from error


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
    data = _with_keys("the line", json.loads(line), ("device", "forward", "backward", "spec"))
    where = _with_keys("device", data["device"], ("type", "capability", "name"))
    counts = data["forward"], data["backward"]
    if not all(isinstance(n, int) and n >= 0 for n in counts):
        raise ValueError(f"counts {short_repr(counts)}")
    capability = where["capability"]
    if not (capability is None or isinstance(capability, list)):
        raise ValueError(f"device.capability {short_repr(capability)} is no list")
    if wrong := [name for name in ("type", "name") if not isinstance(where[name], str)]:
        raise ValueError(f"device.{wrong[0]} {short_repr(where[wrong[0]])} is no text")
    device = Device(where["type"], None if capability is None else tuple(capability), name=where["name"])
    return Recorded(spec_from(data["spec"], device), *counts)


def _with_keys(place: str, data: object, keys: Iterable[str]) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise ValueError(f"{place} is no object")
    if missing := [key for key in keys if key not in data]:
        raise ValueError(f"{place} has no {missing[0]}")
    return data


def _line(spec: AttentionSpec, forward: int, backward: int) -> str:
    device = {name: getattr(spec.device, name) for name in ("type", "capability", "name")}
    row = {"forward": forward, "backward": backward, "spec": spec_to(spec), "device": device}
    return json.dumps(row, separators=(",", ":")) + "\n"
