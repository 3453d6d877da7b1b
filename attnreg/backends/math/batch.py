"""The rows of each sequence of a batch, and how they are gathered into padded groups and scattered back.

Dense, packed and paged tensors are all read as rows, (T, H, D), by the row index of every token. Neighbouring
sequences are gathered into a group, (b, H, width, D), padded on the *left*. Their last tokens line up, so
that a single bottom-right mask is right for all of them. Tokens at the beginning of a sequence that a window
leaves without a score aren't gathered.

The host knows the width even where it doesn't know the lengths, as on a GPU. Reading lengths there would wait
for the device, and break CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class PaddedRows(NamedTuple):
    """One side of a group.

    Attributes:
        positions: (b, width) int64, the position of each token in its sequence. Negative for padding.
        rows: (b, width) int64, the row of each token in the flat tensor. The number of rows for padding.
        padded: whether the group may have padding.
        start: the position of the first token of each sequence, in a group without padding.
    """

    positions: Tensor
    rows: Tensor
    padded: bool
    start: int

    @property
    def width(self) -> int:
        """The length that all sequences are padded or cut to."""
        return self.rows.shape[1]

    def gather(self, flat: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the group's rows of (T, H, D) as (b, H, width, D), 0 where there is padding."""
        total = flat.shape[0]
        picked = flat.index_select(0, self.rows.clamp(max=total - 1).flatten()).to(dtype)
        if self.padded:
            # These rows belong to other sequences or to none, and may be NaN: 0 * NaN is not 0.
            picked.masked_fill_((self.rows == total).view(-1, 1, 1), 0)
        return picked.view(*self.rows.shape, *flat.shape[1:]).transpose(1, 2).contiguous()

    def scatter(self, group: Tensor, into: Tensor, *, add: bool = False) -> None:
        """Write (b, H, width, D) to its rows of `into`, (T + 1, H, D); padding goes to the last row."""
        values = group.transpose(1, 2).flatten(0, 1).to(into.dtype)
        write = into.index_add_ if add else into.index_copy_
        write(0, self.rows.flatten(), values)


class RowSequences(NamedTuple):
    """The rows of all sequences on one side of a call.

    Attributes:
        starts, lengths: (B,) integers, the first row and the number of tokens of each sequence. With pages
            `starts` is unused.
        bounds: upper bounds of the lengths, on the host.
        exact: whether `bounds` equal the lengths.
        total: the number of rows.
        table, page_size: the page numbers (B, pages) of each sequence, and the tokens of a page.
    """

    starts: Tensor
    lengths: Tensor
    bounds: list[int]
    exact: bool
    total: int
    table: Tensor | None
    page_size: int

    def span(self, batch: slice, width: int) -> PaddedRows:
        """Return the last `width` rows of some neighbouring sequences."""
        padded = not self.exact or min(self.bounds[batch]) < width
        positions = torch.arange(width, device=self.lengths.device) - (width - self.lengths[batch, None])
        known = positions.clamp(min=0)
        if self.table is None:
            rows = self.starts[batch, None] + known
        else:
            pages = self.table[batch].long().gather(1, known // self.page_size)
            rows = pages * self.page_size + known % self.page_size
        rows = rows.clamp(0, self.total - 1).masked_fill(positions < 0, self.total)
        return PaddedRows(positions, rows, padded, 0 if padded else self.bounds[batch.start] - width)


class Group(NamedTuple):
    """Neighbouring sequences that are computed together; `batch` are their indices."""

    batch: slice
    queries: PaddedRows
    keys: PaddedRows


def as_rows(x: Tensor) -> Tensor:
    """View (B, S, H, D) or (pages, page size, H, D) as rows, (T, H, D); packed tensors are rows already."""
    return x if x.dim() == 3 else x.flatten(0, 1)


def groups(
    queries: RowSequences, keys: RowSequences, window: tuple[int, int], cost: int, limit: int
) -> Iterator[Group]:
    """Yield the batch in groups of similar lengths, each with at most `limit` elements, at `cost` a token.

    Tokens and sequences without a score to compute may be left out: `window` is (left, right), bottom-right.
    """
    start, wide_q, wide_k, area = 0, 0, 0, 0
    for stop, bounds in enumerate(zip(queries.bounds, keys.bounds, strict=True)):
        len_q, len_k = _with_scores(*bounds, window)
        before, wide_q, wide_k = (wide_q, wide_k), max(wide_q, len_q), max(wide_k, len_k)
        count, area = stop - start + 1, area + len_q * len_k
        # Beyond twice the real work, padding costs more than another round of kernels.
        if count > 1 and (count * cost * (wide_q + wide_k) > limit or count * wide_q * wide_k > 2 * area):
            yield from _group(queries, keys, slice(start, stop), *before)
            start, wide_q, wide_k, area = stop, len_q, len_k, len_q * len_k
    yield from _group(queries, keys, slice(start, len(queries.bounds)), wide_q, wide_k)


def _with_scores(len_q: int, len_k: int, window: tuple[int, int]) -> tuple[int, int]:
    """Return how many queries of a sequence, and how many keys, a window leaves: the last ones."""
    left, right = window
    rows = len_q if right < 0 else min(len_q, len_k + right)
    return rows, len_k if left < 0 else min(len_k, len_q + left)


def _group(
    queries: RowSequences, keys: RowSequences, batch: slice, width_q: int, width_k: int
) -> Iterator[Group]:
    if width_q and width_k:
        yield Group(batch, queries.span(batch, width_q), keys.span(batch, width_k))


def sequences(
    x: Tensor, offsets: Tensor | None, longest: int, table: Tensor | None = None, used: Tensor | None = None
) -> RowSequences:
    """Return the sequences of a tensor of queries, keys or values; of each only the first `used` tokens.

    `x` is dense, packed, or pages; `offsets` is (B + 1,), `table` (B, pages) and `used` (B,), all of
    integers.
    """
    total, page_size = x.shape[:-2].numel(), x.shape[1]
    if offsets is None or table is not None:
        count, length = x.shape[:2] if table is None else (len(table), table.shape[1] * page_size)
        starts = torch.arange(count, device=x.device) * length
        lengths = torch.full((count,), length, device=x.device)
        bounds, exact = [length] * count, True
    else:
        starts, lengths = offsets[:-1], offsets.diff()
        exact = _on_host(lengths)
        bounds = lengths.tolist() if exact else [min(longest, total)] * len(lengths)
    if used is not None:
        lengths = torch.minimum(lengths, used)
        exact = _on_host(lengths)
        bounds = lengths.tolist() if exact else [min(longest, bound) for bound in bounds]
    return RowSequences(starts, lengths, bounds, exact, total, table, page_size)


def _on_host(lengths: Tensor) -> bool:
    """Return whether the lengths are in host memory, so that reading them waits for nothing."""
    return lengths.device.type == "cpu"
