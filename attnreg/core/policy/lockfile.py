"""Lockfiles: the backend of each kind of calls of a workload, and the environment of these decisions.

`attnreg lock` writes a lockfile, ATTNREG_LOCK names it. A lockfile is for a single device, which its
environment describes; calls are compared without their devices. A row is for all calls of a kind whose
lengths are in its ranges, or for a call of exact lengths.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from attnreg.core.contract.backend import COMPILED_KERNEL
from attnreg.core.contract.lengths import LENGTHS, Cut, Lengths, bounds, cuts_of_window
from attnreg.core.contract.options import OPTIONS
from attnreg.core.contract.spec import UNBOUNDED, AttentionSpec, Device, Direction
from attnreg.core.policy.ranges import Ranges, includes, ranges_from, ranges_to
from attnreg.core.registry.entry import Entry
from attnreg.core.times import table
from attnreg.core.times.environments import environment, matched, matched_simulated
from attnreg.core.times.points import ANY_TEXT, Malformed, checked, one_of, with_keys
from attnreg.core.times.traces import DIRECTIONS, spec_from, spec_to
from attnreg.errors import MOST_LISTED, InvalidInputError, UnsupportedInputError, file_errors, first_ten

FORMAT = "attnreg lockfile"
VERSION = 2
VARIABLE = "ATTNREG_LOCK"
NOWHERE = Device("cpu")


@dataclass(frozen=True, slots=True)
class LockfileRow:
    """One direction of a kind of calls, the backend that runs it, and the source of this decision.

    Attributes:
        spec: a call of the kind.
        direction: which of its directions.
        backend, source: the decision.
        ranges: the lengths that the row is for, where there is no range any; None for only the lengths of
            `spec`.
    """

    spec: AttentionSpec
    direction: Direction
    backend: str
    source: str
    ranges: Ranges | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the same as plain data."""
        data = {name: getattr(self, name) for name in ("direction", "backend", "source")}
        lengths = {} if self.ranges is None else {"lengths": ranges_to(self.ranges)}
        return {"spec": spec_to(self.spec), **data, **lengths}

    def includes(self, spec: AttentionSpec) -> bool:
        """Whether the row is for the lengths of a call of its kind.

        A call has a narrower window than its kind where its lengths make the wider one hide nothing.
        """
        if spec.window not in (self.spec.window, bounds(self.spec.window, False, spec.max_q, spec.max_k)):
            return False
        return includes(self.ranges or (), Lengths.of(spec))

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

    @property
    def has_compiled_kernel(self) -> bool:
        """Whether a row is for a backend with a kernel that attnreg compiles."""
        versions = self.environment.backends
        return any(versions[row.backend].endswith(COMPILED_KERNEL) for row in self.rows)

    def save(self) -> None:
        """Write the file atomically, one row per line; raises `ConfigError` if it can't be written."""
        rows = [row.to_dict() for row in self.rows]
        data = {"device": self.device, "environment": asdict(self.environment), "rows": rows}
        with file_errors(self.path):
            table.write_rows(self.path, {"format": FORMAT, "version": VERSION, **data}, "rows")


def load(path: Path, most: int = MOST_LISTED) -> Lockfile:
    """Read a lockfile; a `ConfigError` names the file and wrong keys, those of `most` rows at most."""
    file = path.absolute()

    def read(data: object) -> Lockfile:
        contents = table.of_format(data, FORMAT, VERSION, "`attnreg lock` writes it", "lock it again")
        with_keys(contents, ("format", "version", "device", "environment", "rows"), "")
        a_type = ("a type of device such as 'cuda'", lambda device: isinstance(device, str) and device)
        device = checked(contents["device"], "device", a_type)
        locked = table.environment_from(contents["environment"])
        rows = table.each(contents, "rows", lambda row, place: _row(row, place, locked, Device(device)))
        keys = [(row.spec, row.direction, row.ranges) for row in rows]
        table.check_once(keys, "rows", "direction of a call")
        return Lockfile(file, device, locked, rows)

    return table.read_whole(file, "a file of `attnreg lock`", read, most)


