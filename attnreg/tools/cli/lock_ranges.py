"""Ranges of lengths for the rows of a lockfile: where backends change, and where one can't run further calls.

`split` divides decided calls into ranges with one backend each. `narrow` ends a range where its backend can't
run the calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from attnreg.core.contract.lengths import (
    LENGTHS,
    LIMITS,
    Cut,
    Lengths,
    bounds,
    changes_at,
    cuts_of_window,
    sum_of,
    with_lengths,
)
from attnreg.core.contract.spec import AttentionSpec
from attnreg.core.policy.ranges import LengthRange, Ranges, includes


class Decided(NamedTuple):
    """A call of a kind, the backend that is to run it, and the source of that decision."""

    spec: AttentionSpec
    backend: str
    source: str


def with_other_lengths(spec: AttentionSpec, cuts: Iterable[Cut]) -> list[AttentionSpec]:
    """Return calls of a spec's kind with a length at each cut, and with one below it; the closest first.

    Where queries are as many as keys, so they are in further calls. A window is as in calls of such lengths.
    """
    others: dict[AttentionSpec, int] = {}
    for cut in dict.fromkeys((*cuts, *cuts_of_window(*spec.window))):
        for name in sorted(cut.names):
            at = None if name.startswith("tokens") and not spec.varlen else changes_at(spec, cut, name)
            for number in () if at is None else (at - 1, at):
                distance = abs(number - getattr(spec, name))
                others.setdefault(_of_lengths(spec, {name: number}), distance)
                pair = {"max_q": number, "max_k": number}
                if name in pair and spec.max_q == spec.max_k:
                    others.setdefault(_of_lengths(spec, pair), distance)
    return sorted(others, key=lambda other: others[other])


def _of_lengths(spec: AttentionSpec, changes: Mapping[str, int]) -> AttentionSpec:
    """Return a call with other lengths; a packed call has enough sequences for its tokens, and no more."""
    lengths = Lengths.of(spec)._replace(**changes)
    for tokens, longest in (("tokens_q", spec.max_q), ("tokens_k", spec.max_k)):
        if tokens in changes:
            lengths = lengths._replace(batch=max(lengths.batch, -(-changes[tokens] // max(longest, 1))))
    tokens_q = min(max(lengths.tokens_q, lengths.max_q), lengths.batch * lengths.max_q)
    tokens_k = min(max(lengths.tokens_k, lengths.max_k), lengths.batch * lengths.max_k)
    other = with_lengths(spec, **lengths._replace(tokens_q=tokens_q, tokens_k=tokens_k)._asdict())
    return replace(other, window=bounds(spec.window, False, other.max_q, other.max_k))


def split(calls: Sequence[Decided], cuts: Iterable[Cut]) -> list[tuple[Ranges, list[Decided]]]:
    """Divide calls of a kind into ranges of lengths, so that each range has a single backend.

    Together the ranges have all lengths, and no length is in two of them. Each ends at one of `cuts`. Where
    these don't tell the backends apart, it ends at a power of two, or else at a length of a call.
    """
    places = tuple(dict.fromkeys(cuts))
    return _divided_while((), calls, lambda _, part: _best_cut(part, places))


def narrow(
    ranges: Ranges,
    calls: Sequence[Decided],
    cuts: Iterable[Cut],
    runs: Callable[[AttentionSpec], bool],
) -> list[tuple[Ranges, list[Decided]]]:
    """Return the parts of ranges in which a backend runs calls of any lengths, as far as cuts show.

    `calls` are those in the ranges that it runs; each part has at least one of them. `runs` says whether it
    runs another call.
    """
    places = tuple(dict.fromkeys(cuts))
    return _divided_while(ranges, calls, lambda around, part: _first_limit(around, part, places, runs))


def _divided_while(
    ranges: Ranges,
    calls: Sequence[Decided],
    next_cut: Callable[[Ranges, Sequence[Decided]], Cut | None],
) -> list[tuple[Ranges, list[Decided]]]:
    """Divide ranges with calls for as long as there is a cut to divide a part at."""
    done: list[tuple[Ranges, list[Decided]]] = []
    parts: list[tuple[Ranges, list[Decided]]] = [(ranges, list(calls))]
    while parts:
        ranges, part = parts.pop()
        cut = next_cut(ranges, part)
        if cut is None:
            done.append((ranges, part))
        else:
            parts += _divided(ranges, part, cut)
    return done


def _divided(ranges: Ranges, calls: Sequence[Decided], cut: Cut) -> Iterator[tuple[Ranges, list[Decided]]]:
    """Yield the parts of ranges on both sides of a cut, the upper first; none without a call."""
    for is_reached in (True, False):
        if side := [call for call in calls if cut.is_reached(Lengths.of(call.spec)) is is_reached]:
            yield _limited(ranges, cut, is_reached), side


def _first_limit(
    ranges: Ranges, calls: Sequence[Decided], cuts: Sequence[Cut], runs: Callable[[AttentionSpec], bool]
) -> Cut | None:
    """Return a cut between a call and the closest one in the ranges that doesn't run; None if all run."""
    ends = tuple(cut for length_range in ranges for cut in length_range.cuts)
    of_classes = {
        tuple(cut.is_reached(Lengths.of(call.spec)) for cut in cuts): call.spec for call in reversed(calls)
    }
    for spec in of_classes.values():
        for other in with_other_lengths(spec, (*cuts, *ends)):
            if includes(ranges, Lengths.of(other)) and not runs(other):
                return _cut_between(Lengths.of(spec), Lengths.of(other), cuts)
    return None


def _cut_between(here: Lengths, beyond: Lengths, cuts: Sequence[Cut]) -> Cut:
    """Return the cut of the fewest lengths between two calls, of these the closest to the second."""
    steps = zip(LENGTHS, here, beyond, strict=True)
    exact = (Cut.of(name, at=max(was, now)) for name, was, now in steps if was != now)
    between = [cut for cut in cuts if cut.is_reached(here) is not cut.is_reached(beyond)] or list(exact)
    return min(between, key=lambda cut: (len(cut.names), abs(sum_of(cut.terms, beyond) - cut.at)))


def _limited(ranges: Ranges, cut: Cut, is_reached: bool) -> Ranges:
    """Return the part of ranges at a cut and above it, or below it."""
    by_terms = {length_range.terms: length_range for length_range in ranges}
    low, high = by_terms.get(cut.terms, LengthRange(cut.terms, None, None))[1:]
    if is_reached:
        low = cut.at if low is None else max(low, cut.at)
    else:
        high = cut.at - 1 if high is None else min(high, cut.at - 1)
    return tuple({**by_terms, cut.terms: LengthRange(cut.terms, low, high)}.values())


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
        values = sorted({each[number] for each in lengths})
        yield from (Cut.of(name, at=high) for _, high in pairwise(values))


def _mixed(calls: Sequence[Decided], lengths: Sequence[Lengths], cut: Cut) -> float:
    """Return how mixed the backends are on both sides of a cut: 0 if not at all, high if a side is empty."""
    sides: Mapping[bool, Counter[str]] = {False: Counter(), True: Counter()}
    for call, lengths_of_call in zip(calls, lengths, strict=True):
        sides[cut.is_reached(lengths_of_call)][call.backend] += 1
    if not all(sides.values()):
        return float(len(calls))
    totals = ((counts.total(), sum(n * n for n in counts.values())) for counts in sides.values())
    return sum(total - squares / total for total, squares in totals)
