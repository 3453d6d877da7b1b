"""Packed sequences as padded batches of few different shapes.

oneDNN compiles a product for each new shape, which takes close to a millisecond, and each ragged batch has
new lengths. So sequences are padded to a few sizes. Sequences of equal size are computed together, a power of
two at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attnreg.backends.cpu.flash import Band
from attnreg.backends.cpu.sequences import UniformBatch

# A bound beyond every length.
_NO_BOUND = 2**40
# Rows are written in the largest elements, because the time depends on the number of elements.
_WIDEST = torch.complex128


class RowPlaces(NamedTuple):
    """The indices of rows, or keys, of some sequences and heads: (sequences * key heads, rows).

    `source` and `target`, int64, are indices into the packed tensor viewed as (tokens * heads, D). They
    differ in the padding, which is read from the first row of its sequence, and written past the last row.
    """

    source: Tensor
    target: Tensor
    is_padding: Tensor | None

    def of(self, heads: slice) -> RowPlaces:
        """Return the places of some of the heads."""
        is_padding = None if self.is_padding is None else self.is_padding[heads]
        return RowPlaces(self.source[heads], self.target[heads], is_padding)

    def gather_numbers(self, x: Tensor | None, padding: float) -> Tensor:
        """Return `x` at each index, or 0 without `x`, and `padding` for padding.

        `x` is (tokens * heads,). The result has the shape of `source`; without `x` it is float32.
        """
        if x is None:
            numbers = torch.zeros(self.source.shape, dtype=torch.float32, device="cpu")
        else:
            numbers = x[self.source]
        return numbers if self.is_padding is None else numbers.masked_fill_(self.is_padding, padding)

    def gather_rows(self, x: Tensor, columns: Sequence[Tensor | float]) -> Tensor:
        """Return rows of a contiguous packed tensor (tokens, heads, D) by index, with further columns.

        The result is (sequences * key heads, rows, D + columns) in the dtype of `x`.
        """
        size = x.size(2)
        rows = x.new_empty(*self.source.shape, size + len(columns))
        heads = x.view(-1, size).index_select(0, self.source.flatten())
        rows[..., :size] = heads.view(*self.source.shape, size)
        for place, column in enumerate(columns, start=size):
            rows[..., place] = column
        return rows

    def write(self, flat: Tensor, rows: Tensor) -> None:
        """Write rows, (sequences * key heads, rows, D) in any dtype, to the flat tensor that `zeros` returns.

        `flat` is (tokens * heads + 1, D) in the dtype of `rows`.
        """
        wide = _WIDEST if rows.size(2) * rows.itemsize % _WIDEST.itemsize == 0 else rows.dtype
        flat.view(wide).index_copy_(0, self.target.flatten(), rows.flatten(0, 1).view(wide))


class PaddedBatch(NamedTuple):
    """Sequences of equal padded size; query heads that share a key head are further rows of it.

    With a band, row i sees key j if low <= j - i <= high.
    """

    rows: RowPlaces
    keys: RowPlaces
    groups: int
    band: Band | None

    @property
    def shape(self) -> tuple[int, int, int]:
        """The number of heads, and the numbers of rows and keys of each, without groups."""
        return self.rows.source.size(0), self.rows.source.size(1) // self.groups, self.keys.source.size(1)


def padded_batches(
    uniform: Iterable[UniformBatch], rows: Sequence[int], keys: Sequence[int]
) -> Iterator[PaddedBatch]:
    """Pad the sequences of some batches, and group them by size; `rows` and `keys` are (tokens, heads)."""
    alike: dict[tuple[int, int, Band | None], list[tuple[int, int, int, int]]] = {}
    for batch in uniform:
        sequences = alike.setdefault((_padded(batch.rows), _padded(batch.keys), _band(batch)), [])
        for index in range(batch.count):
            row, key = batch.row + index * batch.rows, batch.key + index * batch.keys
            sequences.append((row, batch.rows, key, batch.keys))
    groups = rows[1] // keys[1]
    for (height, width, band), sequences in alike.items():
        row, real_rows, key, real_keys = torch.tensor(sequences, device="cpu").T[..., None]
        places = _places(row, real_rows, height, rows, groups), _places(key, real_keys, width, keys, 1)
        yield PaddedBatch(*places, groups, band)


def powers_of_two(count: int, most: int) -> Iterator[slice]:
    """Cut `range(count)` into slices of at most `most`, whose lengths are powers of two."""
    start = 0
    while start < count:
        size = 1 << (max(1, min(most, count - start)).bit_length() - 1)
        yield slice(start, start + size)
        start += size


def zeros(like: Tensor) -> tuple[Tensor, Tensor]:
    """Return packed zeros (tokens, heads, D), and the same memory as (tokens * heads + 1, D) for `write`.

    The last row of the second tensor receives the padding.
    """
    tokens, heads, size = like.shape
    flat = like.new_zeros(tokens * heads + 1, size)
    return flat[:-1].view(tokens, heads, size), flat


def _band(batch: UniformBatch) -> Band | None:
    (left, right), shift = batch.window, batch.keys - batch.rows
    if left < 0 and right < 0:
        return None
    return shift - left if left >= 0 else -_NO_BOUND, shift + right if right >= 0 else _NO_BOUND


def _padded(length: int) -> int:
    step = 16 if length <= 128 else 32 if length <= 1024 else 128
    return -(-length // step) * step


def _places(start: Tensor, length: Tensor, size: int, side: Sequence[int], groups: int) -> RowPlaces:
    tokens, heads = side
    head = torch.arange(heads, device="cpu").view(heads // groups, 1, groups)
    step = torch.arange(size, device="cpu")
    is_real = step < length
    token = start + step.where(is_real, 0)
    source = (token[:, None, :, None] * heads + head).view(-1, size * groups)
    if bool(is_real.all()):
        return RowPlaces(source, source, None)
    real = is_real[:, None, :, None].expand(-1, heads // groups, -1, groups).reshape(source.shape)
    return RowPlaces(source, source.where(real, tokens * heads), ~real)
