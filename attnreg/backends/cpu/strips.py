"""How the scores of a padded batch are cut into strips of keys, each with the rows that see it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from attnreg.backends.cpu.batches import Band

__all__ = ["KeyStrip", "strips_of"]

# Scores of one strip of one head: two heads at a time stay in the cache.
_AREA = 2**20
# Keys of a strip: at least as many as make a product worth its call, and under a band, whose
# corners are computed for nothing, at most as many as make a fast one.
_LOWEST, _NARROW, _WIDE = 32, 64, 256


class KeyStrip(NamedTuple):
    """A rectangle of scores; where there is a band, row i sees key j if low <= j - i <= high."""

    row: int
    rows: int
    key: int
    keys: int
    band: Band | None


@functools.lru_cache(maxsize=256)
def strips_of(rows: int, groups: int, keys: int, band: Band | None) -> tuple[KeyStrip, ...]:
    """Return the strips of a problem; no two have a key in common."""
    low, high = (-rows, keys) if band is None else band
    reach = min(rows, high - low + 1)
    size = max(_LOWEST, _AREA // (reach * groups) // 32 * 32)
    if band is not None:
        size = min(size, max(_NARROW, min(_WIDE, 1 << reach.bit_length() - 1)))
    found = []
    for key in range(0, keys, size):
        width = min(size, keys - key)
        first, last = max(0, key - high), min(rows, key + width - low)
        if first < last:
            here = (low + first - key, high + first - key)
            masks = here[0] > 1 - (last - first) or here[1] < width - 1
            found.append(KeyStrip(first, last - first, key, width, here if masks else None))
    return tuple(found)
