"""The prediction of a table for a call, from the nearest points of its family. Pure.

If a gradient is wanted, both directions rank backends by the time of forward and backward together, so the
same backend runs both. On an H100 two backends, each the table's fastest in its direction, weren't faster
together than a single backend for both.

All backends are predicted from the same points, weighted by the inverse square of their distance, in powers
of two of the sizes. A GPU time is scaled from a point to the call by the ratio of their work, by the growth
that fits the backend's points best (`kinds.GROWTHS`). If this very call was measured, its own time counts. A
host time depends on how many kernels a call launches. It is the time of a call with the same entry of
`HOST_SHAPES` through the same front (SDPA or `varlen_attn`), if that was measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import dist, exp, log
from typing import NamedTuple

from attnreg.core.contract.spec import AttentionSpec, Direction
from attnreg.core.selection.predictions import Candidate, Prediction
from attnreg.core.times.index import EXACT, Index, Kinds
from attnreg.core.times.kinds import (
    RESCALED,
    Kind,
    Size,
    coordinates,
    family_of,
    host_shapes_of,
    kind_of,
    size_of,
    works,
)
from attnreg.core.times.points import Point

# The first call of a shape is spread over this many calls, as in a training run.
CALLS_PER_SHAPE = 100_000

# A usual host time as a multiple of a table's, which is the least. Hosts run at half their speed for seconds
# at a time. By the times of 691 random shapes on an H100 and an H200, 1.5 chose better than 1.3 and than 2.
USUAL_HOST = 1.5


class SourcePoint(NamedTuple):
    """A point that a prediction is made from.

    Attributes:
        point: the point.
        same_ratio: whether it has the call's ratio of heads.
        distance: its distance from the call, in powers of two.
        itself: whether it is this very call.
    """

    point: Point
    same_ratio: bool
    distance: float
    itself: bool

    @property
    def size(self) -> str:
        """Its size as text, for explanations."""
        ratio = "" if self.same_ratio else f", {self.point.kind.ratio}:1 heads"
        return f"{self.point.size}{ratio}"


def predict(
    kinds: Kinds,
    spec: AttentionSpec,
    direction: Direction,
    table: str,
    compiled: bool = False,
    builders: frozenset[str] = frozenset(),
) -> Prediction | None:
    """Return the prediction for one direction of a call; None if no family of the table covers its kind.

    Args:
        kinds: the families of the table.
        spec: the call.
        direction: the direction to predict.
        table: the table's name, for messages.
        compiled: whether the compiled call cache is in use, with which the host takes less time.
        builders: names, in lower case, of backends that build something for each new shape, if the program
            always has new shapes. The first call of a shape then counts in full.
    """
    kind, size = kind_of(spec, direction), size_of(spec)
    index = kinds.index_for(kind, size.max_q)
    if index is None or not size.batch or not size.heads_q:
        return None
    at = coordinates(kind, size)
    inside, outside = index.clamped(at)
    near = index.nearest(inside, (kind, size))
    shapes = host_shapes_of(kind._replace(extras=index.family.extras), size)  # of calls as measured
    ways = compiled, direction == "backward" or spec.needs_backward
    look_up = _LookUp(kind, size, index, near, spec.capturing, builders)
    candidates = _candidates(kinds, look_up, ways, shapes)
    notes = [f"outside the measured range, its edge decides: {where}" for where in outside]
    if index.family != family_of(kind):
        notes.insert(0, f"nothing of this kind was measured; these are of {_named(index.family, kind)}")
    points = tuple(
        SourcePoint(point, point.kind.ratio == kind.ratio, dist(own, at) if outside else distance, itself)
        for distance, number in near
        for own, point, _ in (index.places[number],)
        for itself in (distance < EXACT and point.place == (kind, size),)
    )
    return Prediction(table, _ranked(candidates), points, tuple(notes), builders)


class _LookUp(NamedTuple):
    """A call, and what its prediction is made from.

    Attributes:
        kind, size: its place in a table.
        family, near: the points of its family, and distances and numbers of the nearest.
        capturing: whether a CUDA graph is captured.
        builders: as for `predict`.
    """

    kind: Kind
    size: Size
    family: Index
    near: Sequence[tuple[float, int]]
    capturing: bool
    builders: frozenset[str]


def _candidates(
    kinds: Kinds, look_up: _LookUp, ways: tuple[bool, bool], shapes: Sequence[str]
) -> Iterator[Candidate]:
    """Yield the times of each backend that has any near a call; `ways` and `shapes` are as for `_hosts`."""
    index, points = look_up.family, [look_up.family.places[number].point for _, number in look_up.near]
    names = dict.fromkeys(name for point in points for name in point.backends)
    hosts = _hosts(kinds, look_up.kind, names, ways, shapes)
    amounts = works(look_up.kind, look_up.size, kinds.processors)
    # All backends share the weights: what follows takes most of a look-up's time.
    weights = [(1.0 / max(distance, EXACT) ** 2, number) for distance, number in look_up.near]
    for name in names:
        # Failures depend on the size, for instance by lack of memory, so the backend's nearest point decides.
        closest = next(point.backends[name] for point in points if name in point.backends)
        if trouble := index.wrong_with(name, look_up.kind.ratio) or closest.trouble:
            yield Candidate(name, trouble=trouble)
            continue
        growth = kinds.growth_of(name, index.family, look_up.size.max_q)
        gpu = _gpu_us(weights, index.growing(name, growth), amounts[growth], index.floors[name])
        host = hosts[name]
        if host is None:
            host = closest.host_us if look_up.near[0][0] < EXACT else index.hosts[name]
        yield _candidate(look_up, name, gpu, host)


def _candidate(look_up: _LookUp, name: str, gpu: float, host: float) -> Candidate:
    first = look_up.family.first_calls[name]
    share = first if name.casefold() in look_up.builders else first / CALLS_PER_SHAPE
    # In a CUDA graph the host doesn't count, so that it orders no backends that are as fast.
    if look_up.capturing:
        return Candidate(name, gpu, gpu, 0.0, first)
    cost = max(gpu, host) + share * 1e6
    return Candidate(name, cost, gpu, host, first, by_host=gpu < host)


def _named(family: Kind, kind: Kind) -> str:
    """Return a family as text, with what results are rescaled for in calls of a kind, but not in its own."""
    lacking = sorted(RESCALED.intersection(kind.extras).difference(family.extras))
    return ", without ".join((str(family), *lacking))


def predict_both(
    kinds: Kinds,
    spec: AttentionSpec,
    table: str,
    compiled: bool = False,
    builders: frozenset[str] = frozenset(),
) -> dict[Direction, Prediction | None]:
    """Return the predictions for a call with a gradient; each ranks by the time of both directions."""
    forward, backward = (
        predict(kinds, spec.of(direction), direction, table, compiled, builders)
        for direction in ("forward", "backward")
    )
    return {"forward": _with(forward, backward), "backward": _with(backward, forward)}


def _with(own: Prediction | None, other: Prediction | None) -> Prediction | None:
    """Return the prediction `own`, ranked by the time together with the other direction."""
    others = [rest for rest in other.candidates if rest.cost_us is not None] if other else []
    if own is None or not others:
        return own
    costs = {candidate.backend: candidate.cost_us for candidate in own.candidates}

    def together(rest: Candidate) -> tuple[bool, float]:
        cost = costs.get(rest.backend)
        return cost is None, (cost or 0.0) + (rest.cost_us or 0.0)

    first, candidates = min(others, key=together), []
    for candidate in own.candidates:
        if candidate.cost_us is not None:
            rest = next((other for other in others if other.backend == candidate.backend), first)
            host, gpu = candidate.host_us + rest.host_us, candidate.gpu_us + rest.gpu_us
            both = candidate.cost_us + (rest.cost_us or 0.0)
            times = candidate.cost_us, candidate.gpu_us, candidate.host_us, candidate.first_call_s
            candidate = Candidate(candidate.backend, *times, both_us=both, by_host=gpu < host <= both)
        candidates.append(candidate)
    return replace(own, candidates=_ranked(candidates))


def _ranked(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Sort candidates, the fastest first, and last the candidates that must not be chosen."""
    return tuple(sorted(candidates, key=lambda x: (x.rank_us is None, x.rank_us or 0.0)))


