"""What a table predicts for a call, from the nearest points of its family, and the order that follows. Pure.

Where a gradient is wanted, backends are ranked by what forward and backward take together, for both
directions: so one backend runs both. On an H100 two backends, each the fastest in its direction by the table,
weren't faster together than one.

All backends are predicted from the same points, weighted by the inverse square of their distance, in powers
of two of the sizes. A GPU time is scaled from a point to the call by the ratio of their work, in the way that
fits the backend's points best (`kinds.GROWTHS`); if the very call was measured, its own
time counts. A host time depends on how many kernels a call launches: it is that of a call of the same
`HOST_SHAPES` through its front (SDPA or `varlen_attn`), where that was measured.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import dist, exp, log
from typing import Any, NamedTuple

from attnreg.core.contract.spec import AttentionSpec, Direction
from attnreg.tools.tuning.index import EXACT, Index, Kinds
from attnreg.tools.tuning.kinds import Kind, coordinates, family_of, host_shapes_of, kind_of, size_of, works
from attnreg.tools.tuning.points import Measured, Point

# The time of the first call of a shape is spread over this many calls: a training run's.
CALLS_PER_SHAPE = 100_000

# Tables have the least host time. Hosts run at half their speed for seconds at a time, and in four runs of
# `attnreg bench selection`, factors of 1.15 to 1.5 chose best.
USUAL_HOST = 1.3

# A smaller difference is chance, and isn't worth another kernel's rounding. Host times are of one small call,
# and those of others differ more: of 150 and 97 random shapes on an H100, with its table and with an H200's,
# forwards took 1.056, 1.027, 1.056 and 1.037 times as long as with the best backend (1.075, 1.030, 1.089 and
# 1.041 with 0.02 for these, too).
MARGIN, HOST_MARGIN = 0.02, 0.1


@dataclass(frozen=True, slots=True)
class Candidate:
    """The predicted times of one backend.

    Attributes:
        backend: its name.
        cost_us: the larger of both times plus a share of the first call; in a CUDA graph the GPU time
            alone. None if it must not be chosen.
        gpu_us, host_us: microseconds.
        first_call_s: seconds of the first call of a new shape.
        trouble: why it must not be chosen: its results were wrong, or it failed.
        both_us: what forward and backward cost together, where a gradient is wanted and the table has times
            of both. If it has none of this backend's other direction, that of the first choice counts.
        by_host: whether the host's part of what it is ranked by is larger than the GPU's, and counts.
    """

    backend: str
    cost_us: float | None = None
    gpu_us: float = 0.0
    host_us: float = 0.0
    first_call_s: float = 0.0
    trouble: str = ""
    both_us: float | None = None
    by_host: bool = False

    @property
    def rank_us(self) -> float | None:
        """What backends are ranked by; None if it must not be chosen."""
        return self.cost_us if self.both_us is None else self.both_us


class Source(NamedTuple):
    """A point that a prediction comes from, at a distance in powers of two.

    `same_ratio` says whether it has the call's ratio of heads, `itself` whether this very call was measured.
    """

    point: Point
    same_ratio: bool
    distance: float
    itself: bool

    @property
    def size(self) -> str:
        """Its size as text, built only for explanations."""
        ratio = "" if self.same_ratio else f", {self.point.kind.ratio}:1 heads"
        return f"{self.point.size}{ratio}"


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a table predicts for one direction of a call.

    Attributes:
        table: the table's name and origin.
        candidates: the measured backends, the fastest first, those with trouble last.
        points: the points used, the nearest first.
        notes: reasons why the prediction may be inexact.
        leads: whether a backend that it doesn't know comes behind those that it does, and not in its place in
            the default order. rest: what orders these, if anything does.
    """

    table: str
    candidates: tuple[Candidate, ...]
    points: tuple[Source, ...] = ()
    notes: tuple[str, ...] = ()
    leads: bool = False
    rest: Prediction | None = None

    def of(self, backend: str) -> Candidate | None:
        """Return the prediction for a backend; the case of its name doesn't matter."""
        name = backend.casefold()
        return next((one for one in self.candidates if one.backend.casefold() == name), None)

    def to_dict(self) -> dict[str, Any]:
        """Return the same as plain data, for JSON."""
        points = [{"size": one.size, "distance": one.distance} for one in self.points]
        rest = self.rest and self.rest.to_dict()
        return {**asdict(replace(self, points=(), rest=None)), "points": points, "rest": rest}


