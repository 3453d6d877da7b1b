"""Which keys each query sees, and the table of blocks that kernels skip, mask or run whole.

Offsets, windows and `seqused_k` leave each query one range of keys, and `key_ranges` several. So one kernel
serves all masks of the contract but a boolean bias. All of it is computed on the device, without a wait.
The backends whose kernels read it are flex and FA4.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, Self

import torch
from torch import Tensor

from attnreg.core.contract.backend import Call
from attnreg.core.launching.offsets import derived_from
from attnreg.core.launching.rows import sequences_of
from attnreg.core.torchlib.layout import stream_of

# Queries and keys of a block of the table. Larger blocks hide less, and keep the table of long batches small.
BLOCK, LARGE_BLOCK = 128, 512
# How many blocks a table of small ones may have: 64 MB for its four lists.
MOST_BLOCKS = 2**22

# Past every key.
_BEYOND = 2**31 - 1


class Visible(NamedTuple):
    """The keys that each query sees.

    Attributes:
        low, high: int32 (1 or B, R, S_q), the first key of each range and its end (exclusive). Both are equal
            in an empty range.
        place: int32 (1 or B, S_q), the key at the query's own place, from which ALiBi counts distances.
        sequence: int32 (S_q,), the sequence of each query of a packed batch; 0 in a dense one.
        table: as `block_table` returns it; empty if the call has only ranges.
    """

    low: Tensor
    high: Tensor
    place: Tensor
    sequence: Tensor
    table: tuple[Tensor, ...]

    def differs(self, newer: Self) -> Tensor:
        """Return on the device whether a query sees other keys now."""
        return (self.low != newer.low).any() | (self.high != newer.high).any()

    @property
    def blind(self) -> Tensor:
        """Which queries see no key, bool (1 or B, S_q)."""
        return (self.low >= self.high).all(1)


def block_size(tokens_q: int, tokens_k: int) -> int:
    """Return how many queries and keys a block of the table has."""
    small = -(-tokens_q // BLOCK) * -(-tokens_k // BLOCK)
    return BLOCK if small <= MOST_BLOCKS else LARGE_BLOCK


def derived_of_packed(query: Tensor, key: Tensor, call: Call, masked: bool = False) -> Visible:
    """Return what the queries of a packed call see, derived once for all layers that share their offsets.

    Query and key are (T, H, D). `masked` is as in `block_table`.
    """
    stream, rows = stream_of(query) if query.is_cuda else 0, (query.shape[0], key.shape[0])
    tensors = call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_k, call.key_ranges
    make = partial(of_packed, *rows, call.window, masked)
    return derived_from(tensors, stream, ("visible", *rows, call.window, masked), make)


def rounded(ranges: int) -> int:
    """Return the number of ranges a query that programs for so many have: a power of two.

    Programs have a fixed number of ranges. So new batches need no new programs.
    """
    return 1 << max(ranges - 1, 0).bit_length()


def of_packed(
    tokens_q: int,
    tokens_k: int,
    window: tuple[int, int],
    masked: bool,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    used: Tensor | None,
    key_ranges: Tensor | None = None,
) -> Visible:
    """Return what the queries of a packed batch see.

    Offsets are int32 (B + 1,), `used` is int32 (B,) and `key_ranges` int32 (S_q, R, 2), as in `Call`.
    """
    rows, inside, sequence = sequences_of(tokens_q, cu_seqlens_q)
    # The row of zeros is for a batch without a sequence.
    ends_q = torch.cat((cu_seqlens_q[1:], cu_seqlens_q.new_zeros(1)))
    starts = torch.cat((cu_seqlens_k[:-1], cu_seqlens_k.new_zeros(1)))
    lengths = torch.cat((cu_seqlens_k.diff(), cu_seqlens_k.new_zeros(1)))
    if used is not None:
        lengths = torch.minimum(lengths, torch.cat((used, used.new_zeros(1))))
    start, length = starts[sequence], lengths[sequence]
    place = rows - ends_q[sequence] + length  # in its sequence
    low, high = (bound[None] for bound in _windowed(place, length, window))
    if key_ranges is not None:
        low, high = _in_ranges(low, high, key_ranges)
    low, high = (torch.where(inside, start + bound, 0)[None] for bound in (low, high))
    return _with_table(low, high, (start + place)[None], sequence, (tokens_q, tokens_k), masked)


class QueryPlaces(NamedTuple):
    """What functions of scores get for each query of a packed batch.

    Attributes:
        table: int32 (4, S_q), the number of its sequence, its place there, and the first and the last key of
            its sequence. Functions read tensors at these places, so all of them exist: queries without a key
            have the first places of a sequence that has queries and keys.
    """

    table: Tensor

    def differs(self, newer: Self) -> Tensor:
        """Return on the device whether a query has other places now."""
        return (self.table != newer.table).any()


def places_of_packed(
    tokens_q: int, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, used: Tensor | None
) -> QueryPlaces:
    """Return the places of a packed batch. Offsets are int32 (B + 1,), `used` is int32 (B,), as in `Call`."""
    rows, inside, sequence = sequences_of(tokens_q, cu_seqlens_q)
    lengths = cu_seqlens_k.diff() if used is None else torch.minimum(cu_seqlens_k.diff(), used)
    # The row of zeros is for a batch without a sequence.
    lengths, lengths_q = (torch.cat((x, x.new_zeros(1))) for x in (lengths, cu_seqlens_q.diff()))
    has_scores = (lengths_q > 0) & (lengths > 0)
    exists = inside & has_scores[sequence]
    sequence = torch.where(exists, sequence, has_scores.int().argmax().int())
    place = torch.where(exists, rows - cu_seqlens_q[sequence], 0)
    first = cu_seqlens_k[sequence]
    last = first + (lengths[sequence] - 1).clamp(min=0)
    return QueryPlaces(torch.stack((sequence, place, first, last)).to(torch.int32))


def of_dense(
    tokens_q: int,
    tokens_k: int,
    window: tuple[int, int],
    masked: bool,
    device: torch.device,
    used: Tensor | None = None,
) -> Visible:
    """Return what the queries of a dense batch see: `used` is int32 (B,), or None if all keys count."""
    rows = torch.arange(tokens_q, dtype=torch.int32, device=device)[None]
    length = rows.new_full((1, 1), tokens_k) if used is None else used[:, None].to(torch.int32)
    place = rows - tokens_q + length
    low, high = _windowed(place, length.expand(place.shape), window)
    sequence = torch.zeros_like(rows[0])
    return _with_table(low[:, None], high[:, None], place, sequence, (tokens_q, tokens_k), masked)


def _windowed(place: Tensor, length: Tensor, window: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return the bounds of what queries see, as places in their sequences; equal if they see nothing."""
    left, right = window
    # A window may be as wide as int32 allows, so a sum with it is of 64 bits.
    low = (place.long() - left).clamp(min=0) if left >= 0 else torch.zeros_like(place)
    high = torch.minimum(place.long() + right + 1, length) if right >= 0 else length
    high = torch.maximum(low, high)
    return low.to(torch.int32), high.to(torch.int32)


