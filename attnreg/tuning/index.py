"""The points of a table by family of kinds, laid out so that the nearest are found in microseconds."""

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

__all__ = ["EXACT", "Index", "Kinds", "Near", "Place"]

# Of the H200's points, each predicted from the others, eight by the square of their distance chose best.
NEAREST = 8

# What the coordinates are called where a call lies beyond them, and how many of them make a power of two.
# Of those without a name nothing is told: what lies beyond them is told by another, or of no consequence.
AXES = ("batch x heads", "max_q", "max_k", "", "heads for each key head", "", "", "")
STEPS = (1.0, 1.0, 1.0, 1.0, RATIO, 1.0, 1.0, 1.0)

# The nearest point that knows every backend may be so much farther than the nearest, in powers of two.
AS_NEAR = 2.0

# A point that is no farther is the call itself.
EXACT = 1e-9

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
    """The points of one family.

    Attributes:
        family: theirs.
        places: the points, and where they lie.
        low, high: the measured range of each coordinate.
        floors: for each backend the least that a call takes, in microseconds.
        hosts: for each backend what its own function takes the host, in microseconds, as a median.
        building: for each backend what the first call of a new shape takes, in seconds.
        wrong: in what a backend was wrong with a ratio of heads, at any size.
        right: with which ratios it was timed.
        complete: the places, by number, that know every backend of the family, if most do; else none. Where
            one lacks a backend, others would be compared at other sizes than it.
    """

    family: Kind
    places: list[Place]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    floors: dict[str, float] = field(default_factory=dict)
    hosts: dict[str, float] = field(default_factory=dict)
    building: dict[str, float] = field(default_factory=dict)
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
            self.building[name] = median(one.first_call_s for one in found)

    def clamped(self, at: tuple[float, ...]) -> tuple[tuple[float, ...], tuple[str, ...]]:
        """Return the nearest place of the measured range, and in what the call lies outside of it."""
        inside = tuple(min(max(x, low), high) for x, low, high in zip(at, self.low, self.high, strict=True))
        outside = tuple(
            f"{axis} {2 ** (x / step):.0f} is {'above' if x > edge else 'below'} {2 ** (edge / step):.0f}"
            for axis, step, x, edge in zip(AXES, STEPS, at, inside, strict=True)
            if axis and abs(x - edge) > EXACT
        )
        return inside, outside

    def nearest(self, at: tuple[float, ...], itself: tuple[Kind, Size] | None = None) -> list[Near]:
        """Return the nearest few points, the nearest first; a point that is met exactly stands alone.

        Of several at one place, the call `itself` comes first: they differ in what is no coordinate.
        """
        # A family has some dozens of points: to look at all of them takes a few microseconds.
        apart = sorted((dist(place.at, at), number) for number, place in enumerate(self.places))
        if apart[0][0] >= EXACT:
            whole = [one for one in apart if one[1] in self.complete]
            if whole and whole[0][0] <= apart[0][0] + AS_NEAR:
                apart = whole
            return [Near(self.places[number], distance) for distance, number in apart[:NEAREST]]
        met = [self.places[number] for distance, number in apart if distance < EXACT]
        return [Near(next((one for one in met if one.point.place == itself), met[0]), 0.0)]

    def wrong_with(self, name: str, ratio: int) -> str:
        """Return in what a backend is wrong with a ratio of heads: measured with it, or with any if not."""
        if (name, ratio) in self.wrong or (name, ratio) in self.right:
            return self.wrong.get((name, ratio), "")
        return next((told for (other, _), told in self.wrong.items() if other == name), "")


class Kinds:
    """Every family of a table, and which of them speaks of a call.

    Attributes:
        fronts: what the host takes, by backend, layout (packed or not), direction and kind of router.
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

    def speaking_of(self, kind: Kind) -> Index | None:
        """Return the points of that kind's family, else of the nearest that may stand in for it."""
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
