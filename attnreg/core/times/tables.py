"""The tables of a process: those that settings name, those that ship with attnreg, and which is in force.

A table that was measured in this environment is in force: on this card, with these versions. If there is
none, one of a related card or of near versions is, as a prior; see `environments`. Never two at once: half a
table would compare times that were taken on two machines.
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

from attnreg.core.adaptation.lse_columns import widened
from attnreg.core.contract.spec import AttentionSpec, Device, Direction
from attnreg.core.registry.entry import Entry
from attnreg.core.selection.predictions import Prediction
from attnreg.core.times.environments import environment, matched, matched_simulated
from attnreg.core.times.index import Kinds
from attnreg.core.times.kinds import PROCESSORS, kind_of
from attnreg.core.times.lookup import predict, predict_both
from attnreg.core.times.table import Table, load
from attnreg.errors import ConfigError

log = logging.getLogger("attnreg")

# Tables are compared again after every registration; each warning is logged once.
_logged: set[str] = set()


SHIPPED = Path(__file__).parent / "shipped"


@dataclass(frozen=True)
class Named:
    """A table, and the setting that names it: `"attnreg.toml:3"`; empty for one that ships with attnreg.

    `is_prior` says whether it was measured in another environment than this one.
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
class Report:
    """The table in force on a device, sentences about it, and one with the reasons for each refused table."""

    in_force: Named | None = None
    notes: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


class Tables:
    """The tables that settings name, compared with a device when it is first asked about.

    `named` are the strongest first; the versions of `entries` have to be the measured ones; `compiled` says
    whether the compiled call cache is in use.
    """

    def __init__(
        self, named: tuple[Named, ...], entries: Callable[[], Mapping[str, Entry]], compiled: bool = False
    ) -> None:
        self.compiled = compiled
        self._named = named
        self._entries = entries
        self._reports: dict[Device, Report] = {}
        # A plan needs the predictions of both directions of a call, one right after the other.
        self._last: tuple[object, dict[Direction, Prediction | None]] | None = None

    def predict(
        self, spec: AttentionSpec, direction: Direction, builders: frozenset[str] = frozenset()
    ) -> Prediction | None:
        """Return what the table in force predicts for one direction of a call; None if nothing.

        Of `builders`, names in lower case, the time of a new shape's first call counts in full.

        Where no backwards with a gradient of the LSE were measured, those of larger head dims decide: a
        kernel that takes that gradient itself needs less.
        """
        table = self.report(spec.device).in_force
        if table is None:
            return None
        of_lse = direction == "backward" and spec.grad_lse
        if of_lse and table.kinds.index_for(kind_of(spec, direction), spec.max_q) is None:
            spec = widened(spec)
        if not spec.needs_backward:
            return predict(table.kinds, spec, direction, str(table), self.compiled, builders)
        last, call = self._last, (spec, builders)
        if last is None or last[0] != call:
            last = self._last = call, predict_both(table.kinds, spec, str(table), self.compiled, builders)
        return last[1][direction]

    def report(self, device: Device) -> Report:
        """Return which table is in force on a device, and why others aren't."""
        if device not in self._reports:
            self._reports[device] = self._compared(device)
        return self._reports[device]

    def notes(self, device: Device) -> tuple[str, ...]:
        """Return why tables aren't in force on a device, and notes about the one that is."""
        report = self.report(device)
        return (*report.refused, *report.notes)

    def identity(self, device: Device) -> tuple[str, str]:
        """Return a digest of the table in force on a device, and its name or why there is none."""
        report = self.report(device)
        if report.in_force is None:
            return "no table", "; ".join(report.refused) or "the default order"
        cached = ", compiled call cache" if self.compiled else ""  # predictions depend on it
        return f"contents {report.in_force.digest}{cached}", report.in_force.table.name

    def gap(self, spec: AttentionSpec, direction: Direction) -> str:
        """Return the sentence that the table in force has no call of such a kind; empty if it has."""
        table, spec = self.report(spec.device).in_force, spec.of(direction)
        if table is None or self.predict(spec, direction) is not None:
            return ""
        return f"{table} has nothing of this kind: {kind_of(spec, direction)}"

    def _compared(self, device: Device) -> Report:
        found, refused, warned = Report(), [], []
        for named in self._meant_for(device):
            measured = named.table.environment
            if device.simulated:
                match = matched_simulated(measured, device)
            else:
                match = matched(measured, environment(device, self._entries()))
            if not match.differences:
                found = Report(named, tuple(f"{named}: {note}" for note in match.notes))
                break
            if match.refused:
                problem = f"{named} is refused: {'; '.join(match.refused)}"
                refused.append(problem)
            else:
                problem = f"{named} is only a prior: {'; '.join(match.near)}"
                if found.in_force is None:
                    notes = (problem, *(f"{named}: {note}" for note in match.notes))
                    found = Report(named.as_prior, notes)
            if named.source:
                warned.append((problem, named))
        if found.in_force is None:
            # Naming a table for another type of device is no error.
            found = Report(
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
                is_this = found.in_force is not None and found.in_force.table is named.table
                decides = "it" if is_this else found.in_force or "the default order"
                log.warning("%s; %s decides until `attnreg tune` has run here", problem, decides)
        return replace(found, refused=tuple(refused))

    def _meant_for(self, device: Device) -> Iterator[Named]:
        """Yield the tables for a device; those that ship are read only where none that is named fits."""
        if device.type in ("cpu", "cuda"):
            yield from (named for named in self._named if named.of_gpu == (device.type == "cuda"))
        if device.type == "cuda":
            yield from _shipped(replace(device, index=None))


def _shipped(device: Device) -> Iterator[Named]:
    """Yield the tables that ship with attnreg for a GPU of that capability, that of its name first."""
    own = SHIPPED / file_name(device.name)
    for file in sorted(SHIPPED.glob("*.json"), key=lambda file: (file != own, file.name)):
        one = _read(file)
        if one and not matched_simulated(one.table.environment, device).refused:
            yield one


@functools.cache
def _read(file: Path) -> Named | None:
    try:
        return Named(load(file)) if file.is_file() else None
    except (ConfigError, OSError) as error:  # no setting names it, so it can't be an error of a call
        log.warning("%s", error)
        return None


def file_name(device: str) -> str:
    """Return the file name of a device's table: `nvidia-h200.json`."""
    return re.sub(r"[^a-z0-9]+", "-", device.casefold()).strip("-") + ".json"
