"""The predicted times of backends for one direction of a call, and the order of backends that follows. Pure.

Tables and the policy "adaptive" make predictions (`core/times/`); decisions read them.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from typing import Any, Protocol

from attnreg.core.settings.environment import REFERENCE

# A smaller difference is chance, and isn't worth another kernel's rounding. Host times are measured at a
# small call, and other calls differ more. By the times of 511 random shapes on an H100 and 180 on an H200,
# margins of 0.03 and 0.05 for host times choose alike. With 0.1 calls take up to 0.4 % longer, and up to
# 1.7 % if the table's host times were measured in fewer rounds.
MARGIN, HOST_MARGIN = 0.02, 0.05

# The farther the measured calls, the less a lead says. For each power of two of the distance so much more of
# it is chance, up to the second number. By the times of 985 random shapes no run of `selection.md` loses more
# so, and 31 forwards lose over 15 % in place of 33.
DISTANCE_MARGIN, MOST_MARGIN = 0.06, 0.10

# How many times a measured kernel's time an unmeasured kernel is assumed to take, where the measured kernel
# builds something for each new shape. Torch's efficient kernel takes twice cuDNN's time without building
# (`docs/results/fresh.md`). Building takes cuDNN 50 ms, as long as a thousand small calls.
UNMEASURED = 10.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """The predicted times of one backend.

    Attributes:
        backend: its name.
        cost_us: the larger of both times plus a share of the first call; in a CUDA graph the GPU time
            alone. None if it must not be chosen.
        gpu_us, host_us: microseconds; `host_us` is 0 in a CUDA graph, and on a CPU.
        first_call_s: seconds of the first call of a new shape.
        trouble: why it must not be chosen: its results were wrong, or it failed.
        both_us: what forward and backward cost together, where a gradient is wanted and the table has times
            of both. If the table lacks the backend's other direction, the time of the first choice counts.
        by_host: whether the rank counts the host's time, because it is larger than the GPU's.
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


class Source(Protocol):
    """A measured call that a prediction comes from."""

    @property
    def size(self) -> str:
        """Its lengths and heads, as text."""

    @property
    def distance(self) -> float:
        """How far it is from the call, in powers of two of the sizes."""

    @property
    def itself(self) -> bool:
        """Whether it is the very call."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a table predicts for one direction of a call.

    Attributes:
        table: the table's name and origin.
        candidates: the measured backends, the fastest first, those with trouble last.
        points: the points used, the nearest first.
        notes: reasons why the prediction may be inexact.
        building: the backends whose times include what they build for each new shape, in lower case.
        leads: whether backends without times come behind the measured backends, and not in their place in the
            default order. rest: what orders backends without times, if anything does.
    """

    table: str
    candidates: tuple[Candidate, ...]
    points: tuple[Source, ...] = ()
    notes: tuple[str, ...] = ()
    building: frozenset[str] = frozenset()
    leads: bool = False
    rest: Prediction | None = None

    def of(self, backend: str) -> Candidate | None:
        """Return the prediction for a backend; the case of its name doesn't matter."""
        name = backend.casefold()
        return next(
            (candidate for candidate in self.candidates if candidate.backend.casefold() == name), None
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the same as plain data, for JSON."""
        points = [{"size": point.size, "distance": point.distance} for point in self.points]
        rest = self.rest and self.rest.to_dict()
        plain = asdict(replace(self, points=(), rest=None))
        return plain | {"points": points, "rest": rest, "building": sorted(self.building)}


def with_sources(
    order: Sequence[str], able: Container[str], prediction: Prediction | None, default: str
) -> dict[str, str]:
    """Return the order of backends where none is preferred, each with the source of its position."""
    if prediction is None:
        return dict.fromkeys(order, default)
    known = {
        candidate.backend.casefold() for candidate in prediction.candidates if candidate.rank_us is not None
    }
    others = with_sources(order, able, prediction.rest, default)
    return {
        name: prediction.table if name in known else others[name]
        for name in reordered(order, able, prediction)
    }


def reordered(default: Sequence[str], able: Container[str], prediction: Prediction) -> list[str]:
    """Return names in lower case, the first choice first.

    Measured backends are ordered by cost among the positions that they have by default. A backend without
    times keeps its position, unless the prediction `leads`. Backends that were wrong or failed come last. The
    first choice may build for each new shape for longer than an unmeasured backend is assumed to take. Then
    it goes behind that backend. The reference, which is slow without a limit, and backends behind it don't
    count as unmeasured here.
    """
    names = _by_cost(default, able, prediction)
    first = next((name for name in names if name in able), None)
    chosen = None if first is None else prediction.of(first)
    if first is None or chosen is None or first not in prediction.building or not _builds_long(chosen):
        return names
    before = takewhile(lambda name: name != REFERENCE, default)
    unmeasured = (name for name in before if name in able and prediction.of(name) is None)
    if (other := next(unmeasured, None)) is None:
        return names
    names.remove(other)
    names.insert(names.index(first), other)
    return names


def _builds_long(candidate: Candidate) -> bool:
    alone = max(candidate.gpu_us, candidate.host_us)
    return candidate.cost_us is not None and candidate.cost_us > UNMEASURED * alone


def _by_cost(default: Sequence[str], able: Container[str], prediction: Prediction) -> list[str]:
    known = {name: candidate for name in default if (candidate := prediction.of(name)) is not None}
    costs = {name: candidate.rank_us for name, candidate in known.items() if candidate.rank_us is not None}
    # Whether a backend can run the call is asked of as few as possible: that takes longer than all else here.
    best = next((known[name] for name in sorted(costs, key=costs.__getitem__) if name in able), None)
    level = (
        known[name]
        for name in costs
        if best is not None and _is_level(known[name], best, prediction) and name in able
    )
    first = min(level, key=_host_alone, default=None)
    by_cost = sorted(costs, key=lambda name: (known[name] is not first, costs[name]))
    failed = [name for name in known if name not in costs]
    if prediction.leads:
        others = default if prediction.rest is None else reordered(default, able, prediction.rest)
        return [*by_cost, *(name for name in others if name not in known), *failed]
    places = iter(by_cost)
    kept = [next(places) if name in costs else name for name in default if name in costs or name not in known]
    return kept + failed


def _host_alone(candidate: Candidate) -> float:
    """Return the host time of a call without a gradient, by which candidates as fast as the best are ordered.

    A busy or slow host makes the larger one count. In a CUDA graph and on a CPU it is 0 for all, so that the
    first by default runs. With a gradient that is the better choice, by the recorded runs of
    `docs/results/selection.md`.
    """
    return candidate.host_us if candidate.both_us is None else 0.0


def _cost(candidate: Candidate) -> float:
    """Return what a candidate that may be chosen is ranked by."""
    return candidate.rank_us or 0.0


def _is_level(candidate: Candidate, best: Candidate, prediction: Prediction) -> bool:
    """Whether a candidate is as fast as the best, chance aside.

    Far from the measured calls more counts as chance, if the candidate takes the host less. Its GPU time has
    to be level, too: on a fast host that is what a call takes.
    """
    if _cost(candidate) <= _cost(best) * (1 + (HOST_MARGIN if candidate.by_host else MARGIN)):
        return True
    distance = min((point.distance for point in prediction.points), default=0.0)
    most = 1 + min(MARGIN + DISTANCE_MARGIN * distance, MOST_MARGIN)
    times = (_cost(candidate), _cost(best)), (candidate.gpu_us, best.gpu_us)
    return _host_alone(candidate) < _host_alone(best) and all(own <= most * least for own, least in times)