def predict(
    kinds: Kinds,
    spec: AttentionSpec,
    direction: Direction,
    table: str,
    compiled: bool = False,
    builders: frozenset[str] = frozenset(),
) -> Prediction | None:
    """Return the prediction for one direction of a call; None if no family of the table covers its kind.

    `compiled` says whether the compiled call cache is in use: the host takes less time with it. `builders`
    are names in lower case of backends that build something for each new shape, in a program that brings ever
    new shapes: the time of a shape's first call counts in full then.
    """
    kind, size = kind_of(spec, direction), size_of(spec)
    index = kinds.index_for(kind, size.max_q)
    if index is None or not size.batch or not size.heads_q:
        return None
    at = coordinates(kind, size)
    inside, outside = index.clamped(at)
    near = index.nearest(inside, (kind, size))
    names = dict.fromkeys(name for _, place in near for name in place.point.backends)
    shapes = host_shapes_of(kind._replace(extras=index.family.extras), size)  # of calls as measured
    hosts = _hosts(kinds, kind, names, compiled, direction == "backward" or spec.needs_backward, shapes)
    amounts, found = works(kind, size, kinds.processors), []
    for name in names:
        growth = kinds.growth_of(name, index.family, size.max_q)
        near_it = [
            (distance, place.works[growth], place.point.backends[name])
            for distance, place in near
            if name in place.point.backends
        ]
        found.append(
            _candidate(
                name,
                index,
                kind.ratio,
                near_it,
                amounts[growth],
                hosts[name],
                spec.capturing,
                1 if name.casefold() in builders else CALLS_PER_SHAPE,
            )
        )
    notes = [f"outside the measured range, its edge decides: {where}" for where in outside]
    if index.family != family_of(kind):
        without = ", without sinks" * (kind.extras.count("sinks") > index.family.extras.count("sinks"))
        notes.insert(0, f"nothing of this kind was measured; these are of {index.family}{without}")
    points = tuple(
        Source(point, point.kind.ratio == kind.ratio, dist(place, at) if outside else distance, itself)
        for distance, (place, point, _) in near
        for itself in (distance < EXACT and point.place == (kind, size),)
    )
    return Prediction(table, _ranked(found), points, tuple(notes))


def predict_both(
    kinds: Kinds,
    spec: AttentionSpec,
    table: str,
    compiled: bool = False,
    builders: frozenset[str] = frozenset(),
) -> dict[Direction, Prediction | None]:
    """Return the predictions for a call whose gradient is wanted: each ranks by what both directions take."""
    forward, backward = (
        predict(kinds, spec.of(direction), direction, table, compiled, builders)
        for direction in ("forward", "backward")
    )
    return {"forward": _with(forward, backward), "backward": _with(backward, forward)}


def _with(one: Prediction | None, other: Prediction | None) -> Prediction | None:
    """Return the prediction of one direction, ranked by what it takes with the other direction."""
    others = [found for found in other.candidates if found.cost_us is not None] if other else []
    if one is None or not others:
        return one
    costs = {found.backend: found.cost_us for found in one.candidates}

    def together(rest: Candidate) -> tuple[bool, float]:
        own = costs.get(rest.backend)
        return own is None, (own or 0.0) + (rest.cost_us or 0.0)

    first, found = min(others, key=together), []
    for candidate in one.candidates:
        if candidate.cost_us is not None:
            rest = next((other for other in others if other.backend == candidate.backend), first)
            host, gpu = candidate.host_us + rest.host_us, candidate.gpu_us + rest.gpu_us
            both = candidate.cost_us + (rest.cost_us or 0.0)
            times = candidate.cost_us, candidate.gpu_us, candidate.host_us, candidate.first_call_s
            candidate = Candidate(candidate.backend, *times, both_us=both, by_host=gpu < host <= both)
        found.append(candidate)
    return Prediction(one.table, _ranked(found), one.points, one.notes)


