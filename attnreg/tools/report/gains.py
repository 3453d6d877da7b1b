"""What a run could gain, as far as it is known: predictions of measured tables, and padding in masks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, cast

from attnreg.core import registry
from attnreg.core.aten.bypassed import ROUTED
from attnreg.core.contract.spec import Direction
from attnreg.core.policy import current as policy
from attnreg.core.registry.entry import Entry
from attnreg.core.selection.protocols import Tables
from attnreg.core.times.tables import NamedTables
from attnreg.tools.report.lines import CallRow

# Less than this share is chance.
LEAST = 0.05
# The backends of torch's own kernels, whose names rows have where nothing asks for a backend.
BACKENDS = {(device, native.kernel): native.name for (device, _), native in ROUTED.items()}


class Gain(NamedTuple):
    """A backend that a table predicts to be faster for a row's calls.

    Attributes:
        row: the calls.
        backend: the backend.
        now_us, then_us: the predicted times of a call by the backend that ran it, and by this.
    """

    row: CallRow
    backend: str
    now_us: float
    then_us: float

    @property
    def saves_us(self) -> float:
        """What all calls of the row would take less."""
        return (self.now_us - self.then_us) * self.row.calls


class Predicted(NamedTuple):
    """What tables predict for rows: `gains`, how many rows they know, and the table or why there is none."""

    gains: tuple[Gain, ...]
    known: int
    note: str


def predicted(rows: Iterable[CallRow]) -> Predicted:
    """Return what the tables in force, or tables that ship with attnreg, predict for calls of these rows."""
    tables = _tables()
    gains, known, notes, missing = [], 0, [], []
    for row in rows:
        direction = cast("Direction", row.direction)
        prediction = tables.predict(row.spec.of(direction), direction)
        if prediction is None:
            missing.append(tables.identity(row.spec.device)[1])
            continue
        notes.append(prediction.table)
        now = prediction.of(BACKENDS.get((row.spec.device.type, row.backend), row.backend))
        entries = registry.entries()
        able = [
            candidate
            for candidate in prediction.candidates
            if candidate.cost_us is not None
            and _can_run(entries.get(candidate.backend.casefold()), row, direction)
        ]
        if now is None or now.cost_us is None or not able:
            continue
        known += 1
        best = min(able, key=lambda candidate: candidate.cost_us or 0.0)
        if best.cost_us is not None and best.cost_us < (1 - LEAST) * now.cost_us:
            gains.append(Gain(row, best.backend, now.cost_us, best.cost_us))
    gains.sort(key=lambda gain: -gain.saves_us)
    return Predicted(tuple(gains), known, "; ".join(dict.fromkeys(notes or missing)))


def _tables() -> Tables:
    return policy.current().tables or NamedTables((), registry.entries)


def _can_run(entry: Entry | None, row: CallRow, direction: Direction) -> bool:
    if entry is None or entry.on_request:  # whose code runs only where something asks for it
        return False
    return not entry.unavailable() and not entry.reasons(row.spec, direction)
