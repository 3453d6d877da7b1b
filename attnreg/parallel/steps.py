"""The steps in which a rank computes its queries: the rows that it receives and sends, and its calls.

In the first step a rank uses its own keys. *all_gather* has a second step, with the keys of all other ranks
that the remaining queries need. The *ring* has a step for each distance d between two ranks: rank r receives
from rank r - d and sends to rank r + d, modulo the number of ranks.
Each rank computes its steps from the layout, without communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from attnreg.parallel.layout import Layout
from attnreg.parallel.needs import Needs
from attnreg.parallel.spans import Range, Span, united


class Step(NamedTuple):
    """A step of a rank.

    Attributes:
        sends: by target rank, the rows that this rank sends; empty without communication.
        receives: by source rank, the rows that this rank receives; empty without communication.
        spans: the queries that it computes, with their keys.
    """

    sends: tuple[tuple[Range, ...], ...]
    receives: tuple[tuple[Range, ...], ...]
    spans: tuple[Span, ...]


def gathering(needs: Needs, rank: int) -> list[Step]:
    """Return the steps of all_gather: queries that see only own keys, then the remaining queries."""
    ranks, wholes = range(needs.layout.ranks), needs.whole(rank)
    here, with_others = ([span for span, is_here in wholes if is_here == wanted] for wanted in (True, False))
    steps = [Step((), (), tuple(here))]
    if needs.distances:
        sends = tuple(needs.of(other, rank) for other in ranks)
        receives = tuple(needs.of(rank, other) for other in ranks)
        steps.append(Step(sends, receives, tuple(with_others)))
    return steps


def rotating(needs: Needs, rank: int) -> list[Step]:
    """Return the steps of the ring: this rank's own keys, then the keys of each other rank in turn."""
    layout, ranks, steps = needs.layout, needs.layout.ranks, []
    for distance in [0, *needs.distances]:  # on every rank alike
        source, target = (rank - distance) % ranks, (rank + distance) % ranks
        spans: list[Span] = []
        for number in range(len(layout.pieces[rank])):
            spans += needs.seen(rank, number, _keys(layout, source, number, rank))
        sends = tuple(needs.of(x, rank) if x == target else () for x in range(ranks)) if distance else ()
        receives = tuple(needs.of(rank, x) if x == source else () for x in range(ranks)) if distance else ()
        steps.append(Step(sends, receives, tuple(spans)))
    return steps


def _keys(layout: Layout, source: int, number: int, rank: int) -> Sequence[Range]:
    """Return the rows that `source` has of the document of a piece of `rank`."""
    piece = layout.pieces[rank][number]
    by_rank = layout.cut.get(piece.document)
    if by_rank is None:  # all on one rank
        whole = layout.cu_seq[piece.document], layout.cu_seq[piece.document + 1]
        return [whole] if source == rank else []
    return united((begin, end) for _, begin, end in by_rank.get(source, ()))
