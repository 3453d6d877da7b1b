"""What one cuDNN plan is built for.

A plan takes cuDNN 0.04 to 0.9 s, so packed problems are rounded up: `rounded` says how far. What was
measured on an H200: a longer longest sequence costs nothing; an empty sequence more costs 11 ns per
head in the forward and 23 ns in the backward; more tokens cost the backward memory. And a longest
sequence of 1, which is never planned, with an empty one beside it gave a wrong LSE.
"""

from __future__ import annotations

import enum
import math
from typing import TYPE_CHECKING, NamedTuple

from attnreg.capabilities import GRID

if TYPE_CHECKING:
    import torch

    from attnreg.discovery import Direction

__all__ = ["Problem", "Slot", "Start", "Strides", "rounded", "tokens_in_order"]


class Slot(enum.IntEnum):
    """The tensors of a graph; the numbers are cuDNN's uids."""

    Q = 1
    K = 2
    V = 3
    OUT = 4
    STATS = 5
    GRAD_OUT = 6
    GRAD_Q = 7
    GRAD_K = 8
    GRAD_V = 9
    ROWS = 10
    KEYS = 11


class Start(NamedTuple):
    """Where the sequences of a packed tensor begin: whose sequences, and the tensor's token stride."""

    of_keys: bool
    stride: int


Strides = tuple[int, int, int]

# Of small batches one in a few has such a number by chance.
LEAST_IN_ORDER = 256

# The backward's workspace is a float32 gradient of the query. It has room for so many tokens of each sequence
# that is planned for, at most for 256 MB of numbers or for `TOKENS`, whichever are more; then it grows in
# steps of 4, from 256 MB on in steps of 2.
PER_SEQUENCE, TOKENS, NUMBERS = 512, 2**14, 2**26


class Problem(NamedTuple):
    """Everything that a plan depends on; equal problems share a plan.

    Strides are those of (batch, head, token) in elements; a packed tensor has 0 for the batch. The
    head dim lies dense. Results are contiguous. A masked backward is `square` where every sequence has
    as many keys as queries: then both alignments of a mask are the same, and cuDNN 9.19 skips what is
    masked for the one aligned top-left only. `lse_tokens` is how far apart the heads of a packed LSE lie, 0
    if it lies with the token first; see `tokens_in_order`.
    """

    direction: Direction
    device: int
    dtype: torch.dtype
    batch: int
    max_q: int
    max_k: int
    heads_q: int
    heads_k: int
    head_dim: int
    head_dim_v: int
    scale: float
    window: tuple[int, int]
    packed: bool
    tokens_q: int
    tokens_k: int
    strides_q: Strides
    strides_k: Strides
    strides_v: Strides
    strides_out: Strides = (0, 0, 0)
    strides_grad_out: Strides = (0, 0, 0)
    square: bool = False
    lse_tokens: int = 0


def tokens_in_order(tokens: int) -> int:
    """Return how many tokens a packed LSE is planned for that lies as the contract has it; 0 for none.

    A plan whose LSE lies in order, (H, T), is good for that T only, one whose LSE lies with the token first
    for any: that is turned round in each direction, which takes the device 5 µs. So a number of tokens has
    plans of its own if it is a power of two, as the budgets of packed training mostly are, and others,
    of which there may be any number, have not.
    """
    return tokens if tokens >= LEAST_IN_ORDER and tokens & (tokens - 1) == 0 else 0


def rounded(batch: int, max_q: int, max_k: int, tokens_q: int, tokens_k: int, width: int) -> tuple[int, ...]:
    """Return the batch, lengths and totals that a packed problem is planned for.

    Args:
        batch, max_q, max_k, tokens_q, tokens_k: those of the call.
        width: heads times head dim of the query; what a token costs in the backward's workspace.
    """
    sequences = _sequences(batch, tokens_q / batch)
    least = min(PER_SEQUENCE * sequences, max(TOKENS, NUMBERS // width))
    return (
        sequences, _up(max_q, 4096, 16), _up(max_k, 4096, 16),
        _total(tokens_q, least, width), _total(tokens_k, least, width),
    )  # fmt: skip


def _sequences(batch: int, mean: float) -> int:
    """Round up a number of sequences of so many tokens."""
    # One more costs nothing beside long ones, and a third of itself beside those of 64 tokens, of which
    # few are soon done.
    if batch <= 64:
        return min(_up(batch, 8, 4.0 if mean >= 512 else 2.0), 64)
    step = 4.0 if mean >= 512 else 2.0 if mean >= 128 else 2**0.5
    return min(_up(batch, 8, step), max(batch, GRID))


def _total(tokens: int, least: int, width: int) -> int:
    """Round up coarsely where the workspace is small, to keep the plans few."""
    size = least
    while size < tokens:
        size *= 2 if size * width >= NUMBERS else 4
    return size


def _up(number: int, least: int, step: float) -> int:
    """Round up to a power of `step` times `least`; sizes of a coarse step are among those of a fine one."""
    size, power = least, 0
    while size < number:
        power += 1
        size = math.ceil(least * step**power - 1e-6)  # two steps of the root of 2 are to be 2
    return size
