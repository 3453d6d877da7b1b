"""Packed sequences as padded batches of few different shapes.

oneDNN compiles a product anew, for close to a millisecond, whenever a shape is new, and a ragged
batch has new lengths each time. So sequences are padded to a few sizes, and those of one size are
solved together, a power of two at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor

    from attnreg.backends._cpu_runs import Run

__all__ = ["Batch", "batches", "portions", "tiles"]

# The longest side of one product, in rows or keys; with a band shorter, for there is more to skip.
_LONGEST, _LONGEST_IN_BAND = 1024, 512

# A bound beyond every length.
_ANYWHERE = 2**40

Band = tuple[int, int]
Span = tuple[int, int]


class Batch(NamedTuple):
    """Sequences of one padded size and one band: packed rows and keys as (start, length) each."""

    rows: int
    keys: int
    band: Band | None
    row_spans: list[Span]
    key_spans: list[Span]


class Places(NamedTuple):
    """The packed rows of some padded sequences.

    Attributes:
        count: how many sequences.
        index: the packed row of each row, int64 (count * size,); padding has its neighbour's.
        padding: bool (count, size), None if there is none.
        real: which rows are no padding, int64, None if all.
    """

    count: int
    index: Tensor
    padding: Tensor | None
    real: Tensor | None

    @classmethod
    def of(cls, spans: Sequence[Span], size: int) -> Places:
        """Return the places of sequences that are padded to `size`."""
        start, length = torch.tensor(spans, device="cpu").unsqueeze(-1).unbind(1)
        step = torch.arange(size, device="cpu")
        index = (start + torch.minimum(step, length - 1)).flatten()
        padding = step >= length
        if not padding.any():
            return cls(len(spans), index, None, None)
        return cls(len(spans), index, padding, (~padding).flatten().nonzero()[:, 0])

    def take(self, x: Tensor) -> Tensor:
        """Return packed rows (T, ...) as (count, size, ...)."""
        return x.index_select(0, self.index).unflatten(0, (self.count, -1))

    def put(self, x: Tensor, padded: Tensor) -> None:
        """Write (count, size, ...) to packed rows (T, ...), without the padding."""
        rows, index = padded.flatten(0, 1), self.index
        if self.real is not None:
            rows, index = rows.index_select(0, self.real), index.index_select(0, self.real)
        x.index_copy_(0, index, rows)


class Tile(NamedTuple):
    """A rectangle of scores, and which of them count."""

    row: int
    rows: int
    key: int
    keys: int
    band: Band | None


def batches(runs: Iterable[Run]) -> Iterator[Batch]:
    """Return the batches that hold all sequences of some runs."""
    alike: dict[tuple[int, int, Band | None], Batch] = {}
    for run in runs:
        band = _band(run)
        longest = _LONGEST if band is None else _LONGEST_IN_BAND
        shape = (_padded(run.rows, longest), _padded(run.keys, longest), band)
        batch = alike.setdefault(shape, Batch(*shape, [], []))
        for index in range(run.count):
            batch.row_spans.append((run.row + index * run.rows, run.rows))
            batch.key_spans.append((run.key + index * run.keys, run.keys))
    yield from alike.values()


def portions(count: int, most: int) -> Iterator[slice]:
    """Cut `count` into slices of at most `most`, all of a length that is a power of two."""
    start = 0
    while start < count:
        size = 1 << (min(most, count - start).bit_length() - 1)
        yield slice(start, start + size)
        start += size


def tiles(batch: Batch) -> list[Tile]:
    """Cut the scores of a batch into equal tiles, without those in which none counts."""
    longest = _LONGEST if batch.band is None else _LONGEST_IN_BAND
    rows, keys = (size // -(-size // longest) for size in batch[:2])
    found = []
    for row in range(0, batch.rows, rows):
        for key in range(0, batch.keys, keys):
            band = _in_tile(batch.band, row - key, rows, keys)
            if band is None or (band[1] > -rows and band[0] < keys):
                found.append(Tile(row, rows, key, keys, band))
    return found


def _padded(length: int, longest: int) -> int:
    count = -(-length // longest)
    step = count * (16 if length <= 128 else 32)
    return -(-length // step) * step


def _band(run: Run) -> Band | None:
    left, right = run.window
    if left < 0 and right < 0:
        return None
    shift = run.keys - run.rows
    return (shift - left if left >= 0 else -_ANYWHERE, shift + right if right >= 0 else _ANYWHERE)


def _in_tile(band: Band | None, shift: int, rows: int, keys: int) -> Band | None:
    if band is None or (band[0] + shift <= 1 - rows and band[1] + shift >= keys - 1):
        return None
    return (band[0] + shift, band[1] + shift)
