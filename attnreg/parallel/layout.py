"""Which rank has which tokens of a packed batch: plain numbers, without communication or a device."""

from __future__ import annotations

import itertools
import operator
import reprlib
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from attnreg.core.varlen.plans import window
from attnreg.errors import InvalidInputError

__all__ = ["Layout", "Piece"]

# One number or a tensor of numbers.
Rows = TypeVar("Rows", int, Tensor)


class Piece(NamedTuple):
    """Tokens of one document, as rows `begin` to `end` of the whole packed batch."""

    document: int
    begin: int
    end: int


@dataclass(frozen=True, eq=False)
class Layout:
    """A packed batch spread over ranks.

    Attributes:
        cu_seq: each document's begin in the whole batch, and the batch's end.
        pieces: for each rank its pieces, in the order of its rows. Each token is on one rank.
    """

    cu_seq: tuple[int, ...]
    pieces: tuple[tuple[Piece, ...], ...]

    def __post_init__(self) -> None:
        try:
            held = tuple(tuple(Piece(*map(operator.index, row)) for row in pieces) for pieces in self.pieces)
        except TypeError:
            expected = "for each rank some attnreg.Piece(document, begin, end), of integers"
            raise InvalidInputError(f"pieces: got {reprlib.repr(self.pieces)}, expected {expected}") from None
        # In one form, because ranks compare them.
        object.__setattr__(self, "cu_seq", checked_offsets(self.cu_seq, len(held)))
        object.__setattr__(self, "pieces", held)
        pieces = sorted(itertools.chain.from_iterable(held), key=operator.itemgetter(1))
        reached, documents = 0, range(len(self.cu_seq) - 1)
        for piece in pieces:
            document, begin, end = piece
            if begin != reached or end <= begin:
                raise InvalidInputError(f"pieces: got {piece} after row {reached}, expected each row once")
            is_there = document in documents and self.cu_seq[document] <= begin
            if not (is_there and end <= self.cu_seq[document + 1]):
                raise InvalidInputError(f"pieces: got {piece}, expected rows of one document")
            reached = end
        if reached != self.tokens:
            raise InvalidInputError(f"pieces: got rows up to {reached}, expected all {self.tokens}")

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.pieces)

    @property
    def tokens(self) -> int:
        """The number of tokens of the whole batch."""
        return self.cu_seq[-1]

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """The number of tokens of each rank."""
        return tuple(sum(piece.end - piece.begin for piece in pieces) for pieces in self.pieces)

    @cached_property
    def cut(self) -> dict[int, dict[int, list[Piece]]]:
        """For each document that several ranks hold: its pieces by rank."""
        by_document: dict[int, dict[int, list[Piece]]] = {}
        for rank, pieces in enumerate(self.pieces):
            for piece in pieces:
                by_document.setdefault(piece.document, {}).setdefault(rank, []).append(piece)
        return {document: by_rank for document, by_rank in by_document.items() if len(by_rank) > 1}

    def index(self, rank: int) -> Tensor:
        """Return the rows of the whole batch that a rank holds, in its order: int64 (T,), on the CPU."""
        with torch.device("cpu"):  # whatever a program's default device is
            ranges = [torch.arange(piece.begin, piece.end) for piece in self._of(rank)]
            return torch.cat([torch.empty(0, dtype=torch.int64), *ranges])

    def positions(self, rank: int) -> Tensor:
        """Return the position of each of a rank's tokens in its document: int64 (T,), on the CPU."""
        rows, of_rank = self.index(rank), self._of(rank)
        starts = rows.new_tensor([self.cu_seq[document] for document, _, _ in of_rank])
        lengths = rows.new_tensor([end - begin for _, begin, end in of_rank])
        return rows - starts.repeat_interleave(lengths)

    def cost(self, rank: int, left: int = -1, right: int = -1) -> int:
        """Return the number of pairs of a rank's queries and the keys that they see within a window."""
        left, right = window((left, right), False)
        return sum(
            visible_pairs(begin, end, self.cu_seq[document], self.cu_seq[document + 1], left, right)
            for document, begin, end in self._of(rank)
        )

    def imbalance(self, left: int = -1, right: int = -1) -> float:
        """Return the cost of the most loaded rank, as a multiple of the mean: 1 is perfect."""
        costs = [self.cost(rank, left, right) for rank in range(self.ranks)]
        return max(costs) * self.ranks / sum(costs) if sum(costs) else 1.0

    def _of(self, rank: int) -> tuple[Piece, ...]:
        if rank not in range(self.ranks):
            raise InvalidInputError(f"rank: got {rank!r}, expected one from 0 to {self.ranks - 1}")
        return self.pieces[rank]


