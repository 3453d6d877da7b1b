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

import torch
from torch import Tensor

from attnreg.parallel.layout import Layout, visible_pairs
from attnreg.parallel.spans import Range, Span, grouped, seen, seen_of_several, united

# Rows of a tensor: a run of them, or their numbers.
Rows = slice | Tensor


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
        return _length(one for ranges in self.receives for one in ranges)

    @property
    def sent(self) -> int:
        """How many rows this rank sends."""
        return _length(one for ranges in self.sends for one in ranges)


def _length(ranges: Iterable[Range]) -> int:
    return sum(end - begin for begin, end in ranges)


class Needs:
    """Which keys each rank needs of each other one, for one window."""

    def __init__(self, layout: Layout, left: int = -1, right: int = -1) -> None:
        self.layout, self.left, self.right = layout, left, right

    @functools.cached_property
    def _found(self) -> tuple[dict[tuple[int, int], tuple[Range, ...]], dict[tuple[int, int], int]]:
        """Rows, and pairs of query and key, of each pair of ranks that has some."""
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
        return {both: united(ranges) for both, ranges in keys.items()}, pairs

    def of(self, rank: int, source: int) -> tuple[Range, ...]:
        """Return the rows of `source`, another rank, that hold keys which queries of `rank` see."""
        return self._found[0].get((rank, source), ()) if rank != source else ()

    def pairs(self, rank: int, source: int) -> int:
        """Return how many pairs there are of a query of `rank` and a key of `source` that it sees."""
        count = self._found[1].get((rank, source), 0)
        return count + self._alone[rank] if rank == source else count

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
    layout, ranks = needs.layout, range(needs.layout.ranks)
    here: list[Span] = []
    with_others: list[Span] = []
    own = united((begin, end) for _, begin, end in layout.pieces[rank])
    for number, piece in enumerate(layout.pieces[rank]):
        (span,) = needs.seen(
            rank, number, [(layout.cu_seq[piece.document], layout.cu_seq[piece.document + 1])]
        )
        is_here = piece.document not in layout.cut or _covered(span.keys[0], own)
        (here if is_here else with_others).append(span)
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


def _covered(one: Range, ranges: Iterable[Range]) -> bool:
    return any(begin <= one[0] and one[1] <= end for begin, end in ranges)


class Part(NamedTuple):
    """One packed call of a step, on a device.

    Attributes:
        window: as a kernel is told.
        queries: which of this rank's rows it computes.
        keys: which of the step's keys it uses, in its order.
        cu_q, cu_k, max_q, max_k: as of `varlen_attn`.
    """

    window: tuple[int, int]
    queries: Rows
    keys: Rows
    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int


class Move(NamedTuple):
    """What a step sends and receives, on a device: which rows, and how many to and from each rank."""

    rows: Rows
    sends: list[int]
    receives: list[int]


class Prepared(NamedTuple):
    """A step on a device; `move` is None in one without communication."""

    move: Move | None
    own: bool
    parts: list[Part]


def prepared(steps: Sequence[Step], layout: Layout, rank: int, device: torch.device) -> list[Prepared]:
    """Return steps with what the device has to know of them."""
    own_rows, result = layout.index(rank), []
    for step in steps:
        rows = [own_rows] if step.own else []
        rows += [torch.arange(*one) for ranges in step.receives for one in ranges]
        keys = _places(rows, layout.tokens)
        queries = _places([own_rows], layout.tokens)
        parts = [_part(window, spans, queries, keys, device) for window, spans in grouped(step.spans)]
        move = None
        if step.sends:
            sent = [torch.arange(*one) for ranges in step.sends for one in ranges]
            index = queries[torch.cat(sent)] if sent else torch.empty(0, dtype=torch.int64)
            move = Move(rows_on(index, device), *(list(map(_length, x)) for x in (step.sends, step.receives)))
        result.append(Prepared(move, step.own, parts))
    return result


def _places(rows: list[Tensor], tokens: int) -> Tensor:
    """Return for each row of the whole batch where it stands among these rows; -1 if nowhere."""
    places = torch.full((tokens,), -1)
    there = torch.cat([torch.empty(0, dtype=torch.int64), *rows])
    places[there] = torch.arange(len(there))
    return places


def _part(
    window: tuple[int, int], spans: Sequence[Span], queries: Tensor, keys: Tensor, device: torch.device
) -> Part:
    rows_q = torch.cat([queries[span.begin : span.end] for span in spans])
    rows_k = torch.cat([keys[begin:end] for span in spans for begin, end in span.keys])
    lengths_q, lengths_k = [span.end - span.begin for span in spans], [span.key_count for span in spans]
    cu_q = cu_k = on_device(torch.tensor([0, *lengths_q]).cumsum(0).int(), device)
    if lengths_k != lengths_q:
        cu_k = on_device(torch.tensor([0, *lengths_k]).cumsum(0).int(), device)
    rows = rows_on(rows_q, device), rows_on(rows_k, device)
    return Part(window, *rows, cu_q, cu_k, max(lengths_q), max(lengths_k))


def rows_on(index: Tensor, device: torch.device) -> Rows:
    """Return rows as a slice, if they follow each other, else on the device."""
    if not len(index):
        return slice(0, 0)
    if bool((index.diff() == 1).all()):
        return slice(int(index[0]), int(index[-1]) + 1)
    return on_device(index, device)


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to a device; from pinned memory the host needn't wait for that."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
