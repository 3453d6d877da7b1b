"""What one cuDNN plan is built for."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from attnreg.contract.spec import Direction

__all__ = ["Problem", "Slot", "Start", "Strides"]


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


class Problem(NamedTuple):
    """Everything that a plan depends on; equal problems share a plan.

    Strides are those of (batch, head, token) in elements; a packed tensor has 0 for the batch. The
    head dim lies dense. Results are contiguous. A masked backward is `square` where every sequence has
    as many keys as queries: then both alignments of a mask are the same, and cuDNN 9.19 skips what is
    masked for the one aligned top-left only. Of packed tensors the tokens are the most that there may be,
    of keys in the backward only; the `own` plan of a number of query tokens is for just so many, with an LSE
    that lies in order, (H, T), where others have the token first.
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
    own: bool = False
