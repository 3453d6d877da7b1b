"""One run of `attnreg tune`: call by call into a table that is on disk after each."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, get_args

import torch

from attnreg.contract.spec import Direction
from attnreg.errors import ConfigError
from attnreg.tuning.failures import TimeIsUpError, no_memory
from attnreg.tuning.kinds import kind_of, size_of
from attnreg.tuning.matching import matched
from attnreg.tuning.measure import measured
from attnreg.tuning.table import Table, load
from attnreg.tuning.workload import unmeasurable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from attnreg.contract.discovery import Entry
    from attnreg.contract.spec import AttentionSpec
    from attnreg.measure.timing import Timer
    from attnreg.tuning.checks import Checks
    from attnreg.tuning.kinds import Kind, Size
    from attnreg.tuning.points import Front, Point
    from attnreg.tuning.table import Environment

__all__ = ["Session", "kept"]

# What reading, planning and compiling a next call takes at least, for a budget that is nearly spent.
LEAST_S = 0.05


@dataclass(slots=True)
class Session:
    """What is measured, on what, and what came of it so far.

    Attributes:
        out: the table's file.
        environment: what the points are true of.
        entries: the backends that are measured.
        device: where.
        checks, timer: what they are held to, and timed with.
        points: what the table has, by place.
        fronts: what the host takes for calls through the fronts.
        fresh: what this session measured.
        skipped: calls that can't be measured, with the reason.
    """

    out: Path
    environment: Environment
    entries: Sequence[Entry]
    device: torch.device
    checks: Checks
    timer: Timer
    points: dict[tuple[Kind, Size], Point] = field(default_factory=dict)
    fronts: tuple[Front, ...] = ()
    fresh: list[Point] = field(default_factory=list)
    skipped: list[tuple[AttentionSpec, str]] = field(default_factory=list)

    def run(self, specs: Sequence[AttentionSpec], seconds: float) -> Iterator[AttentionSpec]:
        """Measure calls in their order, each saved at once, until all are done or the time is up.

        Yields:
            Each call when it is done with; one that needed nothing, too.

        Raises:
            DeviceLostError: the GPU can't be used any more.
            OSError: the table can't be written.
        """
        started, longest = self.timer.now(), LEAST_S
        for spec in specs:
            if not (todo := self.todo(spec)):
                if against := self._against(spec):
                    self.skipped.append((spec, against))
                yield spec
                continue
            begun = self.timer.now()
            # Calls get larger and compile anew: the next one may take as long as any so far.
            if begun + longest > started + seconds:
                return
            try:
                self._measure(spec, todo, started + seconds)
            except TimeIsUpError:
                return
            longest = max(longest, self.timer.now() - begun)
            yield spec

    def todo(self, spec: AttentionSpec) -> tuple[Direction, ...]:
        """Return the directions of a call that the table doesn't have from every backend."""
        wanted: tuple[Direction, ...] = get_args(Direction) if spec.needs_backward else ("forward",)
        return tuple(direction for direction in wanted if self._misses(spec, direction))

    def save(self) -> None:
        """Write the table.

        Raises:
            OSError: it can't be written.
        """
        points = tuple(self.points.values())
        # Of what wasn't measured another version is no matter.
        measured = {name for point in points for name in point.backends}
        measured |= {front.backend for front in self.fronts}
        versions = {name: found for name, found in self.environment.backends.items() if name in measured}
        Table(replace(self.environment, backends=versions), points, self.out.name, self.fronts).save(self.out)

    def add_fronts(self, found: Iterable[Front]) -> None:
        """Take what fronts were measured to take, and write the table.

        Raises:
            OSError: it can't be written.
        """
        known = {one.place: one for one in (*self.fronts, *found)}
        self.fronts = tuple(known.values())
        self.save()

    def _against(self, spec: AttentionSpec) -> str:
        """Return what speaks against every backend; empty if one can run the call."""
        reasons = {entry.name: entry.reasons(spec, "forward") for entry in self.entries}
        told = (f"{name}: {' and '.join(found)}" for name, found in reasons.items())
        return "" if any(not found for found in reasons.values()) else "; ".join(told)

    def _misses(self, spec: AttentionSpec, direction: Direction) -> bool:
        place = kind_of(spec, direction), size_of(spec)
        point = self.points.get(place)
        found = point.backends if point is not None else {}
        failed = {name for name, one in found.items() if one.failed}
        # What failed may do another time: its memory may have been somebody's, and bugs get mended.
        again = failed and not any(one.place == place for one in self.fresh)
        known = found.keys() - failed if again else found.keys()
        return any(entry.name not in known and not entry.reasons(spec, direction) for entry in self.entries)

    def _measure(self, spec: AttentionSpec, todo: tuple[Direction, ...], deadline: float) -> None:
        if reason := unmeasurable(spec):
            self.skipped.append((spec, reason))
            return
        found: list[Point] = []
        try:
            # Events and kernels without tensors go to the current device.
            with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
                for point in measured(
                    spec, self.entries, todo, self.checks, self.timer, self.device, deadline
                ):
                    found.append(point)
        except (RuntimeError, MemoryError) as error:
            if not no_memory(error):
                raise
            self.skipped.append(
                (spec, f"its inputs need more memory than there is: {error}".partition("\n")[0])
            )
        finally:
            if found:
                for point in found:
                    known = self.points.get(point.place)
                    before = known.backends if known is not None else {}
                    self.points[point.place] = replace(point, backends={**before, **point.backends})
                self.fresh += found
                self.save()


def kept(out: Path, environment: Environment) -> Table:
    """Return what a table of the same environment has already; an empty one if there is no file.

    Raises:
        ConfigError: the file is no table, or one of another environment.
    """
    if not out.exists():
        return Table(environment, (), out.name)
    table = load(out)
    if refused := matched(table.environment, environment).refused:
        raise ConfigError(f"{out}: {'; '.join(refused)}: measure into another file, or anew with --fresh")
    return table
