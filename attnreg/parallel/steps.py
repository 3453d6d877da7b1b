"""The steps in which a rank computes its queries: what it receives and sends in each, and its calls.

In the first step a rank uses its own keys. With *all_gather* there is one more step, with the keys of all
other ranks that its remaining queries need. With the *ring* there is a step for each distance between two
ranks: a rank receives from the one that is so far before it, and sends to the one that is so far behind it.
Each rank works the steps out from the layout, without communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from attnreg.parallel.layout import Layout
from attnreg.parallel.needs import Needs
from attnreg.parallel.spans import Range, Span, united


class Step(NamedTuple):
    """What one rank does in one step.

    Attributes:
        sends: for each rank which of this rank's rows it gets; empty in a step without communication.
        receives: for each rank which of its rows this one gets.
        spans: what is computed.
    """

    sends: tuple[tuple[Range, ...], ...]
    receives: tuple[tuple[Range, ...], ...]
    spans: tuple[Span, ...]


def gathering(needs: Needs, rank: int) -> list[Step]:
    """Return the steps of all_gather: queries whose keys are all here, then the others with all keys."""
    ranks, found = range(needs.layout.ranks), needs.whole(rank)
    here, with_others = ([span for span, is_here in found if is_here == wanted] for wanted in (True, False))
    steps = [Step((), (), tuple(here))]
    if needs.distances:
        sends = tuple(needs.of(other, rank) for other in ranks)
        receives = tuple(needs.of(rank, other) for other in ranks)
        steps.append(Step(sends, receives, tuple(with_others)))
    return steps


def rotating(needs: Needs, rank: int) -> list[Step]:
    """Return the steps of the ring: this rank's own keys, then those of one other rank at a time."""
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
