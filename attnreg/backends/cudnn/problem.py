"""The problem that a cuDNN execution plan is built for, and how one is read off the tensors of a call."""

from __future__ import annotations

import enum
from typing import NamedTuple

import torch
from torch import Tensor

from attnreg.contract.backend import Call
from attnreg.contract.spec import Direction
from attnreg.torchlib.layout import contiguous_strides

# The tensors of a graph; the numbers, from 1 on, are their uids.
Slot = enum.IntEnum("Slot", "Q K V OUT STATS GRAD_OUT GRAD_Q GRAD_K GRAD_V SEQ_LEN_Q SEQ_LEN_K")


class RaggedOffset(NamedTuple):
    """Where the sequences of a packed tensor begin, in elements: `cu_seqlens` times its token stride.

    Attributes:
        of_keys: whether these are the offsets of the keys.
        token_stride: of the tensor, in elements.
    """

    of_keys: bool
    token_stride: int


Strides = tuple[int, int, int]


class Problem(NamedTuple):
    """Everything that an execution plan depends on; equal problems share an execution plan.

    Strides are those of (batch, head, token) in elements, the head dim's is 1, and results are contiguous.

    Attributes:
        packed: whether sequences are packed; the strides of a batch are 0 then.
        tokens_q, tokens_k: of packed tensors, how many tokens there may be at most. The forward's workspace
            doesn't depend on its keys, whose number is 0 there.
        strides_out, strides_grad_out: a backward's alone.
        square: whether this is a masked backward in which each sequence has as many keys as queries. Aligned
            top-left and bottom-right the mask is the same then, and cuDNN 9.19 skips the hidden part of it
            top-left only.
        exact: whether the execution plan is for exactly `tokens_q` tokens. Its LSE is contiguous, (H, T).
            Others of packed tensors are for any number of tokens, with the token first, (T, H).
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
    exact: bool = False


def is_empty(query: Tensor, key: Tensor, call: Call) -> bool:
    """Whether there is no score to compute; no graph can describe such a call."""
    return not (query.numel() and key.numel() and call.max_q and call.max_k)


def describe(direction: Direction, tensors: tuple[Tensor, ...], call: Call) -> Problem:
    """Return the problem of a call on a function's tensors; `ExecutionPlans.select` rounds it later."""
    query, key, value = tensors[:3] if direction == "forward" else tensors[1:4]
    packed, batch, tokens = False, query.shape[0], (0, 0)
    if call.cu_seqlens_q is not None:
        packed, batch = True, call.cu_seqlens_q.shape[0] - 1
        tokens = query.shape[0], key.shape[0] if direction == "backward" else 0
    problem = Problem(
        direction, query.get_device(), query.dtype, batch, call.max_q, call.max_k,
        query.shape[-2], key.shape[-2], query.shape[-1], value.shape[-1],
        float(call.scale), call.window, packed, *tokens,
        _strides(query, packed), _strides(key, packed), _strides(value, packed),
    )  # fmt: skip
    if direction == "forward":
        return problem
    return problem._replace(
        strides_out=_strides(tensors[4], packed),
        strides_grad_out=_strides(tensors[0], packed),
        square=call.window != (-1, -1) and _is_square(call),
    )


def lse_layout(problem: Problem, query: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return size and strides of the LSE that a problem's execution plan writes or reads."""
    *batch, rows, heads = query.shape[:-1]
    size = *batch, heads, rows
    return size, (1, heads) if problem.packed and not problem.exact else contiguous_strides(size)


def _is_square(call: Call) -> bool:
    """Whether the host knows that each sequence has as many keys as queries."""
    if call.cu_seqlens_q is None:
        return call.max_q == call.max_k
    return call.cu_seqlens_q is call.cu_seqlens_k and call.seqused_k is None


def _strides(x: Tensor, packed: bool) -> Strides:
    """Return the strides of (batch, head, token)."""
    if packed:
        token, head, _ = x.stride()
        return 0, head, token
    batch, token, head, _ = x.stride()
    return batch, head, token
