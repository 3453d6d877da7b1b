"""The policy "adaptive": backends take turns at the first calls of a kind, until the fastest is known.

It works like `cudnn.benchmark` for convolutions, but on the program's own calls. Measured times go into a
table in the cache folder, one table for each environment, with which a later process starts. Calls of the
same kind and nearly the same size share turns (`cell_of`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from attnreg.core.contract.lengths import Cut
from attnreg.core.contract.spec import AttentionSpec, Device, Direction
from attnreg.core.registry.entry import Entry
from attnreg.core.selection.predictions import Candidate, Prediction
from attnreg.core.times import job_results
from attnreg.core.times.environments import environment
from attnreg.core.times.index import Kinds
from attnreg.core.times.job_results import NOTHING
from attnreg.core.times.kinds import kind_of, size_of
from attnreg.core.times.lookup import predict, predict_both
from attnreg.core.times.points import Point
from attnreg.core.times.table import Environment, Table, load
from attnreg.core.times.tables import CUTS, NamedTables, file_name
from attnreg.core.times.traces import DIRECTIONS
from attnreg.core.times.turns import MOST_CALLS, Cell, TimedTurn, Turns, cell_of, lock
from attnreg.core.torchlib import caches, job_store, locks
from attnreg.errors import AttnregError

log = logging.getLogger("attnreg")

NAME = 'what policy = "adaptive" has seen'

# A backend gets no turn if a measured table predicts more than so many times the best time.
HOPELESS = 2.0
# How long ranks wait for the measuring rank, and how often they check.
PATIENCE_S, LOOK_S = 60.0, 0.5


class Learned:
    """The times of an environment: this process's, and earlier processes' in the cache folder.

    `digest` identifies the environment, equally on all ranks of a job.
    """

    def __init__(self, here: Environment, digest: str, file: Path | None) -> None:
        self.environment, self._digest, self._file = here, digest, file
        self.turns: dict[Cell, Turns] = {}
        self.known = {cell_of(*point.place): point for point in self._read()}

    def turns_of(self, spec: AttentionSpec, direction: Direction) -> Turns:
        """Return the turns that a call belongs to; new turns start with the known times."""
        kind, size = kind_of(spec, direction), size_of(spec)
        cell = cell_of(kind, size)
        turns = self.turns.get(cell)
        if turns is None:
            name = f"{self._digest}/{hashlib.sha256(repr(cell).encode()).hexdigest()[:16]}"
            turns = self.turns[cell] = Turns(kind, size, name, since=time.monotonic())
            if job_store.group_of_several() is not None:
                try:
                    turns.role = "measures" if job_results.claim(name) else "follows"
                except RuntimeError:  # the other ranks' choice can't be known
                    turns.closed = True
            if cell in self.known and turns.role != "follows" and not turns.closed:
                self._close(turns, self.known[cell])
        return turns

    def point_of(self, spec: AttentionSpec, direction: Direction) -> Point | None:
        """Return the measured times of such calls; None before all turns are over."""
        cell = _cell(spec, direction)
        turns = self.turns.get(cell)
        return turns.point if turns is not None else self.known.get(cell)

    def is_over(self, spec: AttentionSpec, direction: Direction) -> bool:
        """Whether there are no further turns of such calls."""
        cell = _cell(spec, direction)
        return self.turns[cell].closed if cell in self.turns else cell in self.known

    def collect(self) -> None:
        """Close the turns that are over."""
        for turns in self.turns.values():
            if turns.closed:
                continue
            if turns.role == "follows":
                self._look(turns)
                continue
            turns.collect()
            if (point := turns.result()) is not None:
                self._close(turns, point)
                # Next time memory may be free, a bug fixed, or shapes repeat.
                if point.backends and not turns.failed and not turns.lacks_builders:
                    self.known[cell_of(*point.place)] = point
                    self._save()

    def _look(self, turns: Turns) -> None:
        """Adopt another rank's result; if it is overdue, settle for all ranks that there is none."""
        now = time.monotonic()
        if now < turns.looked + LOOK_S:
            return
        turns.looked = now
        try:
            result = job_results.published(turns.name)
            if not result and now > turns.since + PATIENCE_S:
                result = job_results.settled(turns.name, NOTHING)
            if result:
                turns.closed, turns.point = True, job_results.read(result)
        except RuntimeError:
            turns.closed = True

    def _close(self, turns: Turns, point: Point) -> None:
        """End turns with a result; in a job with the result that all ranks adopt."""
        turns.closed, turns.point = True, point if point.backends else None
        if turns.role:
            text = json.dumps(point.to_dict()) if point.backends else NOTHING
            try:
                turns.point = job_results.read(job_results.settled(turns.name, text))
            except RuntimeError:
                turns.point = None
        times = ", ".join(
            f"{name} {measured.gpu_us:.0f} us" for name, measured in point.backends.items() if measured.gpu_us
        )
        log.info("%s: %s: %s", NAME, point.kind, times)

    def _read(self) -> tuple[Point, ...]:
        try:
            if self._file is not None and self._file.is_file():
                return load(self._file).points
        except (AttnregError, OSError) as error:
            log.warning('what policy = "adaptive" measured earlier isn\'t used: %s', error)
        return ()

    def _save(self) -> None:
        """Write all known times, merged with times that other processes have added meanwhile."""
        if self._file is None:
            return
        try:
            caches.make(self._file.parent)
            with locks.rewriting(self._file, seconds=1.0):
                for point in self._read():
                    self.known.setdefault(cell_of(*point.place), point)
                Table(self.environment, tuple(self.known.values()), self._file.name).save(self._file)
        except OSError as error:
            log.info('what policy = "adaptive" has measured can\'t be kept: %s', error)
            self._file = None


