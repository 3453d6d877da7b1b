"""The points of a table, by family of kinds: a look-up of the points nearest to a call takes microseconds."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import repeat
from math import dist, fsum, log
from statistics import median
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

# How many points a prediction uses, weighted by the inverse square of their distance. With each point of the
# H200's table predicted from the other points, eight chose best.
NEAREST = 8

# For notes on calls outside the measured range: the coordinates' names, and the step of a power of two in
# each. A coordinate without a name gets no note: another coordinate's note covers it, or it has no
# consequence.
AXES = ("batch x heads", "max_q", "max_k", "", "heads for each key head", "", "", "")
STEPS = (1.0, 1.0, 1.0, 1.0, RATIO, 1.0, 1.0, 1.0)

# How much farther away than the nearest point the nearest complete point may be, in powers of two.
AS_NEAR = 2.0

# A point that is nearer than this has the call's own coordinates.
EXACT = 1e-9

# The upper bound of a kernel's fixed cost; the rest of its time grows with the work. Of 8, 10 and 15 this
# chose best.
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
        has_short: whether some points have at most `SHORT` queries.
        low, high: the measured range of each coordinate.
        floors: by backend, the fixed cost of a call, in microseconds.
        hosts: by backend, the median host time of its function, in microseconds.
        first_calls: by backend, the median time of the first call of a shape, in seconds.
    """

    def __init__(self, family: Kind, places: list[Place]) -> None:
        self.family, self.places = family, places
        self.has_short = any(place.point.size.max_q <= SHORT for place in places)
        self._ats = [place.at for place in places]
        self.low, self.high = (
            tuple(map(end, zip(*(place.at for place in places), strict=True))) for end in (min, max)
        )
        # By backend and ratio of heads: what was wrong, at any size; and whether there is a time.
        self._wrong: dict[tuple[str, int], str] = {}
        self._right: set[tuple[str, int]] = set()
        timed: dict[str, list[Measured]] = {}
        for _, point, _ in places:
            for name, result in point.backends.items():
                if result.wrong:
                    self._wrong.setdefault((name, point.kind.ratio), f"{result.trouble} at {point.size}")
                if result.gpu_us is not None:
                    self._right.add((name, point.kind.ratio))
                    timed.setdefault(name, []).append(result)
        self.floors = {
            name: min(0.9 * min(result.gpu_us or 0.0 for result in results), MOST_FLOOR_US)
            for name, results in timed.items()
        }
        self.hosts = {name: median(result.host_us for result in results) for name, results in timed.items()}
        self.first_calls = {
            name: median(result.first_call_s for result in results) for name, results in timed.items()
        }
        # The places that have every backend of the family, if most places do. With an incomplete place
        # backends would be compared at different sizes.
        everyone = {name for place in places for name in place.point.backends}
        complete = [n for n, place in enumerate(places) if everyone <= place.point.backends.keys()]
        self._complete = complete if 2 * len(complete) > len(places) else []
        self._growing: dict[tuple[str, int], list[tuple[float, float] | None]] = {}

    def clamped(self, at: tuple[float, ...]) -> tuple[tuple[float, ...], tuple[str, ...]]:
        """Return the nearest coordinates in the measured range, and the names of those outside it."""
        inside = tuple(map(min, map(max, at, self.low), self.high))
        if inside == at:
            return at, ()
        outside = tuple(
            f"{axis} {2 ** (x / step):.0f} is {'above' if x > edge else 'below'} {2 ** (edge / step):.0f}"
            for axis, step, x, edge in zip(AXES, STEPS, at, inside, strict=True)
            if axis and abs(x - edge) > EXACT
        )
        return inside, outside

    def misfits(self, name: str, queries: range, growths: range) -> list[float]:
        """Return for each growth how much a backend's times for the same work differ.

        Over points with `queries` queries.
        """
        floor = self.floors.get(name, 0.0)
        timed = [
            (log(max(gpu_us - floor, 1.0)), place.works)
            for place in self.places
            if place.point.size.max_q in queries and (gpu_us := _gpu_us_of(name, place.point)) is not None
        ]
        return [_spread_of([time - log(works[growth]) for time, works in timed]) for growth in growths]

    def growing(self, name: str, growth: int) -> list[tuple[float, float] | None]:
        """Return what a backend takes above its floor, in microseconds, and for which amount of work.

        For each of `places`, by a growth of `GROWTHS`; None where it has no time.
        """
        growing = self._growing.get((name, growth))
        if growing is None:
            floor = self.floors.get(name, 0.0)
            growing = self._growing[name, growth] = [
                None if gpu_us is None else (gpu_us - floor, place.works[growth])
                for place in self.places
                for gpu_us in (_gpu_us_of(name, place.point),)
            ]
        return growing

    def nearest(
        self, at: tuple[float, ...], itself: tuple[Kind, Size] | None = None
    ) -> list[tuple[float, int]]:
        """Return the distances of the few nearest points, with their numbers in `places`.

        If points have these very coordinates, only one of them. A distance of 1 is a factor of two in one of
        the sizes. Several points may share coordinates, because windows and packed totals are no coordinates:
        `itself` is then preferred.
        """
        # A family has up to some hundreds of points: a full scan takes at most some ten microseconds.
        distances = list(map(dist, self._ats, repeat(at)))
        nearest = min(distances)
        if nearest < EXACT:
            exact = [number for number, distance in enumerate(distances) if distance < EXACT]
            same = (number for number in exact if self.places[number].point.place == itself)
            return [(0.0, next(same, exact[0]))]
        by_distance = sorted(self._complete, key=distances.__getitem__)
        if not by_distance or distances[by_distance[0]] > nearest + AS_NEAR:
            by_distance = sorted(range(len(distances)), key=distances.__getitem__)
        return [(distances[number], number) for number in by_distance[:NEAREST]]

    def wrong_with(self, name: str, ratio: int) -> str:
        """Return what is wrong with a backend at a ratio of heads; if that wasn't measured, at any ratio."""
        if (name, ratio) in self._wrong or (name, ratio) in self._right:
            return self._wrong.get((name, ratio), "")
        return next((problem for (other, _), problem in self._wrong.items() if other == name), "")