def _hosts(
    kinds: Kinds, kind: Kind, names: Iterable[str], ways: tuple[bool, bool], shapes: Sequence[str]
) -> dict[str, float | None]:
    """Return the host time of a call through its front for each backend, or None for all if any has none.

    `ways` are whether the compiled call cache is in use, and whether autograd records the call. `shapes` are
    entries of `HOST_SHAPES`, the nearest first.

    All or none, because times of different ways can't be compared: calling a kernel's function directly takes
    less than a front, and the compiled call cache less than Python. A backend that can't run a shape's
    example has the time of the next shape; the other backends keep theirs. (An example is efficient, where
    heads share keys.)
    """
    compiled, recorded = ways
    # Older tables lack times of calls that autograd doesn't record, and of other shapes.
    for routers, way in product((True, False) if compiled else (False,), (recorded, True)):
        place = kind.varlen, kind.direction, routers, way
        times = {name: [kinds.fronts.get((name, *place, like)) for like in shapes] for name in names}
        host_times = {name: next(filter(None, of_shapes), None) for name, of_shapes in times.items()}
        if None not in host_times.values():
            return {name: host * USUAL_HOST for name, host in host_times.items() if host is not None}
    return dict.fromkeys(names)


def _gpu_us(
    weights: Sequence[tuple[float, int]],
    growing: Sequence[tuple[float, float] | None],
    amount: float,
    floor: float,
) -> float:
    """Return the GPU time by the times of near calls, scaled by the work, in microseconds.

    It is the weighted geometric mean, because times differ by factors; exact for a single time.
    """
    total = logarithms = number = 0.0
    count = 0
    for weight, place in weights:
        if (measured := growing[place]) is not None:
            above, work = measured
            number = floor + above * amount / work
            logarithms += log(max(number, 1e-3)) * weight
            total += weight
            count += 1
    return number if count == 1 else exp(logarithms / total)
