"""How masked scores are cut into blocks, so that little of what is hidden is computed.

`row_blocks` cuts them for torch's kernel, which knows only "all keys" and "causal", and that aligned
top-left: a causal mask of the contract, aligned bottom-right, is a square that the kernel takes as it is,
and the keys before it. A window is cut into blocks of rows with the keys in reach, so that no mask is
larger than a block, and the cost grows with what is visible.

`key_blocks` cuts them for the batched products in `bfloat16.py`.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from attnreg.backends.cpu.sequences import Window, visible

# In a band (low, high) row i sees key j if low <= j - i <= high.
Band = tuple[int, int]

OPEN = (-1, -1)

# Rows of a block under a window: low blocks compute little that is hidden, high ones run faster.
_LOW, _HIGH = 64, 192

# Scores of a block of keys of one head: two heads at a time stay in the cache.
_AREA = 2**20
# Keys of a block: at least as many as make a product worth its call, and under a band, whose corners are
# computed for nothing, at most as many as make a fast one.
_LEAST_KEYS, _NARROW, _WIDE = 32, 64, 256


class KeyRange(NamedTuple):
    """`keys` keys from `key` on, all of them visible or those in a band, counted from the first of both."""

    key: int
    keys: int
    band: Band | None = None


class RowBlock(NamedTuple):
    """`rows` rows from `row` on, and the keys that they see, as ranges.

    A block with a `count` stands for as many, each `step` rows and keys after the one before.
    """

    row: int
    rows: int
    ranges: tuple[KeyRange, ...]
    count: int = 1  # type: ignore[assignment]  # not the tuple's method
    step: int = 0


@functools.lru_cache(maxsize=1024)
def row_blocks(len_q: int, len_k: int, window: Window) -> tuple[RowBlock, ...]:
    """Return the blocks of a sequence, in the order of their rows; rows in none see no key."""
    seen = visible(len_q, len_k, window)
    if seen is None:
        return ()
    rows, keys = len_q - seen.row, len_k - seen.key
    if seen.window == OPEN:
        blocks = [RowBlock(0, rows, (KeyRange(0, keys),))]
    elif seen.window[0] >= 0:
        blocks = _windowed(rows, keys, seen.window)
    else:
        blocks = _causal(rows, keys, seen.window[1])
    return tuple(_moved(block, seen.row, seen.key) for block in blocks)


def _causal(rows: int, keys: int, right: int) -> list[RowBlock]:
    """Cut a mask without a left bound: keys that all rows see, a causal square, rows that see all."""
    square = rows - right
    before = (KeyRange(0, keys - square),) if keys > square else ()
    blocks = [RowBlock(0, square, (*before, KeyRange(keys - square, square, band=(1 - square, 0))))]
    return [*blocks, RowBlock(square, right, (KeyRange(0, keys),))] if right else blocks


def _windowed(rows: int, keys: int, window: Window) -> list[RowBlock]:
    """Cut a window with a left bound into blocks with the keys in reach; equal neighbours become one."""
    shift = keys - rows
    low, high = shift - window[0], shift + window[1] if window[1] >= 0 else keys
    size = _LOW if high - low < 4 * _LOW else _HIGH
    blocks: list[RowBlock] = []
    for row in range(0, rows, size):
        height = min(size, rows - row)
        first, last = max(0, row + low), min(keys, row + height + high)
        block = RowBlock(row, height, (_banded(row, height, first, last, low, high),))
        if blocks and _continues(blocks[-1], block, size):
            blocks[-1] = blocks[-1]._replace(count=blocks[-1].count + 1, step=size)
        else:
            blocks.append(block)
    return blocks


def _banded(row: int, rows: int, first: int, last: int, low: int, high: int) -> KeyRange:
    near, far = low + row - first, high + row - first
    hides = near > 1 - rows or far < last - first - 1
    return KeyRange(first, last - first, band=(near, far) if hides else None)


def _continues(block: RowBlock, following: RowBlock, step: int) -> bool:
    return _moved(block, block.count * step, block.count * step)[:3] == following[:3]


def _moved(block: RowBlock, rows: int, keys: int) -> RowBlock:
    ranges = tuple(each._replace(key=each.key + keys) for each in block.ranges)
    return block._replace(row=block.row + rows, ranges=ranges)


class KeyBlock(NamedTuple):
    """A rectangle of scores: some keys, and the rows that see one of them."""

    row: int
    rows: int
    key: int
    keys: int
    band: Band | None


@functools.lru_cache(maxsize=256)
def key_blocks(rows: int, group: int, keys: int, band: Band | None) -> tuple[KeyBlock, ...]:
    """Return the blocks of a sequence, no two with a key in common; `group` query heads share a key head."""
    low, high = (-rows, keys) if band is None else band
    reach = min(rows, high - low + 1)
    size = max(_LEAST_KEYS, _AREA // (reach * group) // 32 * 32)
    if band is not None:
        size = min(size, max(_NARROW, min(_WIDE, 1 << reach.bit_length() - 1)))
    found = []
    for key in range(0, keys, size):
        width = min(size, keys - key)
        first, last = max(0, key - high), min(rows, key + width - low)
        if first < last:
            here = (low + first - key, high + first - key)
            hides = here[0] > 1 - (last - first) or here[1] < width - 1
            found.append(KeyBlock(first, last - first, key, width, here if hides else None))
    return tuple(found)
