"""Which keys each rank needs of each other rank: counts for all ranks at once, rows for two of them.

The pieces of all ranks, in the order of their rows, fill the batch without a gap. So the pieces whose keys
some queries see follow each other, and bisection finds them.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attnreg.parallel.layout import Layout, visible_pairs
from attnreg.parallel.spans import Range, Span, seen_of_several, united


class _Meeting(NamedTuple):
    """Ranges of rows and pieces that have rows in common: their numbers, and the common rows."""

    ranges: Tensor
    pieces: Tensor
    begins: Tensor
    ends: Tensor


class Needs:
    """Which keys each rank needs of each other rank, for one window.

    Tables are int64 (ranks, ranks) on the CPU: a row for each rank with queries, a column for each rank with
    keys. Integers, so that all ranks count alike.
    """

    def __init__(self, layout: Layout, left: int = -1, right: int = -1) -> None:
        self.layout, self.left, self.right = layout, left, right

    @functools.cached_property
    def moved(self) -> Tensor:
        """The table of rows that ranks need of other ranks."""
        places = [(rank, keys) for rank, ranges in enumerate(self._visible) for keys in ranges]
        met = self._meeting([keys for _, keys in places])
        return self._table([rank for rank, _ in places], met, met.ends - met.begins).fill_diagonal_(0)

    @functools.cached_property
    def repeated(self) -> Tensor:
        """The table of rows of other ranks that calls read; a row counts once for each piece that sees it."""
        met = self._met
        return self._table(self._held[2].tolist(), met, met.ends - met.begins).fill_diagonal_(0)

    @functools.cached_property
    def pairs(self) -> Tensor:
        """The table of the numbers of pairs of a query and a key that it sees."""
        met, (begins, ends, ranks) = self._met, self._held
        first, last, begin, end = begins[met.pieces], ends[met.pieces], begins[met.ranges], ends[met.ranges]
        # `visible_pairs` expects only queries that see at least one of the keys.
        begin = begin if self.right < 0 else torch.maximum(begin, first - self.right)
        end = end if self.left < 0 else torch.minimum(end, last + self.left)
        return self._table(ranks.tolist(), met, visible_pairs(begin, end, first, last, self.left, self.right))

    @functools.cached_property
    def distances(self) -> list[int]:
        """The distances from a rank back to the ranks whose keys it needs, over all ranks."""
        ranks, sources = self.moved.nonzero().unbind(1)
        return sorted(set(((ranks - sources) % self.layout.ranks).tolist()))

    @functools.cached_property
    def _visible(self) -> list[tuple[Range, ...]]:
        """For each rank the rows, of all ranks, that its queries see."""
        return [united(span.keys[0] for span, _ in spans) for spans in self._wholes]

    @functools.cached_property
    def _held(self) -> tuple[Tensor, Tensor, Tensor]:
        """The begins, ends and ranks of all pieces, in the order of their rows."""
        pieces = (
            (begin, end, rank) for rank, held in enumerate(self.layout.pieces) for _, begin, end in held
        )
        begins, ends, ranks = _integers(sorted(pieces)).view(-1, 3).unbind(1)
        return begins.contiguous(), ends, ranks

    @functools.cached_property
    def _met(self) -> _Meeting:
        """For each piece, in the order of their rows, the pieces whose keys its queries see."""
        spans = sorted((span.begin, span.keys[0]) for spans in self._wholes for span, _ in spans)
        return self._meeting([keys for _, keys in spans])

    def _meeting(self, ranges: Sequence[Range]) -> _Meeting:
        begins, ends, _ = self._held
        low, high = _integers(ranges).view(-1, 2).unbind(1)
        first = torch.searchsorted(begins, low.contiguous(), right=True) - 1
        counts = torch.searchsorted(begins, high.contiguous()) - first
        which = torch.arange(len(low), device="cpu").repeat_interleave(counts)
        before = (counts.cumsum(0) - counts - first)[which]
        pieces = torch.arange(len(which), device="cpu") - before
        common = torch.maximum(low[which], begins[pieces]), torch.minimum(high[which], ends[pieces])
        return _Meeting(which, pieces, *common)

    def _table(self, ranks_of_ranges: Sequence[int], met: _Meeting, numbers: Tensor) -> Tensor:
        """Return the sums of numbers by the ranks of ranges and of pieces."""
        ranks = self.layout.ranks
        places = _integers(ranks_of_ranges)[met.ranges] * ranks + self._held[2][met.pieces]
        return numbers.new_zeros(ranks * ranks).index_add_(0, places, numbers).view(ranks, ranks)

    def of(self, rank: int, source: int) -> tuple[Range, ...]:
        """Return the rows of `source`, another rank, that hold keys which queries of `rank` see."""
        if rank == source:
            return ()
        ranges, common = self._visible[rank], []
        for _, begin, end in self.layout.pieces[source]:
            # The first range that may share rows with the piece is the last range that doesn't begin after
            # it.
            number = max(bisect_right(ranges, (begin, self.layout.tokens)) - 1, 0)
            while number < len(ranges) and ranges[number][0] < end:
                low, high = max(begin, ranges[number][0]), min(end, ranges[number][1])
                if low < high:
                    common.append((low, high))
                number += 1
        return united(common)

    def whole(self, rank: int) -> list[tuple[Span, bool]]:
        """Return the span of each piece of a rank, and whether all its keys are on that rank."""
        return self._wholes[rank]

    @functools.cached_property
    def _wholes(self) -> list[list[tuple[Span, bool]]]:
        return [self._whole(rank) for rank in range(self.layout.ranks)]

    def _whole(self, rank: int) -> list[tuple[Span, bool]]:
        pieces, cu_seq = self.layout.pieces[rank], self.layout.cu_seq
        own, wholes = united((begin, end) for _, begin, end in pieces), []
        for number, piece in enumerate(pieces):
            (span,) = self.seen(rank, number, [(cu_seq[piece.document], cu_seq[piece.document + 1])])
            wholes.append((span, piece.document not in self.layout.cut or _lies_within(span.keys[0], own)))
        return wholes

    def alone(self, rank: int) -> int:
        """Return the number of pairs of a rank's queries that see no keys of other ranks."""
        bounds = self.left, self.right
        return sum(
            visible_pairs(span.begin, span.end, *span.keys[0], *bounds)
            for span, is_here in self.whole(rank)
            if is_here
        )

    def seen(self, rank: int, number: int, keys: Iterable[Range]) -> list[Span]:
        """Return the spans of a rank's piece with those keys, of some of its document, that it sees."""
        return seen_of_several(number, self.layout.pieces[rank][number], keys, self.left, self.right)


def _integers(numbers: Sequence[int] | Sequence[tuple[int, ...]]) -> Tensor:
    """Return numbers on the CPU, whatever torch's default device is."""
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def _lies_within(inner: Range, ranges: Iterable[Range]) -> bool:
    return any(begin <= inner[0] and inner[1] <= end for begin, end in ranges)
