"""The policy "adaptive": backends take turns at the first calls of a kind, until the fastest is known.

As `cudnn.benchmark` does for convolutions, but on the calls that the program makes anyway. What was seen is a
measured table of the user's own, in the cache folder, one for each environment: a later process starts with
it. Calls belong together if they are of one kind and of nearly one size (`cell_of`).
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

from attnreg.core.contract.spec import AttentionSpec, Device, Direction
from attnreg.core.registry.entry import Entry
from attnreg.core.selection.predictions import Prediction
from attnreg.core.settings.environment import REFERENCE
from attnreg.core.times import job_results
from attnreg.core.times.environments import environment
from attnreg.core.times.index import Kinds
from attnreg.core.times.job_results import NOTHING
from attnreg.core.times.kinds import kind_of, size_of
from attnreg.core.times.lookup import predict, predict_both
from attnreg.core.times.points import Point
from attnreg.core.times.table import Environment, Table, load
from attnreg.core.times.tables import Tables, file_name
from attnreg.core.times.traces import DIRECTIONS
from attnreg.core.times.turns import MOST_CALLS, Cell, Turn, Turns, cell_of, lock
from attnreg.core.torchlib import caches, job_store, locks
from attnreg.errors import AttnregError

log = logging.getLogger("attnreg")

NAME = 'what policy = "adaptive" has seen'

# A backend that a measured table puts above so many times the best gets no turn.
HOPELESS = 2.0
# How long ranks wait for the one that measures, and how often they look.
PATIENCE_S, LOOK_S = 60.0, 0.5


class Learned:
    """What this process has seen in one environment, and what earlier ones have left in the cache folder.

    `digest` says which environment it is, alike on all ranks of a job.
    """

    def __init__(self, here: Environment, digest: str, file: Path | None) -> None:
        self.environment, self._digest, self._file = here, digest, file
        self.turns: dict[Cell, Turns] = {}
        self.known = {cell_of(*point.place): point for point in self._read()}

    def turns_of(self, spec: AttentionSpec, direction: Direction) -> Turns:
        """Return the turns that a call belongs to; new ones begin with what is known."""
        kind, size = kind_of(spec, direction), size_of(spec)
        cell = cell_of(kind, size)
        found = self.turns.get(cell)
        if found is None:
            name = f"{self._digest}/{hashlib.sha256(repr(cell).encode()).hexdigest()[:16]}"
            found = self.turns[cell] = Turns(kind, size, name, since=time.monotonic())
            if job_store.group_of_several() is not None:
                try:
                    found.role = "measures" if job_results.claim(name) else "follows"
                except RuntimeError:  # what the other ranks choose can't be known
                    found.closed = True
            if cell in self.known and found.role != "follows" and not found.closed:
                self._close(found, self.known[cell])
        return found

    def point_of(self, spec: AttentionSpec, direction: Direction) -> Point | None:
        """Return what was seen of such calls; None before all turns are over."""
        cell = cell_of(kind_of(spec, direction), size_of(spec))
        turns = self.turns.get(cell)
        return turns.point if turns is not None else self.known.get(cell)

    def is_over(self, spec: AttentionSpec, direction: Direction) -> bool:
        """Whether there are no further turns of such calls."""
        cell = cell_of(kind_of(spec, direction), size_of(spec))
        return self.turns[cell].closed if cell in self.turns else cell in self.known

    def collect(self) -> None:
        """Close the turns that are over."""
        for one in self.turns.values():
            if one.closed:
                continue
            if one.role == "follows":
                self._look(one)
                continue
            one.collect()
            if (point := one.result()) is not None:
                self._close(one, point)
                if point.backends and not one.failed:  # memory may be free, or a bug mended, the next time
                    self.known[cell_of(*point.place)] = point
                    self._save()

    def _look(self, one: Turns) -> None:
        """Take over what another rank has measured; without it in time, have all ranks go on without."""
        now = time.monotonic()
        if now < one.looked + LOOK_S:
            return
        one.looked = now
        try:
            found = job_results.published(one.name)
            if not found and now > one.since + PATIENCE_S:
                found = job_results.settled(one.name, NOTHING)
            if found:
                one.closed, one.point = True, job_results.read(found)
        except RuntimeError:
            one.closed = True

    def _close(self, one: Turns, point: Point) -> None:
        """End turns with a result; in a job with the one that all ranks take."""
        one.closed, one.point = True, point if point.backends else None
        if one.role:
            text = json.dumps(point.to_dict()) if point.backends else NOTHING
            try:
                one.point = job_results.read(job_results.settled(one.name, text))
            except RuntimeError:
                one.point = None
        times = ", ".join(
            f"{name} {seen.gpu_us:.0f} us" for name, seen in point.backends.items() if seen.gpu_us
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
        """Write all that is known, with what other processes have added meanwhile."""
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
    """Know nothing, and leave nothing behind: for tests and benchmarks."""
    global _learned, _keeps
    before = _learned, _keeps
    _learned, _keeps = {}, False
    try:
        yield
    finally:
        _learned, _keeps = before


class Adaptive:
    """The policy, for one state of the registry and the settings.

    `disabled` are names of backends that take no turns. What was seen is kept separately for each set
    of them: a backend that is enabled later has to have its turns.
    """

    def __init__(
        self, tables: Tables, entries: Callable[[], Mapping[str, Entry]], disabled: Iterable[str] = ()
    ) -> None:
        self._tables, self._entries, self._disabled = tables, entries, sorted(disabled)
        self._environments: dict[Device, tuple[str, Environment]] = {}

    def predict(
        self, spec: AttentionSpec, direction: Direction, builders: frozenset[str] = frozenset()
    ) -> Prediction | None:
        """Return the times that were seen of such calls; before all turns are over, what a table predicts."""
        by_table = self._tables.predict(spec.of(direction), direction, builders)
        spec = spec.without_sinks.of(direction)  # see `turn`
        if not _may_have_turns(spec):
            return by_table
        here = self._here(spec.device)
        with lock:
            points = {one: here.point_of(spec, one) for one in DIRECTIONS}
        if points[direction] is None:
            return by_table
        kinds = Kinds(point for point in points.values() if point is not None)
        table = self._tables.report(spec.device).in_force
        if table is not None:
            kinds.fronts = table.kinds.fronts
        if spec.needs_backward and None not in points.values():
            seen = predict_both(kinds, spec, NAME, self._tables.compiled, builders)[direction]
        else:
            seen = predict(kinds, spec, direction, NAME, self._tables.compiled, builders)
        return seen and replace(seen, notes=(), leads=True, rest=by_table)

    def begin(self, spec: AttentionSpec, direction: Direction) -> None:
        """Take the times that have come in, before a call is decided about."""
        if not spec.capturing and _may_have_turns(spec):
            found = self._here(spec.device)
            with lock:
                found.turns_of(spec.without_sinks.of(direction), direction)
                found.collect()

    def turn(
        self, spec: AttentionSpec, direction: Direction, able: Sequence[str], predicted: Prediction | None
    ) -> Turn | None:
        """Return the turn that a call is; None if it is none.

        Backends that are `able` to run it, the first choice first, take turns, but for the reference, which
        may need more memory than there is, and those that a table puts far behind. A turn without a backend
        is nobody's: what was decided holds for this call. So is a forward's whose own turns are over while
        those of its backward aren't, for so many calls: which backend takes least for both isn't known yet.
        Calls with sinks take the turns of those without: no kernel is given sinks in its turn, and its time
        is taken before results are rescaled.
        """
        spec = spec.without_sinks
        names = _worth_a_turn(able, predicted)
        if spec.capturing or not _may_have_turns(spec) or len(names) < 2:
            return None
        here = self._here(spec.device)
        with lock:
            turns = here.turns_of(spec.of(direction), direction)
            if turns.closed:
                waits = turns.point is not None and direction == "forward" and spec.needs_backward
                if not waits or turns.calls >= MOST_CALLS or here.is_over(spec.of("backward"), "backward"):
                    return None
                turns.calls += 1
                return Turn(turns, "", spec)
            return Turn(turns, "" if turns.role == "follows" else turns.next(names), spec)

    def notes(self, spec: AttentionSpec, direction: Direction) -> Iterator[str]:
        """Yield how far the turns of such calls are."""
        if spec.device.simulated:
            return
        spec = spec.without_sinks.of(direction)
        here = self._here(spec.device)
        with lock:
            turns = here.turns.get(cell_of(kind_of(spec, direction), size_of(spec)))
            if turns is None or turns.closed or not turns.backends:
                return
            taken = ", ".join(f"{name} {given} of {turns.each}" for name, given in turns.given.items())
            yield f'policy = "adaptive": turns taken by a {direction} like this one: {taken}'

    def _here(self, device: Device) -> Learned:
        """Return what was seen in this environment; not behind the lock: backends say whether they load."""
        if device not in self._environments:
            here = environment(device, self._entries())
            # Tables apply with any driver, too.
            known = repr((asdict(replace(here, driver="")), self._disabled))
            self._environments[device] = hashlib.sha256(known.encode()).hexdigest()[:12], here
        digest, here = self._environments[device]
        with lock:
            if digest not in _learned:
                file = None
                with contextlib.suppress(RuntimeError):  # no home folder
                    if _keeps:
                        name = f"{Path(file_name(here.device)).stem}-{digest}.json"
                        file = caches.folder("adaptive") / name
                _learned[digest] = Learned(here, digest, file)
            return _learned[digest]


def _may_have_turns(spec: AttentionSpec) -> bool:
    """Whether one backend may run a call today and another tomorrow, and whether it is one of many alike.

    Fewer backends take pages or a scale of 0 and less, and not those that take the same call without.
    """
    sizes = spec.batch, spec.max_q, spec.max_k, spec.heads_q, spec.tokens_q, spec.tokens_k
    special = (
        spec.deterministic or spec.dropout > 0.0 or spec.page_size is not None or not spec.positive_scale
    )
    return min(sizes) > 0 and not (special or spec.device.simulated)


def _worth_a_turn(able: Sequence[str], predicted: Prediction | None) -> list[str]:
    found = {name: predicted.of(name) if predicted else None for name in able if name != REFERENCE}
    costs = {name: one.cost_us for name, one in found.items() if one is not None}
    most = HOPELESS * min((cost for cost in costs.values() if cost is not None), default=0.0)
    return [name for name in found if name not in costs or 0 <= (costs[name] or most + 1) <= most]
