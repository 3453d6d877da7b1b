"""`spread_documents`: which tokens go to which rank, in order or so that all ranks have the same work."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from attnreg.core.varlen.plans import window
from attnreg.errors import InvalidInputError, did_you_mean
from attnreg.parallel.estimates import (
    ALL_GATHER,
    ALL_TO_ALL,
    BACKWARD,
    RING,
    CallShape,
    Rates,
    estimates,
)
from attnreg.parallel.layout import (
    Layout,
    Piece,
    checked_offsets,
    contiguous,
    cut_at,
    joined,
    visible_pairs,
    zigzag,
)
from attnreg.parallel.needs import Needs

__all__ = ["spread_documents"]

# Outside of attention a token of a layer of width d takes about 12 * d * d multiplications; a pair of a query
# and a key takes 2 * d.
PAIRS_PER_WIDTH = 6
# Kernels compute whole tiles: at each bound of a mask half a tile more for each query.
PAIRS_PER_BOUND = 64
# Layouts are made before a call's heads are known, so they are compared for the heads of a large model in 16
# bits. Between nodes each GPU has a network card of 400 Gbit/s.
SHAPE = CallShape(heads=64, heads_k=8, dim=128, dim_v=128, bytes_each=2, needs_backward=True)
RANKS_OF_NODE, LINK_OF_NODES = 8, 45e9
# "contiguous" has unequal work, so it has to be faster by this share: only all_to_all evens the work out, and
# a program's heads may not be divisible by the ranks.
WORTH = 0.1


def spread_documents(
    cu_seq: Sequence[int] | Tensor,
    ranks: int,
    how: str = "balanced",
    *,
    is_causal: bool = True,
    window_size: Sequence[int] | None = (-1, -1),
    width: int = 0,
    method: str = "auto",
) -> Layout:
    """Spread a packed batch over ranks.

    Args:
        cu_seq: (documents + 1,), integers on any device: each document's begin in the batch; the batch's end.
            A tensor on a GPU is read back, which waits for the GPU.
        ranks: the number of ranks.
        how: "balanced", "zigzag" or "contiguous".
            "balanced" chooses by estimated time among three layouts. The first deals documents out whole
            where possible. The second has consecutive tokens of equal cost. The third is "contiguous", chosen
            where it saves a tenth or more.
            "zigzag" has two chunks of tokens for each rank, the i-th from either end.
            "contiguous" has equal numbers of consecutive tokens.
        is_causal, window_size: as for `varlen_attn`. "balanced" counts by them how many keys a query sees.
        width: the model's width, by which "balanced" counts what a token costs outside of attention. With 0
            it balances attention alone, and ranks may have very different numbers of tokens.
        method: the method whose time "balanced" estimates, as for `context_parallel`; with "auto" the
            fastest.

    Raises:
        InvalidInputError: an argument has a wrong type or value.
    """
    methods = ["auto", ALL_TO_ALL, ALL_GATHER, RING]
    if method not in methods:
        hint = did_you_mean(str(method), methods)
        raise InvalidInputError(f"method: got {method!r}, expected one of {methods}{hint}")
    if isinstance(width, bool) or not (isinstance(width, int | float) and 0 <= width < math.inf):
        raise InvalidInputError(f"width: got {width!r}, expected the width of a model, or 0")
    bound = window(window_size, is_causal)
    if how == "balanced":
        per_token = PAIRS_PER_WIDTH * width + PAIRS_PER_BOUND * sum(side >= 0 for side in bound)
        dealt = balanced(cu_seq, ranks, is_causal=is_causal, window_size=window_size, per_token=per_token)
        if not dealt.cut:  # no keys move, and all ranks have about the same work
            return dealt
        costs = _Costs(dealt.cu_seq, *bound, per_token)
        equal = dealt, _consecutive(costs, ranks)
        seconds = {layout: _seconds(layout, bound, width, method) for layout in equal}
        best, usual = min(equal, key=seconds.__getitem__), contiguous(costs.cu_seq, ranks)
        gains = _seconds(usual, bound, width, method) < (1 - WORTH) * seconds[best]
        return usual if gains else best
    makers = {"contiguous": contiguous, "zigzag": zigzag}
    known = ["balanced", *makers]
    if how not in known:  # a list, because `how` may be of an unhashable type
        raise InvalidInputError(f"how: got {how!r}, expected one of {known}{did_you_mean(str(how), known)}")
    return makers[how](cu_seq, ranks)


def _seconds(layout: Layout, bound: tuple[int, int], width: float, method: str) -> float:
    """Return the estimated seconds of a model's layer of shape `SHAPE`, by a method or the fastest."""
    rates = Rates() if layout.ranks <= RANKS_OF_NODE else Rates(link=LINK_OF_NODES)
    possible = [x for x in estimates(Needs(layout, *bound), SHAPE, rates) if not x.refusal]
    attention = min((x.seconds for x in possible if method in (x.name, "auto")), default=math.inf)
    seconds_of_pair = SHAPE.flops_of_pair * (1 + BACKWARD) / rates.flops
    return attention + PAIRS_PER_WIDTH * width * max(layout.rows) * seconds_of_pair


