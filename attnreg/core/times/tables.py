"""The tables of a process, named by settings or shipped with attnreg, and the table in force on a device.

A table of this environment is in force: of this card, with these versions. If there is none, a table of a
related card or of near versions is in force as a prior; see `environments`. Two tables are never in force at
once, because times of two machines can't be compared.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from attnreg.core.adaptation.lse_columns import LseColumns
from attnreg.core.contract.lengths import Cut
from attnreg.core.contract.spec import AttentionSpec, Device, Direction
from attnreg.core.registry.entry import Entry
from attnreg.core.selection.predictions import Prediction
from attnreg.core.times.environments import environment, matched, matched_simulated
from attnreg.core.times.index import Kinds
from attnreg.core.times.kinds import PROCESSORS, SHORT, kind_of
from attnreg.core.times.lookup import predict, predict_both
from attnreg.core.times.table import Table, load
from attnreg.errors import ConfigError, first_ten

log = logging.getLogger("attnreg")

# Warnings already logged: tables are compared again after every registration.
_logged: set[str] = set()


SHIPPED = Path(__file__).parent / "shipped"
# Times of many queries predict no packed call of few: see `Kinds.index_for`.
CUTS = (Cut.of("max_q", at=SHORT + 1),)
# What decides where no table is in force.
DEFAULT_ORDER = "the default order"


@dataclass(frozen=True)
class Named:
    """A table, and the setting that names it.

    Attributes:
        table: the table.
        source: the setting, such as `"attnreg.toml:3"`; empty for a table that ships with attnreg.
        is_prior: whether it was measured in another environment.
    """

    table: Table
    source: str = ""
    is_prior: bool = False

    @property
    def of_gpu(self) -> bool:
        """Whether it was measured on a GPU, else on a CPU."""
        return bool(self.table.environment.compute_capability)

    @functools.cached_property
    def as_prior(self) -> Named:
        """The same as a prior."""
        return replace(self, is_prior=True)

    @functools.cached_property
    def kinds(self) -> Kinds:
        """Its points, indexed for predictions."""
        return Kinds(self.table.points, self.table.fronts, PROCESSORS if self.of_gpu else 1)

    @functools.cached_property
    def digest(self) -> str:
        """A hash of its contents, twelve digits."""
        data = json.dumps(self.table.to_dict(), sort_keys=True)
        return hashlib.sha256(data.encode()).hexdigest()[:12]

    def __str__(self) -> str:
        named = f" ({self.source})" if self.source else ""
        return f"measured table {self.table.name}{named}{', as a prior' if self.is_prior else ''}"


@dataclass(frozen=True, slots=True)
class TableReport:
    """The table in force on a device, notes on it, and a sentence with the reasons for each refused table."""

    in_force: Named | None = None
    notes: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


class NamedTables:
    """The tables that settings name, as `selection.protocols.Tables`.

    The first request for a device compares them with it.

    Args:
        named: the tables, the strongest first.
        entries: the backends, whose versions have to equal the measured versions.
        compiled: whether the compiled call cache is in use.
    """

    def __init__(
        self, named: tuple[Named, ...], entries: Callable[[], Mapping[str, Entry]], compiled: bool = False
    ) -> None:
        self.compiled = compiled
        self._named = named
        self._entries = entries
        self._reports: dict[Device, TableReport] = {}
        # The last predictions: a plan requests both directions of a call in succession.
        self._last: tuple[object, dict[Direction, Prediction | None]] | None = None

    def predict(
        self, spec: AttentionSpec, direction: Direction, builders: frozenset[str] = frozenset()
    ) -> Prediction | None:
        """Return the prediction of the table in force for one direction of a call.

        If no backwards with a gradient of the LSE were measured, backwards of a larger head dim replace them.
        A kernel that supports this gradient itself takes less time.
        """
        table = self.report(spec.device).in_force
        if table is None:
            return None
        of_lse = direction == "backward" and spec.grad_lse
        if of_lse and table.kinds.index_for(kind_of(spec, direction), spec.max_q) is None:
            spec = LseColumns().adapted(spec)
        if not spec.needs_backward:
            return predict(table.kinds, spec, direction, str(table), self.compiled, builders)
        last, call = self._last, (spec, builders)
        if last is None or last[0] != call:
            last = self._last = call, predict_both(table.kinds, spec, str(table), self.compiled, builders)
        return last[1][direction]

    def report(self, device: Device) -> TableReport:
        """Return the table in force on a device, and why other tables aren't."""
        if device not in self._reports:
            self._reports[device] = self._compared(device)
        return self._reports[device]

    def cuts(self, device: Device) -> tuple[Cut, ...]:
        return () if self.report(device).in_force is None else CUTS

    def notes(self, device: Device) -> tuple[str, ...]:
        report = self.report(device)
        return (*report.refused, *report.notes)

    def identity(self, device: Device) -> tuple[str, str]:
        report = self.report(device)
        if report.in_force is None:
            return "no table", "; ".join(report.refused) or DEFAULT_ORDER
        cached = ", compiled call cache" if self.compiled else ""  # predictions depend on it
        return f"contents {report.in_force.digest}{cached}", report.in_force.table.name

    def gap(self, spec: AttentionSpec, direction: Direction) -> str:
        table, spec = self.report(spec.device).in_force, spec.of(direction)
        if table is None or self.predict(spec, direction) is not None:
            return ""
        return f"{table} has nothing of this kind: {kind_of(spec, direction)}"

    def _compared(self, device: Device) -> TableReport:
        report, refused, warned = TableReport(), [], []
        for named in self._meant_for(device):
            measured = named.table.environment
            if device.simulated:
                match = matched_simulated(measured, device)
            else:
                match = matched(measured, environment(device, self._entries()))
            if not match.differences:
                report = TableReport(named, tuple(f"{named}: {note}" for note in match.notes))
                break
            if match.refused:
                problem = f"{named} is refused: {'; '.join(first_ten(match.refused))}"
                refused.append(problem)
            else:
                problem = f"{named} is only a prior: {'; '.join(first_ten(match.near))}"
                if report.in_force is None:
                    notes = (problem, *(f"{named}: {note}" for note in match.notes))
                    report = TableReport(named.as_prior, notes)
            if named.source:
                warned.append((problem, named))
        if report.in_force is None:
            # A table for another type of device is no error, but a note.
            report = TableReport(
                notes=tuple(
                    f"{named} was measured on a {'GPU' if named.of_gpu else 'CPU'}: it doesn't apply to "
                    f"{device.type}"
                    for named in self._named
                    if named.of_gpu != (device.type == "cuda")
                )
            )
        for problem, named in warned:
            if problem not in _logged:
                _logged.add(problem)
                is_this = report.in_force is not None and report.in_force.table is named.table
                decides = "it" if is_this else report.in_force or DEFAULT_ORDER
                log.warning("%s; %s decides until `attnreg tune` has run here", problem, decides)
        return replace(report, refused=tuple(refused))

    def _meant_for(self, device: Device) -> Iterator[Named]:
        """Yield the tables for a device; shipped tables are last, and only read if no named table fits."""
        if device.type in ("cpu", "cuda"):
            yield from (named for named in self._named if named.of_gpu == (device.type == "cuda"))
        if device.type == "cuda":
            yield from _shipped(replace(device, index=None))


def _shipped(device: Device) -> Iterator[Named]:
    """Yield the shipped tables for a GPU's compute capability, first the table of its own name."""
    own = SHIPPED / file_name(device.name)
    for file in sorted(SHIPPED.glob("*.json"), key=lambda file: (file != own, file.name)):
        named = _read(file)
        if named and not matched_simulated(named.table.environment, device).refused:
            yield named


@functools.cache
def _read(file: Path) -> Named | None:
    try:
        return Named(load(file)) if file.is_file() else None
    except (ConfigError, OSError) as error:  # no setting names the file, so no call may fail by it
        log.warning("%s", error)
        return None


def file_name(device: str) -> str:
    """Return the file name of a device's table: `nvidia-h200.json`."""
    return re.sub(r"[^a-z0-9]+", "-", device.casefold()).strip("-") + ".json"
