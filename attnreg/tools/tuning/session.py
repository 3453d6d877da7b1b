"""One run of `attnreg tune`: measures call by call, and saves the table after each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path

import torch

from attnreg.core.contract.capabilities import one_line
from attnreg.core.contract.spec import AttentionSpec, Direction, directions_of
from attnreg.core.registry.entry import Entry
from attnreg.core.times.environments import matched
from attnreg.core.times.kinds import Kind, Size, kind_of, size_of
from attnreg.core.times.points import Front, Point
from attnreg.core.times.table import Environment, Table, load
from attnreg.core.torchlib import locks
from attnreg.errors import ConfigError, file_errors, first_ten
from attnreg.tools.measure.timing import Timer
from attnreg.tools.tuning.checks import Checks, TimeIsUpError, no_memory, reasons
from attnreg.tools.tuning.measure import Measurement
from attnreg.tools.tuning.workload import unmeasurable

# The least time that a call is expected to take; with less left, the session ends.
LEAST_S = 0.05


@dataclass(slots=True)
class Session:
    """A table in the making: its file and contents, and what measures it.

    `replaced` is the table that it replaces and doesn't continue, `fresh` are the points that it measured,
    and `skipped` the calls that can't be measured, with the reason.
    """

    out: Path
    environment: Environment
    entries: Sequence[Entry]
    device: torch.device
    checks: Checks
    timer: Timer
    points: dict[tuple[Kind, Size], Point] = field(default_factory=dict)
    fronts: tuple[Front, ...] = ()
    replaced: Table | None = None
    fresh: list[Point] = field(default_factory=list)
    skipped: list[tuple[AttentionSpec, str]] = field(default_factory=list)

    def run(self, specs: Sequence[AttentionSpec], seconds: float) -> Iterator[AttentionSpec]:
        """Measure calls in their order, saving after each, until all are done or the time is up.

        Yields each call when it is done, also if there was nothing to measure. Raises `DeviceLostError` if
        the GPU can't be used any more, `ConfigError` as `save` does.
        """
        started, longest = self.timer.now(), LEAST_S
        for spec in specs:
            if todo := self.todo(spec):
                begun = self.timer.now()
                # The next call may be larger and have to compile: it may take as long as the longest of late.
                # The first one of a process, which loads packages, mustn't keep the last seconds unused.
                if begun + longest > started + seconds:
                    return
                try:
                    self._measure(spec, todo, started + seconds)
                except TimeIsUpError:
                    return
                longest = max(longest / 2, LEAST_S, self.timer.now() - begun)
            else:
                against = {entry.name: reasons(entry, spec, "forward") for entry in self.entries}
                if all(against.values()):
                    listed = "; ".join(f"{name}: {one_line(why)}" for name, why in against.items())
                    self.skipped.append((spec, listed))
            yield spec

    def prepare(self, specs: Iterable[AttentionSpec], going_on: Callable[[], bool]) -> None:
        """Check and call the backends that don't compile once for each call, while other processes compile.

        What fails, as for want of memory that the others hold, is tried again where it is measured.
        """
        entries = [entry for entry in self.entries if entry.backend is None or not entry.backend.compiles]
        for spec in specs if entries else ():
            if not going_on():
                break
            if todo := () if unmeasurable(spec) else self.todo(spec):
                with suppress(Exception), self._on_device():
                    Measurement(spec, todo, entries, self.checks, self.timer, self.device, inf).call_once()
        self.checks.forget_failures()

    def _on_device(self) -> AbstractContextManager[object]:
        """Return the context in which CUDA events are recorded on the session's device."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def todo(self, spec: AttentionSpec) -> tuple[Direction, ...]:
        """Return the directions of a call that the table lacks from some backend."""
        return tuple(direction for direction in directions_of(spec) if self._misses(spec, direction))

    def save(self) -> None:
        """Add what was measured to the file, in which other sessions may have saved points meanwhile.

        Raises `ConfigError` if it can't be written, or is now a table of another environment.
        """
        with file_errors(self.out), locks.rewriting(self.out):
            self._take_over()
            self._write()

    def _take_over(self) -> None:
        """Take points and host times of the file that this session doesn't have, or has from the file."""
        if self.replaced is not None and self.out.exists() and load(self.out) == self.replaced:
            return
        saved = kept(self.out, self.environment)
        self._add(saved.points)
        self._add(self.fresh)
        self.fronts = tuple({front.place: front for front in (*saved.fronts, *self.fronts)}.values())

    def _add(self, points: Iterable[Point]) -> None:
        for point in points:
            known = self.points[point.place].backends if point.place in self.points else {}
            self.points[point.place] = replace(point, backends={**known, **point.backends})

    def _write(self) -> None:
        points = tuple(self.points.values())
        # The versions of backends that weren't measured don't matter.
        measured = {name for point in points for name in point.backends}
        measured |= {front.backend for front in self.fronts}
        versions = {name: version for name, version in self.environment.backends.items() if name in measured}
        Table(replace(self.environment, backends=versions), points, self.out.name, self.fronts).save(self.out)

    def add_fronts(self, fronts: Iterable[Front]) -> None:
        """Add host times of whole calls, and save the table as `save` does."""
        self.fronts = tuple({front.place: front for front in (*self.fronts, *fronts)}.values())
        self.save()

    def refusals(self, specs: Iterable[AttentionSpec]) -> dict[str, str]:
        """Return which backends refuse some of the calls that others run, each with its reasons."""
        refused: dict[str, dict[str, None]] = {}
        without = {spec for spec, _ in self.skipped}
        for spec in specs:
            for direction in directions_of(spec):
                for entry in () if spec in without else self.entries:
                    refused.setdefault(entry.name, {}).update(dict.fromkeys(reasons(entry, spec, direction)))
        return {name: one_line(listed) for name, listed in refused.items() if listed}

    def _misses(self, spec: AttentionSpec, direction: Direction) -> bool:
        place = kind_of(spec, direction), size_of(spec)
        known = self.points[place].backends if place in self.points else {}
        if not any(point.place == place for point in self.fresh):
            # What failed in an earlier session is tried again: memory may be free now, or a bug fixed.
            known = {name: measured for name, measured in known.items() if not measured.failed}
        return any(entry.name not in known and not reasons(entry, spec, direction) for entry in self.entries)

    def _measure(self, spec: AttentionSpec, todo: tuple[Direction, ...], deadline: float) -> None:
        if reason := unmeasurable(spec):
            self.skipped.append((spec, reason))
            return
        points: list[Point] = []
        try:
            with self._on_device():
                call = Measurement(spec, todo, self.entries, self.checks, self.timer, self.device, deadline)
                for point in call.points():
                    points.append(point)
        except (RuntimeError, MemoryError) as error:
            if not no_memory(error):
                raise
            reason = f"its inputs need more memory than there is: {error}".partition("\n")[0]
            self.skipped.append((spec, reason))
        finally:
            if points:
                self._add(points)
                self.fresh += points
                self.save()


def kept(out: Path, environment: Environment) -> Table:
    """Return the table that a session continues: an empty one if there is no file yet.

    Raises `ConfigError` if the file is no table, or one of another environment, or can't be read.
    """
    with suppress(OSError):  # below a folder that can't be searched; `load` says so
        if not out.exists():
            return Table(environment, (), out.name)
    table = load(out)
    if differs := matched(table.environment, environment).differences:
        raise ConfigError(
            f"{out}: {'; '.join(first_ten(differs))}: measure into another file, or anew with --fresh"
        )
    return table