def _row(data: object, place: str, locked: table.Environment, device: Device) -> LockfileRow:
    by_kind = ("lengths",) if isinstance(data, dict) and "lengths" in data else ()
    row = with_keys(data, ("spec", "direction", "backend", "source", *by_kind), place)
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
    ranges = ranges_from(row["lengths"], f"{place}.lengths") if by_kind else None
    return LockfileRow(spec, row["direction"], row["backend"], row["source"], ranges)


def key_of(spec: AttentionSpec, direction: Direction) -> tuple[AttentionSpec, Direction]:
    """Return the key of a row for exact lengths: the call without its device, and the direction.

    With `policy = "batch_invariant"` a row is for calls of any batch.
    """
    spec = spec.of(direction)
    return replace(spec.of_any_batch() if spec.batch_invariant else spec, device=NOWHERE), direction


def kind_of(spec: AttentionSpec, direction: Direction) -> tuple[AttentionSpec, Direction]:
    """Return what a row for ranges of lengths has in common with its calls, but for the window.

    How a window is written depends on lengths: see `LockfileRow.includes`.
    """
    spec, direction = key_of(spec, direction)
    return spec.but(**dict.fromkeys(LENGTHS, 1), window=UNBOUNDED), direction


class LockInForce:
    """A lockfile in force, as `selection.protocols.Lock`.

    The versions of `entries` have to equal the file's. `source` names the file.
    """

    def __init__(
        self, file: Lockfile, entries: Callable[[], Mapping[str, Entry]], source: str = VARIABLE
    ) -> None:
        self.file, self.source = file, source
        self._entries = entries
        self._exact: dict[tuple[AttentionSpec, Direction], int] = {}
        self._of_kind: dict[tuple[AttentionSpec, Direction], list[int]] = {}
        for number, row in enumerate(file.rows):
            if row.ranges is None:
                self._exact[key_of(row.spec, row.direction)] = number
            else:
                self._of_kind.setdefault(kind_of(row.spec, row.direction), []).append(number)
        self._differences: dict[tuple[Device, str], str] = {}

    @property
    def without(self) -> str:
        """What to leave out to run a program unlocked."""
        return VARIABLE if self.source == VARIABLE else f"the line {self.source}"

    @property
    def digest(self) -> str:
        return self.file.digest

    def problem(self, device: Device) -> str:
        if self.file.device != device.type:
            return ""
        backends = dict.fromkeys(row.backend for row in self.file.rows)
        differs = dict.fromkeys(filter(None, (self.differences(device, name) for name in backends)))
        return (
            f"{self.source}: {'; '.join(first_ten(list(differs)))}: calls on this device are refused"
            if differs
            else ""
        )

    def expected(self, spec: AttentionSpec, direction: Direction) -> tuple[LockfileRow, str]:
        number = next(self._numbers(spec, direction), None)
        if number is None:
            # The backward is decided first, when its forward is called.
            is_first = direction == "backward" and next(self._numbers(spec, "forward"), None) is None
            missing = "forward, nor for its backward," if is_first else direction
            raise UnsupportedInputError(
                f"{self.source}: {self.file.path} has no row for this {missing} on {spec.device}: {spec}\n"
                f"  nearest: {self._nearest(spec, 'forward' if is_first else direction)}\n"
                f"  to add it, record the program without {self.without} into the same trace, which keeps "
                "the calls in it, then `attnreg lock --from TRACE --out FILE`"
            )
        row, name = self.file.rows[number], f"{self.source}: {self.file.path}: rows[{number}]"
        if differs := self.differences(spec.device, row.backend):
            raise UnsupportedInputError(f"{row.beginning(name)}, but it was {differs}")
        return row, name

    def _numbers(self, spec: AttentionSpec, direction: Direction) -> Iterator[int]:
        """Yield the numbers of the rows that are for one direction of a call, the closest first."""
        for variant in _variants(spec):
            if (number := self._exact.get(key_of(variant, direction))) is not None:
                yield number
            rows = self._of_kind.get(kind_of(variant, direction), ())
            fitting = [number for number in rows if self.file.rows[number].includes(spec)]
            yield from sorted(fitting, key=lambda number: self.file.rows[number].spec.window != spec.window)

    def cuts(self, spec: AttentionSpec, direction: Direction) -> tuple[Cut, ...] | None:
        kinds = {kind_of(variant, direction) for variant in _variants(spec)}
        if not self._exact_kinds.isdisjoint(kinds):
            return None
        rows = [self.file.rows[number] for kind in kinds for number in self._of_kind.get(kind, ())]
        cuts = [cut for row in rows for length_range in row.ranges or () for cut in length_range.cuts]
        cuts += [cut for row in rows for cut in cuts_of_window(*row.spec.window)]
        return tuple(dict.fromkeys(cuts)) if rows else None

    @functools.cached_property
    def _exact_kinds(self) -> frozenset[tuple[AttentionSpec, Direction]]:
        return frozenset(kind_of(*key) for key in self._exact)

    def _nearest(self, spec: AttentionSpec, direction: Direction) -> str:
        """Return the name of the row that differs least from a call, and how it differs."""
        spec = spec.of(direction)
        rows = [(n, row) for n, row in enumerate(self.file.rows) if row.direction == direction]
        if not rows:
            return f"none, it has no row for any {direction}"
        number, row = min(rows, key=lambda numbered: len(_differing(numbered[1], spec)))
        return f"rows[{number}], {row.backend}, with {', '.join(_differing(row, spec))}"

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
        if (entry := self._entries().get(backend.casefold())) is not None:
            entry.open()  # which the lock asks for
        here = environment(device, self._entries())
        if locked.torch:
            # The versions of other backends don't affect this call.
            own = {name: version for name, version in locked.backends.items() if name == backend}
            alone = replace(locked, backends=own)
        else:  # locked without the device: nothing else is known of its machine
            alone = replace(
                here, compute_capability=locked.compute_capability, attnreg=locked.attnreg, backends={}
            )
        differs = "; ".join(matched(alone, here, "locked", whole=True).differences)
        return differs + _remedy(alone.backends.get(backend, ""), here.backends.get(backend, ""))