class _Costs(NamedTuple):
    """The cost of a piece, in pairs: keys that its queries see, and `per_token` for the rest of the model."""

    cu_seq: tuple[int, ...]
    left: int
    right: int
    per_token: float

    def of(self, piece: Piece) -> float:
        document, begin, end = piece
        first, last = self.cu_seq[document], self.cu_seq[document + 1]
        pairs = visible_pairs(begin, end, first, last, self.left, self.right)
        return pairs + self.per_token * (end - begin)

    def head(self, piece: Piece, cost: float) -> int:
        """Return the end of a piece's first rows that together have this cost."""
        low, high = piece.begin, piece.end
        while low < high:
            middle = (low + high) // 2
            if self.of(piece._replace(end=middle)) < cost:
                low = middle + 1
            else:
                high = middle
        return low


def _consecutive(costs: _Costs, ranks: int) -> Layout:
    """Return a layout of consecutive tokens, whose cost is equal on all ranks.

    With a window a rank then needs only the keys just before its first token, or just after its last token.
    """
    offsets = costs.cu_seq
    whole = list(cut_at(offsets, 0, offsets[-1]))
    reached, cuts = list(itertools.accumulate(map(costs.of, whole), initial=0.0)), [0]
    for number in range(1, ranks):
        cost = reached[-1] * number / ranks
        at = min(bisect_right(reached, cost) - 1, len(whole) - 1)
        cuts.append(costs.head(whole[at], cost - reached[at]))
    ends = itertools.pairwise([*cuts, offsets[-1]])
    return Layout(offsets, tuple(tuple(cut_at(offsets, begin, end)) for begin, end in ends))


def balanced(
    cu_seq: Sequence[int] | Tensor,
    ranks: int,
    *,
    is_causal: bool = False,
    window_size: Sequence[int] | None = (-1, -1),
    per_token: float = 0.0,
    tolerance: float = 0.02,
) -> Layout:
    """Spread documents over ranks by cost; a document is cut only where a rank would have too much work.

    `cu_seq` has integers, (documents + 1,), on any device. `per_token` is the cost of a token outside of
    attention, in pairs. The most loaded rank may exceed the mean by the share `tolerance` before a document
    is cut for it.

    Raises:
        InvalidInputError: an argument has a wrong type or value.
    """
    offsets = checked_offsets(cu_seq, ranks)
    costs = _Costs(offsets, *window(window_size, is_causal), per_token)
    whole = [
        Piece(number, begin, end)
        for number, (begin, end) in enumerate(itertools.pairwise(offsets))
        if end > begin
    ]
    target = sum(map(costs.of, whole)) / ranks
    loads, held = [0.0] * ranks, [list[Piece]() for _ in range(ranks)]
    for piece in sorted(whole, key=costs.of, reverse=True):
        _deal(piece, costs, target * (1 + tolerance), loads, held)
    for _ in range(2 * ranks):
        if not _even_out(costs, target, tolerance, loads, held):
            break
    return Layout(offsets, tuple(joined(sorted(pieces, key=lambda piece: piece.begin)) for pieces in held))


def _deal(piece: Piece, costs: _Costs, most: float, loads: list[float], held: list[list[Piece]]) -> None:
    """Add a document to the least loaded rank, or cut it for as many ranks as it needs."""
    ranks = sorted(range(len(loads)), key=loads.__getitem__)
    wanted = min(len(ranks), math.ceil(costs.of(piece) / most)) if most else 1
    for number, chunk in enumerate(_chunks(piece, costs, wanted)):
        rank = ranks[min(number, 2 * wanted - 1 - number)]
        held[rank].append(chunk)
        loads[rank] += costs.of(chunk)


def _chunks(piece: Piece, costs: _Costs, ranks: int) -> list[Piece]:
    """Cut a document for some ranks: with a window into one chunk a rank, else into two, from both ends.

    With a window chunks of equal cost need few keys of other ranks. Without a window the last rank would need
    all keys for few queries, so all ranks have equal numbers of the document's tokens.
    """
    begin, end = piece.begin, piece.end
    if ranks == 1:
        cuts = []
    elif costs.left >= 0:
        cuts = [costs.head(piece, costs.of(piece) * n / ranks) for n in range(1, ranks)]
    else:
        cuts = [begin + (end - begin) * n // (2 * ranks) for n in range(1, 2 * ranks)]
    places = itertools.pairwise([begin, *cuts, end])
    return [piece._replace(begin=low, end=high) for low, high in places if high > low]


def _even_out(
    costs: _Costs, target: float, tolerance: float, loads: list[float], held: list[list[Piece]]
) -> bool:
    """Move work from the most to the least loaded rank, cutting one piece; false if there is none to move."""
    most, least = loads.index(max(loads)), loads.index(min(loads))
    if loads[most] <= target * (1 + tolerance):
        return False
    amount = min(loads[most] - target, target - loads[least])
    # The smallest piece with enough work is cut, so that large pieces stay whole.
    enough = [piece for piece in held[most] if costs.of(piece) >= amount]
    piece = min(enough, key=costs.of) if enough else max(held[most], key=costs.of)
    end = costs.head(piece, min(amount, costs.of(piece)))
    moved = piece._replace(end=end)
    if end <= piece.begin:
        return False
    held[most].remove(piece)
    if end < piece.end:
        held[most].append(piece._replace(begin=end))
    held[least].append(moved)
    loads[most] -= costs.of(moved)
    loads[least] += costs.of(moved)
    return True
