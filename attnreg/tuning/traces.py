"""The file of a recorded workload: a line for each distinct call, with how often it ran."""

from __future__ import annotations

import json
import logging
import os
import threading
from typing import TYPE_CHECKING, NamedTuple, TextIO

from attnreg.contract.spec import AttentionSpec, Device
from attnreg.errors import ConfigError, InvalidInputError
from attnreg.torchlib.locks import open_after_fork
from attnreg.tuning.specs import spec_from, spec_to

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from attnreg.contract.spec import Direction

__all__ = ["Recorded", "check_writable", "merge", "read"]

log = logging.getLogger("attnreg")

# Locks of files are a process's, and end with the first of its files that is closed.
_inside = open_after_fork(threading.Lock())

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


class Recorded(NamedTuple):
    """One call of a workload, and how often each of its directions ran."""

    spec: AttentionSpec
    forward: int
    backward: int


def read(path: Path) -> list[Recorded]:
    """Return what a file says, a call that it has twice once, in the order of the file.

    Raises:
        ConfigError: it can't be read, or a line isn't what `attnreg.record` writes.
    """
    try:
        with _inside, path.open(encoding="utf-8") as file:
            _lock(file, shared=True)
            lines = file.read().splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: can't be read: {getattr(error, 'strerror', None) or error}") from error
    return _recorded(lines, path)


def merge(path: Path, counts: Mapping[tuple[AttentionSpec, Direction], int]) -> None:
    """Add counts to a file, which other processes may do at the same time.

    Raises:
        ConfigError: it can't be written, or has something else in it.
    """
    try:
        with _inside, path.open("a+", encoding="utf-8") as file:
            _lock(file)
            file.seek(0)
            known = {one.spec: [one.forward, one.backward] for one in _recorded(file, path)}
            for (spec, direction), count in counts.items():
                known.setdefault(spec, [0, 0])[DIRECTIONS.index(direction)] += count
            text = "".join(_line(spec, *both) for spec, both in known.items())
            file.seek(0)
            file.truncate()
            file.write(text)
    except OSError as error:
        raise ConfigError(f"{path}: can't be written: {error.strerror or error}") from error


def check_writable(path: Path) -> None:
    """Check that calls can be recorded in a file, before there are any.

    Raises:
        ConfigError: it can't be written, or has something else in it.
    """
    is_there = os.access(path, os.F_OK)  # `exists` raises in a folder that can't be read
    if is_there:
        read(path)
    if not os.access(path if is_there else path.absolute().parent, os.W_OK):
        raise ConfigError(f"{path}: can't be written, expected a file in a folder that is there")


def _recorded(lines: Iterable[str], path: Path) -> list[Recorded]:
    found: dict[AttentionSpec, Recorded] = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                one = _parsed(line)
            except (InvalidInputError, ValueError, KeyError, TypeError) as error:
                if not line.endswith("\n") and number > 1:
                    # It was being written when its process was killed.
                    log.warning("%s:%d: left out, as it is the beginning of a line only", path, number)
                    break
                raise ConfigError(
                    f"{path}:{number}: got no recorded call ({error}), expected a line of `attnreg.record`"
                ) from error
            before = found.get(one.spec, Recorded(one.spec, 0, 0))
            found[one.spec] = Recorded(one.spec, before.forward + one.forward, before.backward + one.backward)
    return list(found.values())


def _parsed(line: str) -> Recorded:
    data = json.loads(line)
    where, counts = data["device"], (data["forward"], data["backward"])
    if not all(isinstance(n, int) and n >= 0 for n in counts):
        raise ValueError(f"counts {counts}")
    capability = where["capability"]
    device = Device(where["type"], None if capability is None else tuple(capability), name=where["name"])
    return Recorded(spec_from(data["spec"], device), *counts)


def _line(spec: AttentionSpec, forward: int, backward: int) -> str:
    capability = spec.device.capability
    device = {
        "type": spec.device.type,
        "capability": None if capability is None else list(capability),
        "name": spec.device.name,
    }
    row = {"forward": forward, "backward": backward, "spec": spec_to(spec), "device": device}
    return json.dumps(row, separators=(",", ":")) + "\n"


def _lock(file: TextIO, shared: bool = False) -> None:
    """Wait until no other process writes the file; it is open to them again when it is closed."""
    try:
        import fcntl
    except ImportError:  # on Windows, where ranks have to record into files of their own
        return
    # Of this process alone: a child that is forked meanwhile doesn't hold it, too, for as long as it lives.
    fcntl.lockf(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
