"""The points of a table, grouped by family of kinds; finds the nearest to a call in microseconds."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import count, repeat
from math import dist, log
from statistics import median, pvariance
from typing import NamedTuple

from attnreg.core.times.kinds import (
    GROWTHS,
    RATIO,
    SHORT,
    SPREADS,
    Kind,
    Size,
    coordinates,
    distance_between,
    family_of,
    works,
)
from attnreg.core.times.points import Front, Measured, Point

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

# The most that is taken for the fixed cost of a kernel; the rest of its time grows with the work. Of 8, 10
# and 15 this chose best.
MOST_FLOOR_US = 10.0


class Place(NamedTuple):
    """A point, its coordinates, and its work for each of `GROWTHS`."""

    at: tuple[float, ...]
    point: Point
    works: tuple[float, ...]


class Index:
    """The points of one family.

    Attributes:
        family: their common kind.
        places: the points with their coordinates.
        has_short: whether some points have a few queries only.
        low, high: the measured range of each coordinate.
        floors: for each backend the fixed cost of a call, in microseconds.
        hosts: for each backend the median host time of its function, in microseconds.
        first_calls: for each backend the median time of the first call of a shape, in seconds.
    """

    def __init__(self, family: Kind, places: list[Place]) -> None:
        self.family, self.places = family, places
        self.has_short = any(place.point.size.max_q <= SHORT for place in places)
        self._ats = [place.at for place in places]
        self.low, self.high = (
            tuple(map(end, zip(*(place.at for place in places), strict=True))) for end in (min, max)
        )
        # What was wrong with a backend at a ratio of heads, at any size; and the ratios with a time.
        self._wrong: dict[tuple[str, int], str] = {}
        self._right: set[tuple[str, int]] = set()
        timed: dict[str, list[Measured]] = {}
        for _, point, _ in places:
            for name, one in point.backends.items():
                if one.wrong:
                    self._wrong.setdefault((name, point.kind.ratio), f"{one.trouble} at {point.size}")
                if one.gpu_us is not None:
                    self._right.add((name, point.kind.ratio))
                    timed.setdefault(name, []).append(one)
        self.floors = {
            name: min(0.9 * min(one.gpu_us or 0.0 for one in found), MOST_FLOOR_US)
            for name, found in timed.items()
        }
        self.hosts = {name: median(one.host_us for one in found) for name, found in timed.items()}
        self.first_calls = {name: median(one.first_call_s for one in found) for name, found in timed.items()}
        # The places that have every backend of the family, if most do. Where one lacks a backend, the others
        # would be compared at sizes other than its.
        everyone = {name for place in places for name in place.point.backends}
        complete = {n for n, place in enumerate(places) if everyone <= place.point.backends.keys()}
        self._complete = complete if 2 * len(complete) > len(places) else set()

    def clamped(self, at: tuple[float, ...]) -> tuple[tuple[float, ...], tuple[str, ...]]:
        """Return the nearest coordinates in the measured range, and in which a call is outside of it."""
        inside = tuple(map(min, map(max, at, self.low), self.high))
        if inside == at:
            return at, ()
        outside = tuple(
            f"{axis} {2 ** (x / step):.0f} is {'above' if x > edge else 'below'} {2 ** (edge / step):.0f}"
            for axis, step, x, edge in zip(AXES, STEPS, at, inside, strict=True)
            if axis and abs(x - edge) > EXACT
        )
        return inside, outside

    def misfit(self, name: str, queries: range, growth: int) -> float:
        """Return how much a backend's times differ for the same work, of points with so many queries."""
        floor = self.floors.get(name, 0.0)
        costs = [
            log(max(found.gpu_us - floor, 1.0) / place.works[growth])
            for place in self.places
            if place.point.size.max_q in queries
            and (found := place.point.backends.get(name)) is not None
            and found.gpu_us is not None
        ]
        return pvariance(costs) * len(costs) if costs else 0.0

    def nearest(
        self, at: tuple[float, ...], itself: tuple[Kind, Size] | None = None
    ) -> list[tuple[float, Place]]:
        """Return the nearest few points and their distances; if one has these very coordinates, it alone.

        A distance of 1 is a factor of two in one of the sizes. Several points may have the same coordinates,
        as windows and packed totals are none: `itself` then comes first.
        """
        # A family has some dozens of points: a full scan takes a few microseconds.
        by_distance = sorted(zip(map(dist, self._ats, repeat(at)), count(), strict=False))
        if by_distance[0][0] >= EXACT:
            complete = [one for one in by_distance if one[1] in self._complete]
            if complete and complete[0][0] <= by_distance[0][0] + AS_NEAR:
                by_distance = complete
            return [(distance, self.places[number]) for distance, number in by_distance[:NEAREST]]
        exact = [self.places[number] for distance, number in by_distance if distance < EXACT]
        return [(0.0, next((one for one in exact if one.point.place == itself), exact[0]))]

    def wrong_with(self, name: str, ratio: int) -> str:
        """Return what is wrong with a backend at a ratio of heads; if that wasn't measured, at any."""
        if (name, ratio) in self._wrong or (name, ratio) in self._right:
            return self._wrong.get((name, ratio), "")
        return next((found for (other, _), found in self._wrong.items() if other == name), "")


