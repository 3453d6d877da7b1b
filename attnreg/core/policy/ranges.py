"""Ranges of lengths: the calls of one kind that a row of a lockfile is for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from attnreg.core.contract.lengths import LARGEST_LIMIT, LENGTHS, Cut, Lengths, Terms, sum_of
from attnreg.core.times.points import Malformed, checked, is_dict


class LengthRange(NamedTuple):
    """The values that a length, or a sum of products of lengths, may have: both ends count.

    Attributes:
        terms: the sum, as in `Cut`.
        low, high: None where there is no end.
    """

    terms: Terms
    low: int | None
    high: int | None

    @property
    def cuts(self) -> Iterator[Cut]:
        """Where the range begins, and where the lengths beyond it begin."""
        if self.low is not None:
            yield Cut(self.terms, self.low)
        if self.high is not None:
            yield Cut(self.terms, self.high + 1)

    def contains(self, lengths: Lengths) -> bool:
        """Whether a call has such lengths."""
        value = self.value(lengths)
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)

    def value(self, lengths: Lengths) -> int:
        """Return the sum for the lengths of a call."""
        return sum_of(self.terms, lengths)

    @property
    def name(self) -> str:
        """The sum as text: `max_q`, `max_q - max_k`, `64*batch`."""
        text = ""
        for coefficient, product in self.terms:
            number = (str(abs(coefficient)),) if abs(coefficient) != 1 else ()
            sign = " - " if coefficient < 0 else " + "
            text += sign + "*".join((*number, *product))
        return text.removeprefix(" + ").lstrip()

    def __str__(self) -> str:
        if self.low is None:
            return f"{self.name} up to {self.high}"
        if self.low == self.high:
            return f"{self.name} {self.low}"
        return (
            f"{self.name} {self.low} or more"
            if self.high is None
            else f"{self.name} {self.low} to {self.high}"
        )


Ranges = tuple[LengthRange, ...]


def ranges_to(ranges: Ranges) -> dict[str, list[int | None]]:
    """Return ranges as plain data."""
    return {length_range.name: [length_range.low, length_range.high] for length_range in ranges}


def ranges_from(data: object, place: str) -> Ranges:
    """Return the ranges of the plain data of `ranges_to`; raises `Malformed`."""
    rows = checked(data, place, ("ranges of lengths such as {'max_q': [1, 4096]}", is_dict))
    return tuple(_range_from(name, ends, f"{place}.{name}") for name, ends in rows.items())


def _range_from(name: str, ends: Any, place: str) -> LengthRange:
    terms = []
    for sign, product in re.findall(r"([+-]?) ?([a-z_0-9*]+)", name):
        factors = product.split("*")
        number = int(factors.pop(0)) if factors[0].isdecimal() and len(factors[0]) < 16 else 1
        terms.append((-number if sign == "-" else number, tuple(factors)))
    known = all(factors and {*factors} <= {*LENGTHS} for _, factors in terms)
    if not (terms and known and LengthRange(tuple(terms), None, None).name == name):
        raise Malformed(f"{place}: got an unknown length, expected {', '.join(LENGTHS)} or a sum of them")
    are_ends = isinstance(ends, list) and len(ends) == 2 and all(map(_is_end, ends))
    checked(ends, place, ("[lowest, highest], whole numbers or null", lambda _: are_ends))
    return LengthRange(tuple(terms), *ends)


def _is_end(end: object) -> bool:
    return end is None or (type(end) is int and abs(end) < LARGEST_LIMIT - 1)


def includes(ranges: Ranges, lengths: Lengths) -> bool:
    """Whether a call has lengths in all of the ranges."""
    return all(length_range.contains(lengths) for length_range in ranges)
