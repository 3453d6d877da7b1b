"""The tables of a process: those that settings name, those that ship with attnreg, and which is in force."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from attnreg.contract.discovery import Entry
from attnreg.contract.spec import AttentionSpec, Device, Direction
from attnreg.errors import ConfigError
from attnreg.tuning.index import Kinds
from attnreg.tuning.lookup import Prediction, predict
from attnreg.tuning.machine import environment, file_name, matched, matched_simulated
from attnreg.tuning.table import Table, load

log = logging.getLogger("attnreg")

# Tables are compared again after every registration; each warning is logged once.
_logged: set[str] = set()

SHIPPED = Path(__file__).parent / "shipped"


@dataclass(frozen=True)
class Named:
    """A table, and the setting that names it: `"attnreg.toml:3"`; empty for one that ships with attnreg."""

    table: Table
    source: str = ""

    @property
    def of_gpu(self) -> bool:
        """Whether it was measured on a GPU, else on a CPU."""
        return bool(self.table.environment.compute_capability)

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
        table = self.report(spec.device).in_force
        if table is None:
            return None
        return predict(table.kinds, spec, direction, str(table), self.compiled)

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
        on_gpu = device.type == "cuda"
        meant = [named for named in self._named if named.of_gpu == on_gpu]
        if on_gpu:
            meant += _shipped(replace(device, index=None))
        found, refused, warned = Report(), [], []
        for named in meant if device.type in ("cpu", "cuda") else ():
            measured = named.table.environment
            if device.simulated:
                match = matched_simulated(measured, device)
            else:
                match = matched(measured, environment(device, self._entries()))
            if not match.refused:
                found = Report(named, tuple(f"{named}: {note}" for note in match.notes))
                break
            refused.append(f"{named} is refused: {'; '.join(match.refused)}")
            if named.source:
                warned.append(refused[-1])
        if found.in_force is None:
            # Naming a table for another type of device is no error.
            found = Report(
                notes=tuple(
                    f"{named} was measured on a {'GPU' if named.of_gpu else 'CPU'}: it doesn't apply to "
                    f"{device.type}"
                    for named in self._named
                    if named.of_gpu != on_gpu
                )
            )
        for one in warned:
            if one not in _logged:
                _logged.add(one)
                decides = found.in_force or "the default order"
                log.warning("%s; %s decides until `attnreg tune` has run here", one, decides)
        return replace(found, refused=tuple(refused))


@functools.cache
def _shipped(device: Device) -> tuple[Named, ...]:
    """Return the tables that ship with attnreg for a GPU of that name, if simulated of that capability."""
    files = sorted(SHIPPED.glob("*.json")) if device.simulated else [SHIPPED / file_name(device.name)]
    found = (_read(file) for file in files)
    return tuple(
        one
        for one in found
        if one and not (device.simulated and matched_simulated(one.table.environment, device).refused)
    )


def _read(file: Path) -> Named | None:
    try:
        return Named(load(file)) if file.is_file() else None
    except (ConfigError, OSError) as error:  # no setting names it, so it can't be an error of a call
        log.warning("%s", error)
        return None
