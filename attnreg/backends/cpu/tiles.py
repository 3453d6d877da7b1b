"""How a masked problem is cut into calls of a kernel that knows only "all keys" and "causal".

The kernel's causal mask is aligned top-left, the contract's bottom-right: a causal square is one
call, and the keys before it another. It knows no window. Cutting the rows of one into strips, and
the keys of each strip into parts, needs no mask larger than a strip, and lets the cost grow with
what is visible.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

__all__ = ["Part", "Strip", "Visible", "cut", "visible"]

OPEN = (-1, -1)

# Rows of a strip under a window: low strips compute little that is masked, high ones run faster.
_LOW, _HIGH = 64, 192


class Visible(NamedTuple):
    """What is left of a problem without the rows that see nothing and the keys nobody sees.

    Both lie in front, so the bottom-right alignment stays. A bound of `window` that masks nothing
    is -1.
    """

    row: int
    key: int
    window: tuple[int, int]


class Part(NamedTuple):
    """`keys` keys from `key` on, all of them visible or those in a `band`, as in `Mask`."""

    key: int
    keys: int
    band: tuple[int, int] | None = None


class Strip(NamedTuple):
    """`rows` rows from `row` on and the parts of the keys that they see.

    A strip of several `count` stands for as many, each `step` rows and keys after the one before.
    """

    row: int
    rows: int
    parts: tuple[Part, ...]
    count: int = 1  # type: ignore[assignment]  # not the tuple's method
    step: int = 0


def visible(len_q: int, len_k: int, window: tuple[int, int]) -> Visible | None:
    """Return what is visible of a problem, or None if nothing is."""
    left, right = window
    row = max(0, len_q - len_k - right) if right >= 0 else 0
    if row >= len_q or len_k == 0:
        return None
    key = max(0, row + len_k - len_q - left) if left >= 0 else 0
    masks_left, masks_right = 0 <= left < len_k - key - 1, 0 <= right < len_q - row - 1
    return Visible(row, key, (left if masks_left else -1, right if masks_right else -1))


@functools.lru_cache(maxsize=1024)
def cut(len_q: int, len_k: int, window: tuple[int, int]) -> tuple[Strip, ...]:
    """Return the strips of a problem, in the order of their rows; rows in none see no key."""
    seen = visible(len_q, len_k, window)
    if seen is None:
        return ()
    rows, keys = len_q - seen.row, len_k - seen.key
    if seen.window == OPEN:
        strips = [Strip(0, rows, (Part(0, keys),))]
    elif seen.window[0] >= 0:
        strips = _tiles(rows, keys, seen.window)
    else:
        strips = _stairs(rows, keys, seen.window[1])
    return tuple(_moved(strip, seen.row, seen.key) for strip in strips)


def _stairs(rows: int, keys: int, right: int) -> list[Strip]:
    """Cut a mask without a left bound: keys that all rows see, a causal square, rows that see all."""
    square = rows - right
    before = (Part(0, keys - square),) if keys > square else ()
    strips = [Strip(0, square, (*before, Part(keys - square, square, band=(1 - square, 0))))]
    return [*strips, Strip(square, right, (Part(0, keys),))] if right else strips


def _tiles(rows: int, keys: int, window: tuple[int, int]) -> list[Strip]:
    """Cut a window with a left bound into strips with the keys in reach, equal neighbours as one."""
    shift = keys - rows
    low, high = shift - window[0], shift + window[1] if window[1] >= 0 else keys
    size = _LOW if high - low < 4 * _LOW else _HIGH
    strips: list[Strip] = []
    for row in range(0, rows, size):
        height = min(size, rows - row)
        first, last = max(0, row + low), min(keys, row + height + high)
        strip = Strip(row, height, (_banded(row, height, first, last, low, high),))
        if strips and _continues(strips[-1], strip, size):
            strips[-1] = strips[-1]._replace(count=strips[-1].count + 1, step=size)
        else:
            strips.append(strip)
    return strips


def _banded(row: int, rows: int, first: int, last: int, low: int, high: int) -> Part:
    near, far = low + row - first, high + row - first
    masks = near > 1 - rows or far < last - first - 1
    return Part(first, last - first, band=(near, far) if masks else None)


def _continues(strip: Strip, following: Strip, step: int) -> bool:
    return _moved(strip, strip.count * step, strip.count * step)[:3] == following[:3]


def _moved(strip: Strip, rows: int, keys: int) -> Strip:
    parts = tuple(part._replace(key=part.key + keys) for part in strip.parts)
    return strip._replace(row=strip.row + rows, parts=parts)
