"""What a table predicts for a call: times of each backend, from the nearest points of its family. Pure.

The points that are used are the same for all backends, and each counts by one over the square of its
distance, in powers of two of the sizes. A GPU time is carried from a point to the call by the ratio of
their work; where the very call was measured it is what was measured there. A host time is next to the
same for all sizes: it is what a call through its front takes, where that was measured.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from math import dist, exp, log
from typing import TYPE_CHECKING, Any, NamedTuple

from attnreg.tuning.index import EXACT
from attnreg.tuning.kinds import coordinates, family_of, kind_of, size_of, work

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from attnreg.contract.spec import AttentionSpec, Direction
    from attnreg.tuning.index import Index, Kinds, Near
    from attnreg.tuning.kinds import Kind
    from attnreg.tuning.points import Point

__all__ = ["Candidate", "Prediction", "Source", "predict"]

# What the first call of a shape takes is spread over so many: a training run's, for one shape.
CALLS_PER_SHAPE = 100_000

# Of what the host takes a table has the least. Hosts work at half their speed for seconds on end, and by the
# times of four runs of `attnreg bench selection` 1.15 to 1.5 times that chose best.
USUAL_HOST = 1.3


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


class Source(NamedTuple):
    """A point that a prediction comes from.

    Attributes:
        point: the point.
        same_ratio: whether its ratio of heads is the call's.
        distance: how far it is, in powers of two.
        itself: whether it is the very call.
    """

    point: Point
    same_ratio: bool
    distance: float
    itself: bool

    @property
    def size(self) -> str:
        """Where it was measured, in words: only those who ask for an explanation pay for them."""
        ratio = "" if self.same_ratio else f", {self.point.kind.ratio}:1 heads"
        return f"{self.point.size}{ratio}"


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

    def to_dict(self) -> dict[str, Any]:
        """Return the same as plain data, for JSON."""
        points = [{"size": one.size, "distance": one.distance} for one in self.points]
        return {**asdict(replace(self, points=())), "points": points}


def predict(
    kinds: Kinds, spec: AttentionSpec, direction: Direction, table: str, compiled: bool = False
) -> Prediction | None:
    """Return what the points say of a call; None where they say nothing of its kind.

    `compiled` says whether the routers in use are: the host takes less then, where torch's kernels answer.
    """
    kind, size = kind_of(spec, direction), size_of(spec)
    index = kinds.speaking_of(kind)
    if index is None or not size.batch or not size.heads_q:
        return None
    at = coordinates(kind, size)
    inside, outside = index.clamped(at)
    near = index.nearest(inside, (kind, size))
    todo = work(kind, size)
    names = dict.fromkeys(name for one in near for name in one.place.point.backends)
    hosts = _hosts(kinds, kind, names, compiled)
    found = [_candidate(name, index, kind.ratio, near, todo, hosts[name], spec.capturing) for name in names]
    found.sort(key=lambda one: (one.cost_us is None, one.cost_us or 0.0))
    notes = [f"outside the measured range, its edge decides: {where}" for where in outside]
    if index.family != family_of(kind):
        notes.insert(0, f"nothing of this kind was measured; these are of {index.family}")
    points = tuple(
        Source(
            one.place.point,
            one.place.point.kind.ratio == kind.ratio,
            dist(one.place.at, at),
            one.place.point.place == (kind, size),
        )
        for one in near
    )
    return Prediction(table, tuple(found), points, tuple(notes))


def _hosts(kinds: Kinds, kind: Kind, names: Iterable[str], compiled: bool) -> dict[str, float | None]:
    """Return what a call through its front takes the host, all by the same measure; None if that isn't known.

    A kernel's own function takes it less, and compiled routers less than those in Python.
    """
    for routers in (True, False) if compiled else (False,):
        found = {name: kinds.fronts.get((name, kind.varlen, kind.direction, routers)) for name in names}
        if None not in found.values():
            return {name: host * USUAL_HOST for name, host in found.items() if host is not None}
    return dict.fromkeys(names)


def _candidate(
    name: str, index: Index, ratio: int, near: list[Near], todo: float, host: float | None, capturing: bool
) -> Candidate:
    # The nearest point that knows it says whether it failed; it may fail where there is no memory for it.
    closest = next(one.place.point.backends[name] for one in near if name in one.place.point.backends)
    if trouble := index.wrong_with(name, ratio) or closest.trouble:
        return Candidate(name, trouble=trouble)
    floor = index.floors[name]
    gpu = _mean(
        [
            (floor + (took - floor) * todo / one.place.work, 1.0 / max(one.distance, EXACT) ** 2)
            for one in near
            if (took := _gpu_us(one, name)) is not None
        ]
    )
    if host is None:
        host = closest.host_us if near[0].distance < EXACT else index.hosts[name]
    first = index.building[name]
    cost = gpu if capturing else max(gpu, host) + first * 1e6 / CALLS_PER_SHAPE
    return Candidate(name, cost, gpu, host, first)


def _gpu_us(near: Near, name: str) -> float | None:
    found = near.place.point.backends.get(name)
    return None if found is None else found.gpu_us


def _mean(weighted: Sequence[tuple[float, float]]) -> float:
    """Return the weighted geometric mean: exact for a single number, as times differ by factors."""
    if len(weighted) == 1:
        return weighted[0][0]
    total = sum(weight for _, weight in weighted)
    return exp(sum(log(max(number, 1e-3)) * weight for number, weight in weighted) / total)
