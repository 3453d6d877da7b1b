"""What a table predicts for a call: times of each backend, from the nearest points of its kind. Pure.

The points that are used are the same for all backends, and each counts by one over its distance, in
powers of two of the sizes. A GPU time is carried from a point to the call by the ratio of their
work; a host time is taken as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import dist, exp, log
from typing import TYPE_CHECKING

from attnreg.tuning.kinds import coordinates, kind_of, size_of, work

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attnreg.discovery import Direction
    from attnreg.spec import AttentionSpec
    from attnreg.tuning.index import Index, Kinds, Near
    from attnreg.tuning.points import Measured

__all__ = ["Candidate", "Prediction", "Source", "predict"]

# What the first call of a shape takes is spread over so many: a training run's, for one shape.
CALLS_PER_SHAPE = 100_000


@dataclass(frozen=True, slots=True)
class Candidate:
    """What one backend is predicted to take.

    Attributes:
        backend: its name.
        cost_us: what it is ranked by: the larger of both times and its share of the first call; in
            a CUDA graph the GPU time alone. None if it must not be chosen.
        gpu_us, host_us: microseconds.
        first_call_s: seconds of the first call of a new shape.
        trouble: why it must not be chosen: it was wrong, or failed.
    """

    backend: str
    cost_us: float | None = None
    gpu_us: float = 0.0
    host_us: float = 0.0
    first_call_s: float = 0.0
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Source:
    """A point that a prediction comes from; the distance is in powers of two."""

    size: str
    distance: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a table says of one direction of a call.

    Attributes:
        table: which one, in words.
        candidates: the measured backends, the fastest first, those in trouble last.
        points: what it comes from, the nearest first.
        notes: what isn't as exact as one might wish.
    """

    table: str
    candidates: tuple[Candidate, ...]
    points: tuple[Source, ...] = ()
    notes: tuple[str, ...] = ()

    def of(self, backend: str) -> Candidate | None:
        """Return what is said of a backend, whatever its name's case."""
        name = backend.casefold()
        return next((one for one in self.candidates if one.backend.casefold() == name), None)


def predict(kinds: Kinds, spec: AttentionSpec, direction: Direction, table: str) -> Prediction | None:
    """Return what the points say of a call; None where they say nothing of its kind."""
    kind, size = kind_of(spec, direction), size_of(spec)
    index = kinds.speaking_of(kind)
    if index is None or not size.batch or not size.heads_q:
        return None
    at = coordinates(size)
    inside, outside = index.clamped(at)
    near = index.nearest(inside)
    todo = work(kind, size)
    names = dict.fromkeys(name for one in near for name in one.place.point.backends)
    found = [_candidate(name, index, near, todo, spec.capturing) for name in names]
    found.sort(key=lambda one: (one.cost_us is None, one.cost_us or 0.0))
    notes = [f"nothing of this kind was measured; these are of {index.kind}"] if index.kind != kind else []
    notes += [f"outside the measured range, its edge decides: {where}" for where in outside]
    points = tuple(Source(str(one.place.point.size), dist(one.place.at, at)) for one in near)
    return Prediction(table, tuple(found), points, tuple(notes))


def _candidate(name: str, index: Index, near: list[Near], todo: float, capturing: bool) -> Candidate:
    # The nearest point that knows it says whether it failed; it may fail where there is no memory for it.
    closest = next(one.place.point.backends[name] for one in near if name in one.place.point.backends)
    if trouble := index.wrong.get(name) or closest.trouble:
        return Candidate(name, trouble=trouble)
    floor, timed = index.floors[name], list(_timed(name, near))
    gpu = _mean(
        (floor + (one.gpu_us - floor) * todo / there, weight) for one, there, weight in timed if one.gpu_us
    )
    host = _mean((one.host_us, weight) for one, _, weight in timed)
    first = index.building[name]
    cost = gpu if capturing else max(gpu, host) + first * 1e6 / CALLS_PER_SHAPE
    return Candidate(name, cost, gpu, host, first)


def _timed(name: str, near: list[Near]) -> Iterator[tuple[Measured, float, float]]:
    """Yield what was measured of a backend, the work of that point, and how much it counts."""
    for one in near:
        found = one.place.point.backends.get(name)
        if found is not None and found.gpu_us is not None:
            yield found, one.place.work, 1.0 / max(one.distance, 1e-9)


def _mean(weighted: Iterator[tuple[float, float]]) -> float:
    """Return the weighted geometric mean: exact for a single number, as times differ by factors."""
    found = list(weighted)
    if len(found) == 1:
        return found[0][0]
    total = sum(weight for _, weight in found)
    return exp(sum(log(max(number, 1e-3)) * weight for number, weight in found) / total)
