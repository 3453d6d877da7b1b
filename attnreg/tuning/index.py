"""The points of a table, grouped by family of kinds; finds the nearest to a call in microseconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import dist
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from attnreg.tuning.kinds import RATIO, Kind, coordinates, distance_between, family_of, work

if TYPE_CHECKING:
    from collections.abc import Iterable

    from attnreg.tuning.kinds import Size
    from attnreg.tuning.points import Front, Measured, Point

# How many points a prediction uses. With each point of the H200's table predicted from the others, eight,
# weighted by the inverse square of their distance, chose best.
NEAREST = 8

# The names of the coordinates in notes about calls outside the measured range, and what a power of two is in
# each. Those without a name get no note: another coordinate's note covers them, or they have no consequence.
AXES = ("batch x heads", "max_q", "max_k", "", "heads for each key head", "", "", "")
STEPS = (1.0, 1.0, 1.0, 1.0, RATIO, 1.0, 1.0, 1.0)

# How much farther than the nearest point the nearest complete one may be, in powers of two.
AS_NEAR = 2.0

# A point that is nearer than this has the call's own coordinates.
EXACT = 1e-9

# The most that is taken for the fixed cost of a kernel; the rest of its time grows with the work.
MOST_FLOOR_US = 15.0


class Place(NamedTuple):
    """A point, its coordinates, and its work."""

    at: tuple[float, ...]
    point: Point
    work: float


class Near(NamedTuple):
    """A point near a call, and its distance: 1 is a factor of two in one of the sizes."""

    place: Place
    distance: float


@dataclass(slots=True)
class Index:
    """The points of one family.

    Attributes:
        family: their common kind.
        places: the points with their coordinates.
        low, high: the measured range of each coordinate.
        floors: for each backend the fixed cost of a call, in microseconds.
        hosts: for each backend the median host time of its function, in microseconds.
        first_calls: for each backend the median time of the first call of a shape, in seconds.
        wrong: what was wrong with a backend at a ratio of heads, at any size.
        right: the ratios of heads at which it was timed.
        complete: indices of the places that have every backend of the family, if most do; else empty. Where
            one lacks a backend, the others would be compared at sizes other than its.
    """

    family: Kind
    places: list[Place]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    floors: dict[str, float] = field(default_factory=dict)
    hosts: dict[str, float] = field(default_factory=dict)
    first_calls: dict[str, float] = field(default_factory=dict)
    wrong: dict[tuple[str, int], str] = field(default_factory=dict)
    right: set[tuple[str, int]] = field(default_factory=set)
    complete: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self.low = tuple(map(min, zip(*(place.at for place in self.places), strict=True)))
        self.high = tuple(map(max, zip(*(place.at for place in self.places), strict=True)))
        taken: dict[str, list[Measured]] = {}
        for place in self.places:
            for name, one in place.point.backends.items():
                if one.wrong:
                    at = (name, place.point.kind.ratio)
                    self.wrong.setdefault(at, f"{one.trouble} at {place.point.size}")
                if one.gpu_us is not None:
                    self.right.add((name, place.point.kind.ratio))
                    taken.setdefault(name, []).append(one)
        everyone = {name for place in self.places for name in place.point.backends}
        complete = [
            number for number, place in enumerate(self.places) if everyone <= place.point.backends.keys()
        ]
        if 2 * len(complete) > len(self.places):
            self.complete = frozenset(complete)
        for name, found in taken.items():
            self.floors[name] = min(0.9 * min(one.gpu_us or 0.0 for one in found), MOST_FLOOR_US)
            self.hosts[name] = median(one.host_us for one in found)
            self.first_calls[name] = median(one.first_call_s for one in found)

    def clamped(self, at: tuple[float, ...]) -> tuple[tuple[float, ...], tuple[str, ...]]:
        """Return the nearest coordinates in the measured range, and in which a call is outside of it."""
        inside = tuple(min(max(x, low), high) for x, low, high in zip(at, self.low, self.high, strict=True))
        outside = tuple(
            f"{axis} {2 ** (x / step):.0f} is {'above' if x > edge else 'below'} {2 ** (edge / step):.0f}"
            for axis, step, x, edge in zip(AXES, STEPS, at, inside, strict=True)
            if axis and abs(x - edge) > EXACT
        )
        return inside, outside

    def nearest(self, at: tuple[float, ...], itself: tuple[Kind, Size] | None = None) -> list[Near]:
        """Return the nearest few points, the nearest first; if one has these very coordinates, it alone.

        Several may have them, as windows and packed totals are no coordinates: `itself` then comes first.
        """
        # A family has some dozens of points: a full scan takes a few microseconds.
        by_distance = sorted((dist(place.at, at), number) for number, place in enumerate(self.places))
        if by_distance[0][0] >= EXACT:
            complete = [one for one in by_distance if one[1] in self.complete]
            if complete and complete[0][0] <= by_distance[0][0] + AS_NEAR:
                by_distance = complete
            return [Near(self.places[number], distance) for distance, number in by_distance[:NEAREST]]
        exact = [self.places[number] for distance, number in by_distance if distance < EXACT]
        return [Near(next((one for one in exact if one.point.place == itself), exact[0]), 0.0)]

    def wrong_with(self, name: str, ratio: int) -> str:
        """Return what is wrong with a backend at a ratio of heads; if that wasn't measured, at any."""
        if (name, ratio) in self.wrong or (name, ratio) in self.right:
            return self.wrong.get((name, ratio), "")
        return next((found for (other, _), found in self.wrong.items() if other == name), "")


class Kinds:
    """The families of a table, and which of them predicts a call.

    Attributes:
        fronts: host times by backend, whether packed, direction, and whether routers are compiled.
    """

    def __init__(self, points: Iterable[Point], fronts: Iterable[Front] = ()) -> None:
        self.fronts = {one.place: one.host_us for one in fronts}
        places: dict[Kind, list[Place]] = {}
        for point in points:
            kind, size = point.kind, point.size
            one = Place(coordinates(kind, size), point, work(kind, size))
            places.setdefault(family_of(kind), []).append(one)
        self._exact = {family: Index(family, found) for family, found in places.items()}
        self._known: dict[Kind, Index | None] = dict(self._exact)

    def index_for(self, kind: Kind) -> Index | None:
        """Return the points of that kind's family, else of the nearest family that may replace it."""
        family = family_of(kind)
        if family not in self._known:
            near = [
                (distance, index)
                for other, index in self._exact.items()
                if (distance := distance_between(family, other)) is not None
            ]
            if len(self._known) > 1000 + len(self._exact):
                self._known = dict(self._exact)
            self._known[family] = min(near, key=lambda pair: pair[0], default=(0.0, None))[1]
        return self._known[family]