def visible_pairs(begin: Rows, end: Rows, first: Rows, last: Rows, left: int, right: int) -> Rows:
    """Count the pairs of a query and a key that it sees; all are int64 tensors of one shape, or integers.

    Queries are rows `begin` to before `end`, keys rows `first` to before `last`. Each query has to see a key.
    """
    # No row is after both ends, so a bound of their sum excludes nothing.
    back: Any = last + end if left < 0 else left
    ahead: Any = last + end if right < 0 else right
    # Queries before `low` see the first key, queries from `high` on see the last key.
    low, high = _clamped(first + back, begin, end), _clamped(last - ahead, begin, end)
    lowest = first * (low - begin) + _sum(low, end) - back * (end - low)
    highest = _sum(begin, high) + ahead * (high - begin) + (last - 1) * (end - high)
    count: Rows = highest - lowest + end - begin
    return count


def _clamped(row: Rows, low: Rows, high: Rows) -> Rows:
    if isinstance(row, Tensor):
        return row.clamp(low, high)
    return min(max(row, low), high)


def _sum(begin: Rows, end: Rows) -> Rows:
    """Return the sum of the numbers from `begin` to before `end`."""
    return (begin + end - 1) * (end - begin) // 2


def checked_offsets(cu_seq: Sequence[int] | Tensor, ranks: int) -> tuple[int, ...]:
    """Return offsets (documents + 1,) as integers; reading a tensor on a GPU waits for the GPU.

    Raises:
        InvalidInputError: they aren't integers that begin with 0 and never decrease, or `ranks` is no number
            from 1 on.
    """
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise InvalidInputError(f"ranks: got {ranks!r}, expected a number from 1 on")
    numbers = cu_seq.tolist() if isinstance(cu_seq, Tensor) else cu_seq
    try:
        offsets = tuple(map(operator.index, numbers))
    except TypeError:
        offsets = ()
    if not offsets or offsets[0] != 0 or any(a > b for a, b in itertools.pairwise(offsets)):
        got = repr(numbers)
        if isinstance(cu_seq, Tensor) and cu_seq.dim() != 1:
            got = f"shape {tuple(cu_seq.shape)}"
        expected = "integers from 0 on, none less than before, in one dimension"
        raise InvalidInputError(f"cu_seq: got {got}, expected {expected}")
    return offsets


def cut_at(cu_seq: tuple[int, ...], begin: int, end: int) -> Iterable[Piece]:
    """Yield rows of the whole batch as pieces of its documents."""
    while begin < end:
        document = bisect_right(cu_seq, begin) - 1
        upto = min(end, cu_seq[document + 1])
        yield Piece(document, begin, upto)
        begin = upto


def joined(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """Merge pieces that follow each other in their document."""
    runs: list[Piece] = []
    for piece in pieces:
        if runs and runs[-1].document == piece.document and runs[-1].end == piece.begin:
            runs[-1] = runs[-1]._replace(end=piece.end)
        else:
            runs.append(piece)
    return tuple(runs)


def _chunks(cu_seq: tuple[int, ...], count: int) -> list[list[Piece]]:
    ends = [cu_seq[-1] * number // count for number in range(count + 1)]
    return [list(cut_at(cu_seq, begin, end)) for begin, end in itertools.pairwise(ends)]


def contiguous(cu_seq: Sequence[int] | Tensor, ranks: int) -> Layout:
    """Return a layout of equal numbers of consecutive tokens, rank after rank.

    `cu_seq` has integers, (documents + 1,), on any device. Raises as `checked_offsets` does.
    """
    offsets = checked_offsets(cu_seq, ranks)
    return Layout(offsets, tuple(map(joined, _chunks(offsets, ranks))))


def zigzag(cu_seq: Sequence[int] | Tensor, ranks: int) -> Layout:
    """Cut the batch into two chunks for each rank; rank i has chunk i, and chunk i from the end.

    With one document and a causal mask all ranks then have the same work. `cu_seq` has integers, (documents +
    1,), on any device. Raises as `checked_offsets` does.
    """
    offsets = checked_offsets(cu_seq, ranks)
    chunks = _chunks(offsets, 2 * ranks)
    pairs = [(*chunks[rank], *chunks[-1 - rank]) for rank in range(ranks)]
    return Layout(offsets, tuple(map(joined, pairs)))
