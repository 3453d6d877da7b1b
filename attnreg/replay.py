"""Deciding by a lock: what it says leads, and whatever would have another backend run is an error."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from attnreg.errors import UnsupportedInputError
from attnreg.lockfile import VARIABLE, Lockfile, Row, place_of
from attnreg.selection import Decision, Policy, Preference, select
from attnreg.tuning.matching import matched, matched_simulated

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from attnreg.discovery import Direction, Entry
    from attnreg.spec import AttentionSpec, Device

__all__ = ["Lock", "replayed"]


class Lock:
    """A lockfile in force.

    Args:
        file: what it says.
        entries: returns all backends, whose versions have to be those of the file.
    """

    def __init__(self, file: Lockfile, entries: Callable[[], Mapping[str, Entry]]) -> None:
        self.file = file
        self._entries = entries
        self._places = {place_of(row.spec, row.direction): n for n, row in enumerate(file.rows)}
        self._differences: dict[tuple[Device, str], str] = {}

    def expected(self, spec: AttentionSpec, direction: Direction) -> tuple[Row, str]:
        """Return the row of one direction of a call, and what to call it.

        Raises:
            UnsupportedInputError: there is none, or it was decided where something was different.
        """
        number = self._places.get(place_of(spec, direction))
        if number is None:
            raise UnsupportedInputError(
                f"{VARIABLE}: {self.file.path} has no row for this {direction} on {spec.device}: {spec}; to "
                f"add it, record the program without {VARIABLE}, then `attnreg lock --from TRACE --out FILE`"
            )
        row, name = self.file.rows[number], f"{VARIABLE}: {self.file.path}: rows[{number}]"
        if differs := self.differences(spec.device, row.backend):
            raise UnsupportedInputError(f"{_says(row, name)}, but it was {differs}")
        return row, name

    def differences(self, device: Device, backend: str) -> str:
        """Return what is different, for a backend on a device, from where the lock was made."""
        if (device, backend) not in self._differences:
            self._differences[device, backend] = self._compared(device, backend)
        return self._differences[device, backend]

    def _compared(self, device: Device, backend: str) -> str:
        if device.type != self.file.device:
            return f"locked on {self.file.device}, here it is {device.type}"
        there = self.file.environment
        if device.simulated:
            capability = ".".join(map(str, device.capability or ()))
            return "; ".join(matched_simulated(there, capability, "locked").refused)
        from attnreg.tuning.machine import environment

        # What doesn't run the call can't make a difference to it.
        alone = replace(there, backends={backend: there.backends[backend]})
        return "; ".join(matched(alone, environment(device, self._entries()), "locked", whole=True).refused)


def replayed(
    lock: Lock,
    spec: AttentionSpec,
    direction: Direction,
    entries: Mapping[str, Entry],
    policy: Policy,
    native: str = "",
) -> Decision:
    """Return the decision that a lock has for one direction of a call.

    Raises:
        UnsupportedInputError: the lock has none, it was made where something was different, its backend
            can't run the call, or somebody asks for another.
    """
    row, name = lock.expected(spec, direction)
    told = _says(row, name)
    # Without what a table predicts: a table asks for nothing.
    asked = select(spec, direction, entries, policy, native)
    if asked.refusal:
        return asked
    if asked.source in {preference.source for preference in policy.preferences}:
        if not _same(asked.backend, row.backend):
            if reasons := asked.rejected.get(row.backend):
                raise _cant_run(told, reasons, spec, asked)
            raise UnsupportedInputError(
                f"{told}, but {asked.source} would have {asked.backend} run it: {spec}"
            )
        return replace(asked, source=name)
    led = policy.led_by(Preference(name, (row.backend,), required=False))
    decision = select(spec, direction, entries, led, native)
    if not _same(decision.backend, row.backend):
        reasons = decision.rejected.get(row.backend, ("no backend of that name is known here",))
        raise _cant_run(told, reasons, spec, decision)
    return decision


def _cant_run(
    told: str, reasons: tuple[str, ...], spec: AttentionSpec, decision: Decision
) -> UnsupportedInputError:
    return UnsupportedInputError(
        f"{told}, which can't run it here ({'; '.join(reasons)}): {spec}", decision.rejected
    )


def _same(backend: str | None, locked: str) -> bool:
    return backend is not None and backend.casefold() == locked.casefold()


def _says(row: Row, name: str) -> str:
    """Return the beginning of every sentence about a row that can't be replayed."""
    return f"{name} says {row.backend} for this {row.direction}"