class Kinds:
    """The families of a table, and which of them predicts a call.

    Attributes:
        fronts: host times by the `place` of a `Front`.
        processors: how many multiprocessors the device has; 1 where that doesn't matter (`kinds.works`).
    """

    def __init__(self, points: Iterable[Point], fronts: Iterable[Front] = (), processors: int = 1) -> None:
        self.fronts, self.processors = {one.place: one.host_us for one in fronts}, processors
        places: dict[Kind, list[Place]] = {}
        for point in points:
            kind, size = point.kind, point.size
            one = Place(coordinates(kind, size), point, works(kind, size, processors))
            places.setdefault(family_of(kind), []).append(one)
        self._exact = {family: Index(family, found) for family, found in places.items()}
        self._known: dict[tuple[Kind, bool], Index | None] = {}
        self._growths: dict[tuple[str, int], int] = {}

    def growth_of(self, name: str, family: Kind, max_q: int) -> int:
        """Return the place in `GROWTHS` of the one that fits a backend's times best.

        Times for the same work should differ least within families. For one query, and for a few, those of
        all families count; for more, those of forwards with this head dim. If no family has two, it is the
        first.
        """
        few = max_q <= SHORT
        key = name, min(max_q, 2) if few else -family.head_dim
        if not few and family.direction == "backward":
            return 0  # `works` has one for all
        if (found := self._growths.get(key)) is None:
            found = self._growths[key] = self._fitting(name, family.head_dim, max_q)
        return found

    def _fitting(self, name: str, head_dim: int, max_q: int) -> int:
        if max_q > SHORT:
            queries, growths = range(SHORT + 1, sys.maxsize), range(len(SPREADS), len(GROWTHS))
            alike = "forward", head_dim
            near = [
                index
                for index in self._exact.values()
                if (index.family.direction, index.family.head_dim) == alike
            ]
        else:
            queries = range(1, 2) if max_q == 1 else range(2, SHORT + 1)
            growths, near = range(len(SPREADS)), [*self._exact.values()]
        return min(growths, key=lambda growth: sum(one.misfit(name, queries, growth) for one in near))

    def index_for(self, kind: Kind, max_q: int) -> Index | None:
        """Return the points of that kind's family, else of the nearest family that may replace it.

        For a few queries, of those that have points with as few, if any has: kernels take other ways then.
        """
        family, short = family_of(kind), max_q <= SHORT
        if (family, short) not in self._known:
            near = {
                other: (short and not index.has_short, distance)
                for other, index in self._exact.items()
                if (distance := distance_between(family, other)) is not None
            }
            if len(self._known) > 1000:
                self._known = {}
            self._known[family, short] = self._exact[min(near, key=near.__getitem__)] if near else None
        return self._known[family, short]