_learned: dict[str, Learned] = {}
_keeps = True


@contextlib.contextmanager
def from_nothing() -> Iterator[None]:
    """Start without known times, and save none: for tests and benchmarks."""
    global _learned, _keeps
    before = _learned, _keeps
    _learned, _keeps = {}, False
    try:
        yield
    finally:
        _learned, _keeps = before


class AdaptiveTimes:
    """The policy, as `selection.protocols.Adaptive`, for one state of the registry and the settings.

    `disabled` are names of backends that get no turns. Times are kept separately for each set of disabled
    backends, so that a backend gets its turns when it is enabled later.
    """

    def __init__(
        self, tables: NamedTables, entries: Callable[[], Mapping[str, Entry]], disabled: Iterable[str] = ()
    ) -> None:
        self._tables, self._entries, self._disabled = tables, entries, sorted(disabled)
        self._environments: dict[Device, tuple[str, Environment]] = {}

    def predict(
        self, spec: AttentionSpec, direction: Direction, builders: frozenset[str] = frozenset()
    ) -> Prediction | None:
        """Return the measured times of such calls; before all turns are over, a table's prediction."""
        by_table = self._tables.predict(spec.of(direction), direction, builders)
        spec = spec.unscaled.of(direction)  # see `turn`
        if not _may_have_turns(spec):
            return by_table
        here = self._here(spec.device)
        with lock:
            points = {way: here.point_of(spec, way) for way in DIRECTIONS}
        if points[direction] is None:
            return by_table
        kinds = Kinds(point for point in points.values() if point is not None)
        table = self._tables.report(spec.device).in_force
        if table is not None:
            kinds.fronts = table.kinds.fronts
        if spec.needs_backward and None not in points.values():
            prediction = predict_both(kinds, spec, NAME, self._tables.compiled, builders)[direction]
        else:
            prediction = predict(kinds, spec, direction, NAME, self._tables.compiled, builders)
        if prediction is None:
            return None
        # What a backend builds for a shape isn't in a turn's time. A table may know.
        candidates = tuple(x for x in prediction.candidates if x.backend.casefold() not in builders)
        return replace(prediction, candidates=candidates, notes=(), leads=True, rest=by_table)

    def cuts(self, device: Device) -> tuple[Cut, ...]:
        return CUTS

    def begin(self, spec: AttentionSpec, direction: Direction) -> None:
        if not spec.capturing and _may_have_turns(spec):
            learned = self._here(spec.device)
            with lock:
                learned.turns_of(spec.unscaled.of(direction), direction)
                learned.collect()

    def turn(
        self,
        spec: AttentionSpec,
        direction: Direction,
        able: Sequence[str],
        predicted: Prediction | None,
        left_out: frozenset[str] = frozenset(),
    ) -> TimedTurn | None:
        """Return the turn that a call is; None if it is none.

        Backends that are `able` to run the call, the first choice first, take turns, but for backends that a
        table puts far behind, and for backends that are `left_out`. The caller leaves out those that stand
        in for others, as the reference does: it may need too much memory.

        A turn without a backend is nobody's: the call runs as decided. A forward gets such turns, up to
        `MOST_CALLS`, if its own turns are over and its backward's aren't, because the fastest backend for
        both directions isn't known yet.

        Calls with options that results are rescaled for share the turns of calls without: in its turn no
        kernel gets these options, and its time ends before results are rescaled.
        """
        spec = spec.unscaled
        # What they build puts them far behind in a table. Their turns have to end all the same.
        building = [name for name in _worth_a_turn(able, predicted, left_out) if name.casefold() in left_out]
        names = [name for name in _worth_a_turn(able, predicted) if name not in building]
        if spec.capturing or not _may_have_turns(spec) or len(names) < 2:
            return None
        here = self._here(spec.device)
        with lock:
            turns = here.turns_of(spec.of(direction), direction)
            turns.leave_out(building)
            if turns.closed:
                waits = turns.point is not None and direction == "forward" and spec.needs_backward
                if not waits or turns.calls >= MOST_CALLS or here.is_over(spec.of("backward"), "backward"):
                    return None
                turns.calls += 1
                return TimedTurn(turns, "", spec)
            return TimedTurn(turns, "" if turns.role == "follows" else turns.next(names), spec)

    def notes(self, spec: AttentionSpec, direction: Direction) -> Iterator[str]:
        if spec.device.simulated:
            return
        spec = spec.unscaled.of(direction)
        here = self._here(spec.device)
        with lock:
            turns = here.turns.get(_cell(spec, direction))
            if turns is None or turns.closed or not turns.backends:
                return
            taken = ", ".join(f"{name} {count} of {turns.each}" for name, count in turns.counts.items())
            yield f'policy = "adaptive": turns taken by a {direction} like this one: {taken}'

    def _here(self, device: Device) -> Learned:
        """Return the times of this environment. Outside the lock it checks whether backends load."""
        if device not in self._environments:
            here = environment(device, self._entries())
            # Without the driver, because tables apply with any driver.
            known = repr((asdict(replace(here, driver="")), self._disabled))
            self._environments[device] = hashlib.sha256(known.encode()).hexdigest()[:12], here
        digest, here = self._environments[device]
        with lock:
            if digest not in _learned:
                file = None
                with contextlib.suppress(OSError):  # no home folder
                    if _keeps:
                        name = f"{Path(file_name(here.device)).stem}-{digest}.json"
                        file = caches.folder("adaptive") / name
                _learned[digest] = Learned(here, digest, file)
            return _learned[digest]


