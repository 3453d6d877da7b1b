"""Ranges of lengths: the calls of one kind that a row of a lockfile is for.

`with_other_lengths` returns calls at the places where decisions about a kind may change. `split` divides
decided calls into ranges with one backend each.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

from attnreg.core.contract.lengths import (
    LARGEST_LIMIT,
    LENGTHS,
    LIMITS,
    Cut,
    Lengths,
    Terms,
    bounds,
    changes_at,
    cuts_of_window,
    sum_of,
    with_lengths,
)
from attnreg.core.contract.spec import AttentionSpec
from attnreg.core.times.points import Malformed, checked, is_dict

# Where times decide they were measured for lengths of this order; beyond, the next table may say otherwise.
LONGEST_BY_TIMES = 2**20


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
    return {one.name: [one.low, one.high] for one in ranges}


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


class Decided(NamedTuple):
    """A call of a kind, the backend that is to run it, None if none can, and the source of that decision."""

    spec: AttentionSpec
    backend: str | None
    source: str


def with_other_lengths(
    spec: AttentionSpec, cuts: Iterable[Cut], by_times: bool = False
) -> Iterator[AttentionSpec]:
    """Yield calls of a spec's kind with one length at each cut, and with one below it.

    `by_times` adds calls with twice the lengths, and so on: measured times change with lengths everywhere. A
    window is as in calls of such lengths.
    """
    for cut in dict.fromkeys((*cuts, *cuts_of_window(*spec.window))):
        for name in sorted(cut.names):
            if name in ("tokens_q", "tokens_k") and not spec.varlen:
                continue
            at = changes_at(spec, cut, name)
            if at is not None:
                yield from (_of_lengths(spec, name, number) for number in (at - 1, at))
    factor = 2
    while by_times and factor * max(spec.max_q, spec.max_k) <= LONGEST_BY_TIMES:
        lengths = {name: factor * getattr(spec, name) for name in LENGTHS if name != "batch"}
        yield _with_window(with_lengths(spec, **lengths), spec.window)
        factor *= 2


def _of_lengths(spec: AttentionSpec, name: str, number: int) -> AttentionSpec:
    """Return a call with another length; the tokens of a packed call stay as many as sequences can have."""
    lengths = Lengths.of(spec)._replace(**{name: number})
    if name == "tokens_q":
        lengths = lengths._replace(batch=max(lengths.batch, -(-number // max(spec.max_q, 1))))
    if name == "tokens_k":
        lengths = lengths._replace(batch=max(lengths.batch, -(-number // max(spec.max_k, 1))))
    most_q, most_k = lengths.batch * lengths.max_q, lengths.batch * lengths.max_k
    tokens_q = min(max(lengths.tokens_q, lengths.max_q), most_q)
    tokens_k = min(max(lengths.tokens_k, lengths.max_k), most_k)
    return _with_window(
        with_lengths(spec, **lengths._replace(tokens_q=tokens_q, tokens_k=tokens_k)._asdict()), spec.window
    )


def _with_window(spec: AttentionSpec, window: tuple[int, int]) -> AttentionSpec:
    return replace(spec, window=bounds(window, False, spec.max_q, spec.max_k))


def split(calls: Sequence[Decided], cuts: Iterable[Cut]) -> list[tuple[Ranges, list[Decided]]]:
    """Divide calls of one kind into ranges of lengths, so that all calls in one have one backend.

    Together the ranges have all lengths, and no length is in two of them. Each ends at one of `cuts`. Where
    these don't tell the backends apart, it ends at a power of two, or else at a length of a call.
    """
    leaves: list[tuple[Ranges, list[Decided]]] = []
    open_parts: list[tuple[dict[Terms, LengthRange], list[Decided]]] = [({}, list(calls))]
    places = tuple(dict.fromkeys(cuts))
    while open_parts:
        ranges, part = open_parts.pop()
        cut = _best_cut(part, places)
        if cut is None:
            leaves.append((tuple(ranges.values()), part))
            continue
        before = ranges.get(cut.terms, LengthRange(cut.terms, None, None))
        sides: tuple[list[Decided], list[Decided]] = ([], [])
        for call in part:
            sides[cut.is_reached(Lengths.of(call.spec))].append(call)
        below, above = before._replace(high=cut.at - 1), before._replace(low=cut.at)
        open_parts += [({**ranges, cut.terms: above}, sides[1]), ({**ranges, cut.terms: below}, sides[0])]
    return leaves


def _best_cut(calls: Sequence[Decided], cuts: Sequence[Cut]) -> Cut | None:
    """Return the cut that tells the backends of calls apart best; None if they have one, or no cut does."""
    if len({call.backend for call in calls}) < 2:
        return None
    lengths = [Lengths.of(call.spec) for call in calls]
    powers = [Cut.of(name, at=2**n) for name in LENGTHS for n in range(LIMITS[name].bit_length())]
    for candidates in ([*cuts, *powers], list(_cuts_between(lengths))):
        mixed = {cut: _mixed(calls, lengths, cut) for cut in candidates}
        best = min(mixed, key=lambda cut: mixed[cut], default=None)
        if best is not None and mixed[best] < len(calls):
            return best
    return None


def _cuts_between(lengths: Sequence[Lengths]) -> Iterator[Cut]:
    for number, name in enumerate(LENGTHS):
        values = sorted({one[number] for one in lengths})
        yield from (Cut.of(name, at=high) for _, high in pairwise(values))


def _mixed(calls: Sequence[Decided], lengths: Sequence[Lengths], cut: Cut) -> float:
    """Return how mixed the backends are on both sides of a cut: 0 if not at all, high if a side is empty."""
    sides: Mapping[bool, Counter[str | None]] = {False: Counter(), True: Counter()}
    for call, one in zip(calls, lengths, strict=True):
        sides[cut.is_reached(one)][call.backend] += 1
    if not all(sides.values()):
        return float(len(calls))
    totals = ((counts.total(), sum(n * n for n in counts.values())) for counts in sides.values())
    return sum(total - squares / total for total, squares in totals)
