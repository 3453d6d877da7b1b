"""Whether a table that was measured elsewhere can be relied on: for `attnreg tune --check`. Needs no GPU.

Each point is left out in turn. The others predict its times, and choose a backend for it. What that one took
over what the fastest took, as the point itself measured both, is the table's *loss* there. GPU times count,
as in a CUDA graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from statistics import geometric_mean
from typing import Any, NamedTuple

from attnreg.core.contract.spec import AttentionSpec, Device, Direction
from attnreg.core.registry.entry import Entry
from attnreg.core.selection.predictions import MARGIN, Prediction, reordered
from attnreg.core.times.index import Kinds
from attnreg.core.times.kinds import PROCESSORS, family_of
from attnreg.core.times.lookup import predict
from attnreg.core.times.points import Point
from attnreg.core.times.table import Table

# Points of a family, with fewer of which there are no neighbours to predict from. The H200's table has 5.
LEAST_POINTS = 4
# How far a measured time may be from what its neighbours predict, as a factor; and how many may be farther.
FAR, MOST_FAR = 3.0, 0.02
# How many times the loss of the worst table that comes with attnreg.
MOST_LOSS = 2.0


class Outlier(NamedTuple):
    """A time that is far from what its neighbours predict, in microseconds."""

    call: str
    backend: str
    measured: float
    predicted: float


class Loss(NamedTuple):
    """Times of the chosen backends over those of the fastest: geometric mean, worst, and where that is."""

    mean: float
    worst: float
    where: str
    points: int


@dataclass(frozen=True, slots=True)
class Review:
    """What is found in a table.

    Attributes:
        problems: sentences that say why it mustn't ship; empty if it may.
        outliers: times that are far from what their neighbours predict, the farthest first.
        losses: by direction; one of which no two backends were measured isn't there.
        always: the loss of taking one backend always, by direction and backend.
    """

    problems: tuple[str, ...]
    outliers: tuple[Outlier, ...] = ()
    losses: dict[str, Loss] | None = None
    always: dict[str, dict[str, Loss]] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the same as plain data."""
        losses = {direction: one._asdict() for direction, one in (self.losses or {}).items()}
        return asdict(self) | {"outliers": [one._asdict() for one in self.outliers], "losses": losses}


def review(table: Table, entries: Mapping[str, Entry], shipped: Iterable[Review] = ()) -> Review:
    """Check a table of backends that are known as `entries`, and compare its losses with those of others."""
    ratios: dict[tuple[str, str], dict[str, float]] = {}
    outliers: list[Outlier] = []
    times = 0
    for point, prediction in _left_out(table):
        taken = _times(point)
        times += len(taken) if prediction is not None else 0
        outliers += _outliers(point, taken, prediction)
        if len(taken) < 2:
            continue
        spec, direction = spec_of(point), point.kind.direction
        chosen, fastest = choice(prediction, spec, taken, entries), min(taken.values())
        for name, time in (("", taken[chosen]), *taken.items()):
            ratios.setdefault((direction, name), {})[f"{point.kind}: {point.size}"] = time / fastest
    outliers.sort(key=lambda one: -_factor(one.measured, one.predicted))
    losses = {direction: _loss(found) for (direction, name), found in ratios.items() if not name}
    always: dict[str, dict[str, Loss]] = {}
    for (direction, name), found in ratios.items():
        if name:
            always.setdefault(direction, {})[name] = _loss(found)
    problems = [*_incomplete(table, entries), *_worse(losses, shipped)]
    if len(outliers) > MOST_FAR * times:
        problems.append(
            f"{len(outliers)} of {times} times are more than {FAR:g} times off what their neighbours predict,"
            f" expected at most {MOST_FAR:.0%}: measure them again"
        )
    return Review(tuple(problems), tuple(outliers), losses, always)


def choice(
    prediction: Prediction | None, spec: AttentionSpec, able: Iterable[str], entries: Mapping[str, Entry]
) -> str:
    """Return which of the backends that can run a call is chosen."""
    known = {name: entry for name in able if (entry := entries.get(name.casefold()))}
    priority = {name: entry.priority(spec) for name, entry in known.items()}
    default = sorted(able, key=lambda name: -priority.get(name, 0))
    if not spec.varlen and not spec.capturing:
        # Below SDPA torch's own kernel, cuDNN on a Hopper GPU, comes first in the default order.
        default.sort(key=lambda name: name != "cuDNN")
    if prediction is None:
        return default[0]
    lower = [name.casefold() for name in default]
    best = reordered(lower, lower, prediction)[0]
    return next(name for name in default if name.casefold() == best)


