"""The steps in which a rank computes its queries: what it receives and sends in each, and its calls.

In the first step a rank uses its own keys. With *all_gather* there is one more step, with the keys of all
other ranks that its remaining queries need. With the *ring* there is a step for each distance between two
ranks: a rank receives from the one that is so far before it, and sends to the one that is so far behind it.
Each rank works the steps out from the layout, without communication.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from attnreg.parallel.layout import Layout, visible_pairs
from attnreg.parallel.spans import Range, Span, row_count, seen, seen_of_several, united


class Step(NamedTuple):
    """What one rank does in one step.

    Attributes:
        sends: for each rank which of this rank's rows it gets; empty in a step without communication.
        receives: for each rank which of its rows this one gets.
        own: whether the calls also use this rank's own keys: they stand before those received.
        spans: what is computed.
    """

    sends: tuple[tuple[Range, ...], ...]
    receives: tuple[tuple[Range, ...], ...]
    own: bool
    spans: tuple[Span, ...]

    @property
    def received(self) -> int:
        """How many rows this rank receives."""
        return row_count(one for ranges in self.receives for one in ranges)

    @property
    def sent(self) -> int:
        """How many rows this rank sends."""
        return row_count(one for ranges in self.sends for one in ranges)


class Needs:
    """Which keys each rank needs of each other one, for one window."""

    def __init__(self, layout: Layout, left: int = -1, right: int = -1) -> None:
        self.layout, self.left, self.right = layout, left, right

    @functools.cached_property
    def _found(
        self,
    ) -> tuple[
        dict[tuple[int, int], tuple[Range, ...]], dict[tuple[int, int], int], dict[tuple[int, int], int]
    ]:
        """Rows, pairs of query and key, and rows as often as pieces see them, of each pair of ranks."""
        keys: dict[tuple[int, int], list[Range]] = {}
        pairs: dict[tuple[int, int], int] = {}
        bounds = self.left, self.right
        for by_rank in self.layout.cut.values():
            for (rank, pieces), (source, others) in itertools.product(by_rank.items(), repeat=2):
                for piece, (_, *rows) in itertools.product(pieces, others):
                    span = seen(0, piece, (rows[0], rows[1]), *bounds)
                    if span is not None:
                        keys.setdefault((rank, source), []).extend(span.keys)
                        count = visible_pairs(span.begin, span.end, rows[0], rows[1], *bounds)
                        pairs[rank, source] = pairs.get((rank, source), 0) + count
        repeated = {both: row_count(ranges) for both, ranges in keys.items()}
        return {both: united(ranges) for both, ranges in keys.items()}, pairs, repeated

    def of(self, rank: int, source: int) -> tuple[Range, ...]:
        """Return the rows of `source`, another rank, that hold keys which queries of `rank` see."""
        return self._found[0].get((rank, source), ()) if rank != source else ()

    def pairs(self, rank: int, source: int) -> int:
        """Return how many pairs there are of a query of `rank` and a key of `source` that it sees."""
        count = self._found[1].get((rank, source), 0)
        return count + self._alone[rank] if rank == source else count

    def rows(self, rank: int, source: int) -> int:
        """Return how many rows of `source`, another rank, a rank needs."""
        return row_count(self.of(rank, source))

    def repeated(self, rank: int, source: int) -> int:
        """Return how many rows the calls of a rank read of another one: each for each piece that sees it."""
        return self._found[2].get((rank, source), 0)

    def whole(self, rank: int) -> list[tuple[Span, bool]]:
        """Return what each piece of a rank sees, and whether all of it is on that rank."""
        return self._wholes[rank]

    @functools.cached_property
    def _wholes(self) -> list[list[tuple[Span, bool]]]:
        return [self._whole(rank) for rank in range(self.layout.ranks)]

    def _whole(self, rank: int) -> list[tuple[Span, bool]]:
        pieces, cu_seq = self.layout.pieces[rank], self.layout.cu_seq
        own, found = united((begin, end) for _, begin, end in pieces), []
        for number, piece in enumerate(pieces):
            (span,) = self.seen(rank, number, [(cu_seq[piece.document], cu_seq[piece.document + 1])])
            found.append((span, piece.document not in self.layout.cut or _lies_within(span.keys[0], own)))
        return found

    def alone(self, rank: int) -> int:
        """Return how many pairs there are of queries of a rank that see no keys of others."""
        bounds = self.left, self.right
        return sum(
            visible_pairs(span.begin, span.end, *span.keys[0], *bounds)
            for span, is_here in self.whole(rank)
            if is_here
        )

    @functools.cached_property
    def _alone(self) -> list[int]:
        """For each rank the pairs of the documents that it has to itself."""
        layout, bounds = self.layout, (self.left, self.right)
        return [
            sum(
                visible_pairs(begin, end, layout.cu_seq[document], layout.cu_seq[document + 1], *bounds)
                for document, begin, end in pieces
                if document not in layout.cut
            )
            for pieces in layout.pieces
        ]

    def at(self, distance: int) -> bool:
        """Whether any rank needs keys of the rank that is so far before it."""
        ranks = self.layout.ranks
        return any(self.of(rank, (rank - distance) % ranks) for rank in range(ranks))

    def seen(self, rank: int, number: int, keys: Iterable[Range]) -> list[Span]:
        """Return what the queries of a rank's piece see of some keys of their document."""
        return seen_of_several(number, self.layout.pieces[rank][number], keys, self.left, self.right)


def gathering(needs: Needs, rank: int) -> list[Step]:
    """Return the steps of all_gather: queries whose keys are all here, then the others with all keys."""
    ranks, found = range(needs.layout.ranks), needs.whole(rank)
    here, with_others = ([span for span, is_here in found if is_here == wanted] for wanted in (True, False))
    steps = [Step((), (), True, tuple(here))]
    if any(map(needs.at, ranks[1:])):
        sends = tuple(needs.of(other, rank) for other in ranks)
        receives = tuple(needs.of(rank, other) for other in ranks)
        steps.append(Step(sends, receives, True, tuple(with_others)))
    return steps


def rotating(needs: Needs, rank: int) -> list[Step]:
    """Return the steps of the ring: this rank's own keys, then those of one other rank at a time."""
    layout, ranks, steps = needs.layout, needs.layout.ranks, []
    for distance in range(ranks):
        if distance and not needs.at(distance):
            continue  # on every rank alike
        source, target = (rank - distance) % ranks, (rank + distance) % ranks
        spans: list[Span] = []
        for number in range(len(layout.pieces[rank])):
            spans += needs.seen(rank, number, _keys(layout, source, number, rank))
        sends = tuple(needs.of(x, rank) if x == target else () for x in range(ranks)) if distance else ()
        receives = tuple(needs.of(rank, x) if x == source else () for x in range(ranks)) if distance else ()
        steps.append(Step(sends, receives, not distance, tuple(spans)))
    return steps


def _keys(layout: Layout, source: int, number: int, rank: int) -> Sequence[Range]:
    """Return the rows that `source` has of the document of a piece of `rank`."""
    piece = layout.pieces[rank][number]
    by_rank = layout.cut.get(piece.document)
    if by_rank is None:  # all on one rank
        whole = layout.cu_seq[piece.document], layout.cu_seq[piece.document + 1]
        return [whole] if source == rank else []
    return united((begin, end) for _, begin, end in by_rank.get(source, ()))


def _lies_within(one: Range, ranges: Iterable[Range]) -> bool:
    return any(begin <= one[0] and one[1] <= end for begin, end in ranges)