def _gpu_us_of(name: str, point: Point) -> float | None:
    """Return a backend's GPU time at a point, in microseconds; None if it has none."""
    result = point.backends.get(name)
    return None if result is None else result.gpu_us


def _spread_of(numbers: list[float]) -> float:
    """Return the sum of the squared differences from the mean.

    Not by `statistics`, which computes in fractions: a first decision took up to 9 ms for each backend (CPU).
    """
    mean = fsum(numbers) / len(numbers) if numbers else 0.0
    return fsum((number - mean) ** 2 for number in numbers)


class Kinds:
    """The families of a table, and the choice of a family for a call.

    Attributes:
        fronts: host times by the `place` of a `Front`.
        processors: the number of multiprocessors; 1 if it has no effect (see `kinds.works`).
    """

    def __init__(self, points: Iterable[Point], fronts: Iterable[Front] = (), processors: int = 1) -> None:
        self.fronts, self.processors = {front.place: front.host_us for front in fronts}, processors
        places: dict[Kind, list[Place]] = {}
        for point in points:
            kind, size = point.kind, point.size
            place = Place(coordinates(kind, size), point, works(kind, size, processors))
            places.setdefault(family_of(kind), []).append(place)
        self._exact = {family: Index(family, places_of_family) for family, places_of_family in places.items()}
        self._known: dict[tuple[Kind, bool], Index | None] = {}
        self._growths: dict[tuple[str, int], int] = {}

    def growth_of(self, name: str, family: Kind, max_q: int) -> int:
        """Return the place in `GROWTHS` of the growth that fits a backend's times best.

        Within a family times for the same work should differ least. For a single query, and for a few, times
        of all families count; for more, times of forwards with this head dim. Without two times in any
        family, it is the first growth.
        """
        few = max_q <= SHORT
        key = name, min(max_q, 2) if few else -family.head_dim
        if not few and family.direction == "backward":
            return 0  # for backwards all growths are equal, see `works`
        if (growth := self._growths.get(key)) is None:
            growth = self._growths[key] = self._fitting(name, family.head_dim, max_q)
        return growth

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
        misfits = [index.misfits(name, queries, growths) for index in near]
        totals = [sum(of_growth) for of_growth in zip(*misfits, strict=True)]
        return growths[totals.index(min(totals))] if totals else growths[0]

    def index_for(self, kind: Kind, max_q: int) -> Index | None:
        """Return the points of that kind's family, or of the nearest family that may replace it.

        For a few queries families that have points with few queries are preferred, because kernels then have
        other code paths. Packed calls of few queries have no other family: kernels split the keys of a packed
        call otherwise than those of a dense call, or of many queries. On an H100 points of 128 queries
        predicted 16 us for FA2, which took 258, where FA4 took 81.
        """
        family, short = family_of(kind), max_q <= SHORT
        if (family, short) not in self._known:
            near = {
                other: (short and not index.has_short, distance)
                for other, index in self._exact.items()
                if (distance := distance_between(family, other)) is not None
                and (index.has_short or not (short and family.varlen))
            }
            if len(self._known) > 1000:
                self._known = {}
            self._known[family, short] = self._exact[min(near, key=near.__getitem__)] if near else None
        return self._known[family, short]
