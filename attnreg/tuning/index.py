"""The points of a table by kind, laid out so that the nearest to a call are found in microseconds."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from math import dist
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from attnreg.tuning.kinds import Kind, coordinates, distance_between, work

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from attnreg.tuning.points import Point

__all__ = ["Index", "Kinds", "Near", "Place"]

NEAREST = 4
AXES = ("batch x heads", "max_q", "max_k")

# What launching a kernel takes however little it does; beyond that its time grows with the work.
MOST_FLOOR_US = 15.0


class Place(NamedTuple):
    """A point, where it lies, and its work."""

    at: tuple[float, ...]
    point: Point
    work: float


class Near(NamedTuple):
    """A point that is near a call, and how far: 1 is a factor of two in one of the sizes."""

    place: Place
    distance: float


@dataclass(slots=True)
class Index:
    """The points of one kind.

    Attributes:
        kind: theirs.
        places: the points by the sum of their coordinates, which bounds the distance between two.
        low, high: the measured range of each coordinate.
        floors: for each backend the least that a call takes, in microseconds.
        building: for each backend what the first call of a new shape takes, in seconds.
        wrong: in what a backend was wrong, at any size.
    """

    kind: Kind
    places: list[Place]
    sums: list[float] = field(default_factory=list)
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    floors: dict[str, float] = field(default_factory=dict)
    building: dict[str, float] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.places.sort(key=lambda place: sum(place.at))
        self.sums = [sum(place.at) for place in self.places]
        self.low = tuple(map(min, zip(*(place.at for place in self.places), strict=True)))
        self.high = tuple(map(max, zip(*(place.at for place in self.places), strict=True)))
        taken: dict[str, list[tuple[float, float]]] = {}
        for place in self.places:
            for name, one in place.point.backends.items():
                if one.wrong:
                    self.wrong.setdefault(name, f"{one.trouble} at {place.point.size}")
                if one.gpu_us is not None:
                    taken.setdefault(name, []).append((one.gpu_us, one.first_call_s))
        for name, times in taken.items():
            self.floors[name] = min(0.9 * min(gpu for gpu, _ in times), MOST_FLOOR_US)
            self.building[name] = median(first for _, first in times)

    def clamped(self, at: tuple[float, ...]) -> tuple[tuple[float, ...], tuple[str, ...]]:
        """Return the nearest place of the measured range, and in what the call lies outside of it."""
        inside = tuple(min(max(x, low), high) for x, low, high in zip(at, self.low, self.high, strict=True))
        outside = tuple(
            f"{axis} {2**x:.0f} is {'above' if x > edge else 'below'} {2**edge:.0f}"
            for axis, x, edge in zip(AXES, at, inside, strict=False)
            if abs(x - edge) > 1e-9
        )
        return inside, outside

    def nearest(self, at: tuple[float, ...]) -> list[Near]:
        """Return the nearest few points, the nearest first; a point that is met exactly stands alone."""
        found: list[Near] = []
        for place, apart in self._outwards(sum(at)):
            # Two places are at least half as far apart as the sums of their four coordinates.
            if len(found) == NEAREST and apart / 2 > found[-1].distance:
                break
            distance = dist(place.at, at)
            if len(found) < NEAREST or distance < found[-1].distance:
                found.append(Near(place, distance))
                found.sort(key=lambda near: near.distance)
                del found[NEAREST:]
        return found[:1] if found[0].distance < 1e-9 else found

    def _outwards(self, middle: float) -> Iterator[tuple[Place, float]]:
        above = bisect_left(self.sums, middle)
        below, most = above - 1, len(self.sums)
        while below >= 0 or above < most:
            under = middle - self.sums[below] if below >= 0 else None
            over = self.sums[above] - middle if above < most else None
            if over is None or (under is not None and under <= over):
                yield self.places[below], under or 0.0
                below -= 1
            else:
                yield self.places[above], over
                above += 1


class Kinds:
    """Every kind of a table, and which of them speaks of a call."""

    def __init__(self, points: Iterable[Point]) -> None:
        places: dict[Kind, list[Place]] = {}
        for point in points:
            one = Place(coordinates(point.size), point, work(point.kind, point.size))
            places.setdefault(point.kind, []).append(one)
        self._exact = {kind: Index(kind, found) for kind, found in places.items()}
        self._known: dict[Kind, Index | None] = dict(self._exact)

    def speaking_of(self, kind: Kind) -> Index | None:
        """Return the points of that kind, else of the nearest that may stand in for it."""
        if kind not in self._known:
            near = [
                (distance, index)
                for other, index in self._exact.items()
                if (distance := distance_between(kind, other)) is not None
            ]
            if len(self._known) > 1000 + len(self._exact):
                self._known = dict(self._exact)
            self._known[kind] = min(near, key=lambda pair: pair[0], default=(0.0, None))[1]
        return self._known[kind]
