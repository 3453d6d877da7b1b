"""Packed sequences as padded batches of few different shapes.

oneDNN compiles a product anew, for close to a millisecond, whenever a shape is new, and a ragged
batch has new lengths each time. So sequences are padded to a few sizes, and those of one size are
solved together, a power of two at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attnreg.core.backends.cpu.flash import Band
from attnreg.core.backends.cpu.sequences import UniformBatch

# Beyond every length.
_NO_BOUND = 2**40
# Rows are written in elements as large as there are: the time goes by their number.
_WIDEST = torch.complex128


class Places(NamedTuple):
    """Where the rows, or the keys, of some sequences and heads are: (sequences * key heads, rows).

    `source` and `target`, int64, count heads of packed rows, and differ in the padding: it is read
    from the first row of its sequence, and written to a place after all others.
    """

    source: Tensor
    target: Tensor
    is_padding: Tensor | None

    def of(self, heads: slice) -> Places:
        """Return the places of some of the heads."""
        is_padding = None if self.is_padding is None else self.is_padding[heads]
        return Places(self.source[heads], self.target[heads], is_padding)

    def padded(self, x: Tensor | None, padding: float) -> Tensor:
        """Return a number for each place, that of its head or 0, and for padding the one given."""
        if x is None:
            found = torch.zeros(self.source.shape, dtype=torch.float32, device="cpu")
        else:
            found = x[self.source]
        return found if self.is_padding is None else found.masked_fill_(self.is_padding, padding)

    def taken(self, x: Tensor, columns: Sequence[Tensor | float]) -> Tensor:
        """Return the heads of contiguous packed rows, with further columns."""
        size = x.size(2)
        found = x.new_empty(*self.source.shape, size + len(columns))
        taken = x.view(-1, size).index_select(0, self.source.flatten())
        found[..., :size] = taken.view(*self.source.shape, size)
        for place, column in enumerate(columns, start=size):
            found[..., place] = column
        return found

    def write(self, flat: Tensor, found: Tensor) -> None:
        """Write what was found to a tensor as `zeros` returns it."""
        wide = _WIDEST if found.size(2) * found.itemsize % _WIDEST.itemsize == 0 else found.dtype
        flat.view(wide).index_copy_(0, self.target.flatten(), found.flatten(0, 1).view(wide))


class PaddedBatch(NamedTuple):
    """Sequences of one padded size; query heads that share a key head are further rows of it.

    Where there is a band, row i sees key j if low <= j - i <= high.
    """

    rows: Places
    keys: Places
    groups: int
    band: Band | None

    @property
    def shape(self) -> tuple[int, int, int]:
        """How many heads there are, and how many rows and keys each has, without groups."""
        return self.rows.source.size(0), self.rows.source.size(1) // self.groups, self.keys.source.size(1)


def padded_batches(
    uniform: Iterable[UniformBatch], rows: Sequence[int], keys: Sequence[int]
) -> Iterator[PaddedBatch]:
    """Yield the sequences of some batches, padded; `rows` and `keys` are (tokens, heads) of both sides."""
    alike: dict[tuple[int, int, Band | None], list[tuple[int, int, int, int]]] = {}
    for one in uniform:
        sequences = alike.setdefault((_padded(one.rows), _padded(one.keys), _band(one)), [])
        for index in range(one.count):
            row, key = one.row + index * one.rows, one.key + index * one.keys
            sequences.append((row, one.rows, key, one.keys))
    groups = rows[1] // keys[1]
    for (height, width, band), sequences in alike.items():
        row, real_rows, key, real_keys = torch.tensor(sequences, device="cpu").T[..., None]
        places = _places(row, real_rows, height, rows, groups), _places(key, real_keys, width, keys, 1)
        yield PaddedBatch(*places, groups, band)


def powers_of_two(count: int, most: int) -> Iterator[slice]:
    """Cut `count` into slices of at most `most`, each as long as a power of two."""
    start = 0
    while start < count:
        size = 1 << (max(1, min(most, count - start)).bit_length() - 1)
        yield slice(start, start + size)
        start += size


def zeros(like: Tensor) -> tuple[Tensor, Tensor]:
    """Return packed zeros, and the same memory for `write`: by heads, and one more for padding."""
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


def _places(start: Tensor, length: Tensor, size: int, side: Sequence[int], groups: int) -> Places:
    tokens, heads = side
    head = torch.arange(heads, device="cpu").view(heads // groups, 1, groups)
    step = torch.arange(size, device="cpu")
    is_real = step < length
    token = start + step.where(is_real, 0)
    source = (token[:, None, :, None] * heads + head).view(-1, size * groups)
    if bool(is_real.all()):
        return Places(source, source, None)
    real = is_real[:, None, :, None].expand(-1, heads // groups, -1, groups).reshape(source.shape)
    return Places(source, source.where(real, tokens * heads), ~real)
