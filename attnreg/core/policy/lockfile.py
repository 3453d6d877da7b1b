"""Lockfiles: the backend of each call of a workload, and the environment of these decisions.

`attnreg lock` writes a lockfile, ATTNREG_LOCK names it. A lockfile is for a single device, which its
environment describes; calls are compared without their devices.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from attnreg.core.contract.spec import AttentionSpec, Device, Direction
from attnreg.core.registry.entry import Entry
from attnreg.core.times import table
from attnreg.core.times.environments import environment, matched, matched_simulated
from attnreg.core.times.points import ANY_TEXT, Malformed, checked, one_of, with_keys
from attnreg.core.times.traces import DIRECTIONS, spec_from, spec_to
from attnreg.errors import ConfigError, InvalidInputError, UnsupportedInputError, first_ten

FORMAT = "attnreg lockfile"
VERSION = 1
VARIABLE = "ATTNREG_LOCK"
NOWHERE = Device("cpu")


@dataclass(frozen=True, slots=True)
class LockfileRow:
    """One direction of a call, the backend that runs it, and the source of this decision."""

    spec: AttentionSpec
    direction: Direction
    backend: str
    source: str

    def to_dict(self) -> dict[str, Any]:
        """Return the same as plain data."""
        return asdict(self) | {"spec": spec_to(self.spec)}

    def beginning(self, name: str) -> str:
        """Return the beginning of errors about a row, called `name`, that can't be replayed."""
        return f"{name} says {self.backend} for this {self.direction}"


@dataclass(frozen=True, slots=True)
class Lockfile:
    """The contents of a lockfile.

    Attributes:
        path: an absolute path.
        device: the type of its device: `"cpu"`, `"cuda"`.
        environment: the environment of the decisions.
        rows: one row for each direction of each call.
    """

    path: Path
    device: str
    environment: table.Environment
    rows: tuple[LockfileRow, ...]

    @property
    def digest(self) -> str:
        """A hash of its contents, twelve digits; the order of rows doesn't count."""
        rows = sorted(json.dumps(row.to_dict(), sort_keys=True) for row in self.rows)
        data = json.dumps([self.device, asdict(self.environment), rows], sort_keys=True)
        return hashlib.sha256(data.encode()).hexdigest()[:12]

    def save(self) -> None:
        """Write the file atomically, one row per line; raises `ConfigError` if it can't be written."""
        rows = [row.to_dict() for row in self.rows]
        data = {"device": self.device, "environment": asdict(self.environment), "rows": rows}
        try:
            table.write_rows(self.path, {"format": FORMAT, "version": VERSION, **data}, "rows")
        except OSError as error:
            raise ConfigError(f"{self.path}: can't be written: {error.strerror or error}") from error


def load(path: Path) -> Lockfile:
    """Read a lockfile; a `ConfigError` names the file, and the key at which it is wrong."""
    file = path.absolute()

    def read(data: object) -> Lockfile:
        contents = table.of_format(data, FORMAT, VERSION, "`attnreg lock` writes it", "lock it again")
        with_keys(contents, ("format", "version", "device", "environment", "rows"), "")
        a_type = ("a type of device such as 'cuda'", lambda device: isinstance(device, str) and device)
        device = checked(contents["device"], "device", a_type)
        locked = table.environment_from(contents["environment"])
        rows = table.each(contents, "rows", lambda row, place: _row(row, place, locked, Device(device)))
        keys = [key_of(row.spec, row.direction) for row in rows]
        table.check_once(keys, "rows", "direction of a call")
        return Lockfile(file, device, locked, rows)

    return table.read_whole(file, "a file of `attnreg lock`", read)


def _row(data: object, place: str, locked: table.Environment, device: Device) -> LockfileRow:
    row = with_keys(data, ("spec", "direction", "backend", "source"), place)
    known = ("one of environment.backends", lambda name: isinstance(name, str) and name in locked.backends)
    checked(row["direction"], f"{place}.direction", one_of(*DIRECTIONS))
    checked(row["backend"], f"{place}.backend", known)
    checked(row["source"], f"{place}.source", ANY_TEXT)
    try:
        spec = spec_from(row["spec"], device)
        hash(spec)
    except (InvalidInputError, TypeError) as error:
        within = "" if str(error).startswith("spec") else "spec: "
        raise Malformed(f"{place}.{within}{error}") from None
    return LockfileRow(spec, row["direction"], row["backend"], row["source"])


def key_of(spec: AttentionSpec, direction: Direction) -> tuple[AttentionSpec, Direction]:
    """Return the key of a row: the call without its device, and the direction.

    With `policy = "batch_invariant"` a row is for calls of any batch.
    """
    return replace(spec.of_any_batch() if spec.batch_invariant else spec, device=NOWHERE), direction


class LockInForce:
    """A lockfile in force; the versions of `entries` have to equal the file's."""

    def __init__(self, file: Lockfile, entries: Callable[[], Mapping[str, Entry]]) -> None:
        self.file = file
        self._entries = entries
        self._numbers = {key_of(row.spec, row.direction): n for n, row in enumerate(file.rows)}
        self._differences: dict[tuple[Device, str], str] = {}

    @property
    def digest(self) -> str:
        """A hash of its contents."""
        return self.file.digest

    def problem(self, device: Device) -> str:
        """Return why the lockfile refuses all calls on a device; empty if it doesn't."""
        if self.file.device != device.type:
            return ""
        backends = dict.fromkeys(row.backend for row in self.file.rows)
        differs = dict.fromkeys(filter(None, (self.differences(device, name) for name in backends)))
        return (
            f"{VARIABLE}: {'; '.join(first_ten(list(differs)))}: calls on this device are refused"
            if differs
            else ""
        )

    def expected(self, spec: AttentionSpec, direction: Direction) -> tuple[LockfileRow, str]:
        """Return the row of one direction of a call, and its name for messages.

        Raises:
            UnsupportedInputError: the file has no such row, or is of another environment.
        """
        number = self._numbers.get(key_of(spec, direction))
        if number is None and spec.varlen:  # only times depend on sinks: no backend is refused for them
            number = self._numbers.get(key_of(replace(spec, sinks=not spec.sinks), direction))
        if number is None:
            raise UnsupportedInputError(
                f"{VARIABLE}: {self.file.path} has no row for this {direction} on {spec.device}: {spec}; to "
                f"add it, record the program without {VARIABLE}, then `attnreg lock --from TRACE --out FILE`"
            )
        row, name = self.file.rows[number], f"{VARIABLE}: {self.file.path}: rows[{number}]"
        if differs := self.differences(spec.device, row.backend):
            raise UnsupportedInputError(f"{row.beginning(name)}, but it was {differs}")
        return row, name

    def differences(self, device: Device, backend: str) -> str:
        """Return how the environment of a backend on a device differs from the lock's, as of the first call.

        Each new plan calls this. If a program changes torch's threads later, the first result still applies.
        """
        if (device, backend) not in self._differences:
            self._differences[device, backend] = self._compared(device, backend)
        return self._differences[device, backend]

    def _compared(self, device: Device, backend: str) -> str:
        if device.type != self.file.device:
            return f"locked on {self.file.device}, here it is {device.type}"
        locked = self.file.environment
        if device.simulated:
            return "; ".join(matched_simulated(locked, device, "locked").refused)
        # The versions of other backends don't affect this call.
        alone = replace(locked, backends={backend: locked.backends[backend]})
        return "; ".join(
            matched(alone, environment(device, self._entries()), "locked", whole=True).differences
        )
