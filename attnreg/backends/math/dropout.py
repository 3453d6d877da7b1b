"""A dropout mask that can be computed again on any device, all of it or a tile.

Each attention weight has its own random number, a hash of the random state and of its batch, head, row and
column. So the backward needs nothing from the forward but the random state, and that only as a tensor: it is
never read on the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

WORD = 0xFFFFFFFF


def survivors(
    rng_state: Tensor, p: float, batch: Tensor, heads: Tensor, rows: Tensor, cols: Tensor
) -> Tensor:
    """Return which weights (b, H, rows, cols) are kept; each is dropped with probability `p`.

    `batch`, `heads`, `rows` and `cols` number the weights; equal numbers give equal results.
    """
    places = (batch[:, None, None, None], heads[:, None, None], rows[:, None])
    step, start = (_key(rng_state, lane, *places) for lane in (1, 2))
    # An odd step visits every word once: no two columns of a row collide before the hash.
    drawn = _hash((cols * (step | 1) + start) & WORD)
    return drawn >= round(p * 2**32)


def _key(rng_state: Tensor, lane: int, *places: Tensor) -> Tensor:
    """Return 32 random bits for each row of the mask, other ones for each lane."""
    seed, offset = rng_state.view(torch.int64).unbind()
    key = _hash((seed & WORD) ^ lane)
    for word in (seed >> 32, offset, offset >> 32, *places):
        key = _hash(key ^ (word & WORD))
    return key


def _hash(word: Tensor) -> Tensor:
    """Mix 32 bits, held in an int64: both constants are below 2**31, so that nothing overflows.

    They come from https://github.com/skeeto/hash-prospector/issues/19.
    """
    word = (word ^ (word >> 16)) * 0x21F0AAAD & WORD
    word = (word ^ (word >> 15)) * 0x735A2D97 & WORD
    return word ^ (word >> 15)