def spec_of(point: Point) -> AttentionSpec:
    """Return a call that the point describes, in a CUDA graph; of a device that plays no part."""
    kind, size = point.kind, point.size
    return AttentionSpec(
        device=Device("cuda"), dtype=kind.dtype, batch=size.batch, max_q=size.max_q, max_k=size.max_k,
        heads_q=size.heads_q, heads_k=size.heads_q // kind.ratio, head_dim=kind.head_dim,
        head_dim_v=kind.head_dim_v, tokens_q=size.tokens_q, tokens_k=size.tokens_k, varlen=kind.varlen,
        window=size.window, needs_backward=kind.direction == "backward", capturing=True,
        **dict.fromkeys(kind.extras, True),  # type: ignore[arg-type]
    )  # fmt: skip


def _left_out(table: Table) -> Iterator[tuple[Point, Prediction | None]]:
    """Yield each point with what the others predict for it."""
    processors = PROCESSORS if table.environment.compute_capability else 1
    alike: dict[tuple[Any, ...], list[Point]] = {}
    for point in table.points:
        # No other kinds can stand in for one another: see `distance_between`.
        extras = {*point.kind.extras} - {"sinks"}
        alike.setdefault((point.kind.direction, *point.kind[5:7], frozenset(extras)), []).append(point)
    for points in alike.values():
        for point in points:
            others = Kinds([other for other in points if other is not point], processors=processors)
            direction: Direction = "forward" if point.kind.direction == "forward" else "backward"
            yield point, predict(others, spec_of(point), direction, "table")


def _times(point: Point) -> dict[str, float]:
    found = {name: one.gpu_us for name, one in point.backends.items() if not one.trouble}
    return {name: time for name, time in found.items() if time is not None}


def _outliers(point: Point, taken: dict[str, float], prediction: Prediction | None) -> Iterator[Outlier]:
    for name, measured in taken.items():
        found = prediction.of(name) if prediction is not None else None
        if found is not None and found.cost_us is not None and _factor(measured, found.gpu_us) > FAR:
            yield Outlier(f"{point.kind}: {point.size}", name, measured, found.gpu_us)


def _factor(one: float, other: float) -> float:
    return max(one / other, other / one)


def _loss(ratios: dict[str, float]) -> Loss:
    where = max(ratios, key=ratios.__getitem__)
    return Loss(geometric_mean(ratios.values()), ratios[where], where, len(ratios))


def _incomplete(table: Table, entries: Mapping[str, Entry]) -> Iterator[str]:
    """Yield what the table doesn't say, or says of something that isn't known."""
    there = table.environment
    of_device = ("compute_capability", "cuda") if there.compute_capability or there.cuda else ("threads",)
    for name in ("torch", "attnreg", *of_device):
        if not getattr(there, name):
            yield f"environment.{name}: got nothing, expected what it was measured with"
    known = {entry.name for entry in entries.values()}
    measured = {name for point in table.points for name in point.backends}
    for name in sorted(measured | there.backends.keys()):
        if name not in known:
            yield f"backends: got {name!r}, expected some of {', '.join(sorted(known))}"
        elif not there.backends.get(name):
            yield f"environment.backends.{name}: got nothing, expected the version that was measured"
    if not any(len(_times(point)) > 1 for point in table.points):
        yield "points: got none with times of two backends, expected some to choose by"
    counts = Counter(family_of(point.kind) for point in table.points)
    for family, count in counts.items():
        if count < LEAST_POINTS:
            yield f"{family}: got {count} points, expected {LEAST_POINTS} or more"


def _worse(losses: dict[str, Loss], shipped: Iterable[Review]) -> Iterator[str]:
    others = list(shipped)
    for direction, loss in losses.items():
        means = [one.losses[direction].mean for one in others if one.losses and direction in one.losses]
        most = 1 + max(MOST_LOSS * (max(means, default=1.0) - 1), MARGIN)
        if loss.mean > most:
            yield (
                f"{direction}: its choices take {loss.mean:.3f} of the fastest backend's time, expected at "
                f"most {most:.3f}, by the tables that come with attnreg: measure more points"
            )