def _in_ranges(low: Tensor, high: Tensor, key_ranges: Tensor) -> tuple[Tensor, Tensor]:
    """Return what remains of bounds (1, S_q) in each range; empty ranges fill up their number (`rounded`)."""
    count = key_ranges.shape[1]
    more = rounded(count) - count
    padded = torch.nn.functional.pad(key_ranges, (0, 0, 0, more))
    first, last = padded.permute(2, 1, 0).unbind(0)
    low = torch.maximum(low, first)
    return low, torch.maximum(low, torch.minimum(high, last))


def _with_table(
    low: Tensor, high: Tensor, place: Tensor, sequence: Tensor, tokens: tuple[int, int], masked: bool
) -> Visible:
    table = block_table(low, high, tokens[1], block_size(*tokens), masked)
    return Visible(low.contiguous(), high.contiguous(), place.contiguous(), sequence, table)


def block_table(low: Tensor, high: Tensor, tokens_k: int, size: int, masked: bool) -> tuple[Tensor, ...]:
    """Return the blocks of keys for each block of queries, and of queries for each block of keys.

    Args:
        low, high: int32 (B, R, S_q), the R ranges of keys that each query sees.
        tokens_k: the number of keys.
        size: the queries, and the keys, of a block.
        masked: whether no block may be run without its mask, as a bias hides further keys.

    Returns:
        Eight int32 tensors, as in torch's `BlockMask`. The first two are number (B, 1, blocks of queries) and
        indices (B, 1, blocks of queries, blocks of keys) of the masked blocks. The next two are the same for
        the whole blocks. The last four are the same with queries and keys exchanged.
    """
    touched, whole = _blocks(low, high, tokens_k, size)
    if masked:
        whole = torch.zeros_like(whole)
    lists = [_listed(blocks) for blocks in (touched & ~whole, whole)]
    lists += [_listed(blocks.mT) for blocks in (touched & ~whole, whole)]
    return tuple(x[:, None] for pair in lists for x in pair)


def _blocks(low: Tensor, high: Tensor, tokens_k: int, size: int) -> tuple[Tensor, Tensor]:
    """Return which blocks have a visible score, maybe, and in which every score is visible, surely."""
    blind = low >= high
    first = _per_block(low.masked_fill(blind, _BEYOND), size, _BEYOND).amin(-1)
    last = _per_block(high.masked_fill(blind, -1), size, -1).amax(-1)
    # Rows behind the last query hide nothing; a blind row hides the whole block.
    latest = _per_block(low.masked_fill(blind, _BEYOND), size, -1).amax(-1)
    earliest = _per_block(high.masked_fill(blind, -1), size, _BEYOND).amin(-1)
    starts = torch.arange(-(-tokens_k // size), dtype=torch.int32, device=low.device) * size
    first, last, latest, earliest = (x[..., None] for x in (first, last, latest, earliest))
    touched = (first < starts + size) & (last > starts)
    whole = (latest <= starts) & (earliest >= starts + size)
    return touched.any(1), whole.any(1)


def _per_block(bounds: Tensor, size: int, filler: int) -> Tensor:
    """Return (B, R, S_q) as (B, R, blocks, size), with fillers behind the last query."""
    padded = torch.nn.functional.pad(bounds, (0, -bounds.shape[-1] % size), value=filler)
    return padded.view(*bounds.shape[:-1], -1, size)


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return of each row of a boolean table how many blocks it has, and their numbers, these first."""
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), order.to(torch.int32).contiguous()
