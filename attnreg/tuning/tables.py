"""The tables of a process: those that settings name, those that ship with attnreg, and which is in force."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from attnreg.errors import ConfigError
from attnreg.tuning.index import Kinds
from attnreg.tuning.lookup import predict
from attnreg.tuning.machine import Match, environment, file_name, matched, matched_simulated
from attnreg.tuning.table import load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from attnreg.contract.discovery import Entry
    from attnreg.contract.spec import AttentionSpec, Device, Direction
    from attnreg.tuning.lookup import Prediction
    from attnreg.tuning.table import Table

log = logging.getLogger("attnreg")

# Tables are compared again after every registration; each warning is logged once.
_logged: set[str] = set()

SHIPPED = Path(__file__).parent / "shipped"


@dataclass(frozen=True)
class Named:
    """A table, and the setting that names it: `"attnreg.toml:3"`; empty for one that ships with attnreg."""

    table: Table
    source: str = ""

    @functools.cached_property
    def kinds(self) -> Kinds:
        """Its points, indexed for predictions."""
        return Kinds(self.table.points, self.table.fronts)

    @functools.cached_property
    def digest(self) -> str:
        """A hash of its contents, twelve digits."""
        data = json.dumps(self.table.to_dict(), sort_keys=True)
        return hashlib.sha256(data.encode()).hexdigest()[:12]

    def __str__(self) -> str:
        return f"measured table {self.table.name}" + (f" ({self.source})" if self.source else "")


@dataclass(frozen=True, slots=True)
class Report:
    """Which table is in force on a device, and which aren't.

    Attributes:
        in_force: the table; None if there is none.
        notes: sentences about it.
        refused: a sentence for each table that was refused, with its reasons.
    """

    in_force: Named | None = None
    notes: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


class Tables:
    """The tables that settings name, compared with a device when it is first asked about.

    Args:
        named: the tables of the settings, the strongest first.
        entries: returns all backends; their versions have to be the measured ones.
        compiled: whether the compiled call cache is in use.
    """

    def __init__(
        self, named: tuple[Named, ...], entries: Callable[[], Mapping[str, Entry]], compiled: bool = False
    ) -> None:
        self.compiled = compiled
        self._named = named
        self._entries = entries
        self._reports: dict[Device, Report] = {}

    def predict(self, spec: AttentionSpec, direction: Direction) -> Prediction | None:
        """Return what the table in force predicts for one direction of a call; None if nothing."""
        report = self._reports.get(spec.device) or self.report(spec.device)
        if report.in_force is None:
            return None
        return predict(report.in_force.kinds, spec, direction, str(report.in_force), self.compiled)

    def report(self, device: Device) -> Report:
        """Return which table is in force on a device, and why others aren't."""
        if device not in self._reports:
            self._reports[device] = self._compared(device)
        return self._reports[device]

    def notes(self, device: Device) -> tuple[str, ...]:
        """Return why tables aren't in force on a device, and notes about the one that is."""
        report = self.report(device)
        return (*report.refused, *report.notes)

    def _compared(self, device: Device) -> Report:
        refused: list[str] = []
        warned: list[str] = []
        found = None
        for named in self._meant_for(device):
            match = self._match(named, device)
            if not match.refused:
                found = Report(named, tuple(f"{named}: {note}" for note in match.notes), tuple(refused))
                break
            refused.append(f"{named} is refused: {'; '.join(match.refused)}")
            warned += [refused[-1]] if named.source else []
        if found is None:
            found = Report(notes=tuple(self._elsewhere(device)), refused=tuple(refused))
        decides = found.in_force or "the default order"
        for one in warned:
            if one not in _logged:
                _logged.add(one)
                log.warning("%s; %s decides until `attnreg tune` has run here", one, decides)
        return found

    def _elsewhere(self, device: Device) -> Iterator[str]:
        """Yield which tables are for another type of device, for reports without a table in force."""
        for named in self._named:
            of_gpu = bool(named.table.environment.compute_capability)
            if of_gpu != (device.type == "cuda"):
                kind = "GPU" if of_gpu else "CPU"
                yield f"{named} was measured on a {kind}: it doesn't apply to {device.type}"

    def _meant_for(self, device: Device) -> Iterator[Named]:
        """Yield the tables for that type of device; naming one for another type is no error."""
        if device.type not in ("cpu", "cuda"):
            return
        for named in self._named:
            if bool(named.table.environment.compute_capability) == (device.type == "cuda"):
                yield named
        if device.type != "cuda":
            return
        if device.simulated:
            yield from _shipped_for(".".join(map(str, device.capability or ())))
        elif device.name and (found := _shipped(device.name)) is not None:
            yield found

    def _match(self, named: Named, device: Device) -> Match:
        measured = named.table.environment
        if device.simulated:
            return matched_simulated(measured, ".".join(map(str, device.capability or ())))
        return matched(measured, environment(device, self._entries()))


@functools.cache
def _shipped_for(capability: str) -> tuple[Named, ...]:
    """Return the tables that ship with attnreg for GPUs of that compute capability."""
    found = (_read(file) for file in sorted(SHIPPED.glob("*.json")))
    return tuple(one for one in found if one and one.table.environment.compute_capability == capability)


@functools.cache
def _shipped(device: str) -> Named | None:
    """Return the table that ships with attnreg for a GPU of that name."""
    return _read(SHIPPED / file_name(device))


def _read(file: Path) -> Named | None:
    try:
        return Named(load(file)) if file.is_file() else None
    except (ConfigError, OSError) as error:  # no setting names it, so it can't be an error of a call
        log.warning("%s", error)
        return None