def _remedy(locked: str, here: str) -> str:
    """Return what to do where a version of a backend has attnreg's compiled kernel and the other doesn't."""
    was, now = (version.endswith(COMPILED_KERNEL) for version in (locked, here))
    if not locked or not here or was == now:
        return ""
    if now:
        return ": lock it again, the kernel is compiled now"
    return ": `attnreg build` compiles the kernel (`attnreg info` says why it isn't used), or lock it again"


def _variants(spec: AttentionSpec) -> tuple[AttentionSpec, ...]:
    """Return the calls whose row is a call's: on what results are rescaled for only times depend."""
    rescaled = [row for row in OPTIONS if row.rescales and spec.varlen]
    return (spec, *(spec.but(**{row.field: not row.is_on_in(spec)}) for row in rescaled))


def _differing(row: LockfileRow, spec: AttentionSpec) -> list[str]:
    """Return how a row isn't for a call: what it has, and what the call has."""
    locked, lengths = row.spec.of(row.direction), Lengths.of(spec)
    alike = {"device"} if row.ranges is None else {"device", *LENGTHS}
    if row.ranges is not None and spec.window == bounds(locked.window, False, spec.max_q, spec.max_k):
        alike.add("window")
    names = [field.name for field in fields(AttentionSpec) if field.name not in alike]
    pairs = ((name, getattr(locked, name), getattr(spec, name)) for name in names)
    differs = [f"{name} {was} (here {now})" for name, was, now in pairs if was != now]
    outside = (length_range for length_range in row.ranges or () if not length_range.contains(lengths))
    return differs + [f"{length_range} (here {length_range.value(lengths)})" for length_range in outside]