def _ranked(found: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Return the fastest first, and last those that must not be chosen."""
    return tuple(sorted(found, key=lambda one: (one.rank_us is None, one.rank_us or 0.0)))


def _hosts(
    kinds: Kinds, kind: Kind, names: Iterable[str], compiled: bool, recorded: bool, shapes: Sequence[str]
) -> dict[str, float | None]:
    """Return the host time of a call through its front for each backend, or None for all if one has none.

    All or none, because calling a kernel's function directly takes less, and the compiled call
    cache less than Python. A backend that can't run a shape's example, as efficient can't where heads
    share keys, has the time of the next shape and doesn't keep the others from theirs.
    """
    # Older tables have neither times of calls that autograd doesn't record nor of other shapes.
    for routers, way in product((True, False) if compiled else (False,), (recorded, True)):
        place = kind.varlen, kind.direction, routers, way
        times = {name: [kinds.fronts.get((name, *place, like)) for like in shapes] for name in names}
        found = {name: next(filter(None, of_shapes), None) for name, of_shapes in times.items()}
        if None not in found.values():
            return {name: host * USUAL_HOST for name, host in found.items() if host is not None}
    return dict.fromkeys(names)


def _candidate(
    name: str,
    index: Index,
    ratio: int,
    known: Sequence[tuple[float, float, Measured]],
    amount: float,
    host: float | None,
    capturing: bool,
    calls_per_shape: int,
) -> Candidate:
    # Whether it fails depends on the size, as it may run out of memory: the nearest point that has it
    # decides.
    closest = known[0][2]
    if trouble := index.wrong_with(name, ratio) or closest.trouble:
        return Candidate(name, trouble=trouble)
    floor = index.floors[name]
    gpu = _mean(
        [
            (floor + (found.gpu_us - floor) * amount / measured, 1.0 / max(distance, EXACT) ** 2)
            for distance, measured, found in known
            if found.gpu_us is not None
        ]
    )
    if host is None:
        host = closest.host_us if known[0][0] < EXACT else index.hosts[name]
    first = index.first_calls[name]
    cost = gpu if capturing else max(gpu, host) + first * 1e6 / calls_per_shape
    return Candidate(name, cost, gpu, host, first, by_host=gpu < host <= cost)


def _mean(weighted: Sequence[tuple[float, float]]) -> float:
    """Return the weighted geometric mean, as times differ by factors; exact for a single number."""
    if len(weighted) == 1:
        return weighted[0][0]
    total = sum(weight for _, weight in weighted)
    return exp(sum(log(max(number, 1e-3)) * weight for number, weight in weighted) / total)


def with_sources(
    order: Sequence[str], able: Container[str], prediction: Prediction | None, default: str
) -> dict[str, str]:
    """Return the order of backends where none is preferred, each with the source of its position."""
    if prediction is None:
        return dict.fromkeys(order, default)
    known = {one.backend.casefold() for one in prediction.candidates if one.rank_us is not None}
    others = with_sources(order, able, prediction.rest, default)
    return {
        name: prediction.table if name in known else others[name]
        for name in reordered(order, able, prediction)
    }


def reordered(default: Sequence[str], able: Container[str], prediction: Prediction) -> list[str]:
    """Return names in lower case, the first choice first.

    The measured backends are ordered by cost among the positions that they have by default; one that wasn't
    measured keeps its position, unless the prediction `leads`. Those that were wrong or failed come last.
    """
    known = {name: one for name in default if (one := prediction.of(name)) is not None}
    costs = {name: one.rank_us for name, one in known.items() if one.rank_us is not None}
    best = min((cost for name, cost in costs.items() if name in able), default=0.0)
    # Of those that are as fast as the best, chance aside, the first by default.
    first = next(
        (name for name, cost in costs.items() if name in able and cost <= _within(best, known[name])), None
    )
    by_cost = sorted(costs, key=lambda name: (name != first, costs[name]))
    failed = [name for name in known if name not in costs]
    if prediction.leads:
        others = default if prediction.rest is None else reordered(default, able, prediction.rest)
        return [*by_cost, *(name for name in others if name not in known), *failed]
    places = iter(by_cost)
    kept = [next(places) if name in costs else name for name in default if name in costs or name not in known]
    return kept + failed


def _within(best: float, one: Candidate) -> float:
    """Return up to which cost a candidate is as fast as the best, chance aside."""
    return best * (1 + (HOST_MARGIN if one.by_host else MARGIN))