def _cell(spec: AttentionSpec, direction: Direction) -> Cell:
    return cell_of(kind_of(spec, direction), size_of(spec))


def _may_have_turns(spec: AttentionSpec) -> bool:
    """Whether backends may alternate at a call, and whether similar calls are likely to follow.

    Calls with pages, or a scale of 0 or less, have no turns: other, fewer backends can run them.
    """
    sizes = spec.batch, spec.max_q, spec.max_k, spec.heads_q, spec.tokens_q, spec.tokens_k
    special = (
        spec.deterministic or spec.dropout > 0.0 or spec.page_size is not None or not spec.positive_scale
    )
    return min(sizes) > 0 and not (special or spec.device.simulated)


def _worth_a_turn(
    able: Sequence[str], predicted: Prediction | None, alone: frozenset[str] = frozenset()
) -> list[str]:
    """Return the names that a table doesn't put far behind, or says nothing of.

    `alone` are names in lower case of backends whose kernel counts without what they build.
    """
    candidates = {name: predicted.of(name) if predicted else None for name in able}
    costs = {
        name: _kernel_cost(each) if name.casefold() in alone else each.cost_us
        for name, each in candidates.items()
        if each is not None
    }
    most = HOPELESS * min((cost for cost in costs.values() if cost is not None), default=0.0)
    behind = {name for name, cost in costs.items() if cost is None or cost > most}
    return [name for name in able if name not in behind]


def _kernel_cost(candidate: Candidate) -> float | None:
    """Return the microseconds of a call without what the backend builds; None if it must not be chosen."""
    return None if candidate.cost_us is None else max(candidate.gpu_us, candidate.host_us)
