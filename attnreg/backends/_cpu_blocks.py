"""Packed sequences as padded batches of few different shapes.

oneDNN compiles a product anew, for close to a millisecond, whenever a shape is new, and a ragged
batch has new lengths each time. So sequences are padded to a few sizes, and those of one size are
solved together, a power of two at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from attnreg.backends._cpu_runs import Run

__all__ = ["Batch", "batches", "portions", "tiles"]

# The longest side of one product, in rows or keys; with a band shorter, for there is more to skip.
_LONGEST, _LONGEST_IN_BAND = 1024, 512

Band = tuple[int, int]
Span = tuple[int, int]


class Batch(NamedTuple):
    """Sequences of one padded size and one band: packed rows and keys as (start, length) each."""

    rows: int
    keys: int
    band: Band | None
    row_spans: list[Span]
    key_spans: list[Span]


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
    shift, everything = run.keys - run.rows, run.rows + run.keys
    return (shift - left if left >= 0 else -everything, shift + right if right >= 0 else everything)


def _in_tile(band: Band | None, shift: int, rows: int, keys: int) -> Band | None:
    if band is None or (band[0] + shift <= 1 - rows and band[1] + shift >= keys - 1):
        return None
    return (band[0] + shift, band[1] + shift)
