"""The problem that a cuDNN execution plan is built for: the kind of a call, and numbers.

A kind is derived from the tensors of a call, and is equal for all calls like it. The rest of a problem are
lengths and strides. So finding the execution plan for a call of a known kind needs no tensor.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attnreg.core.contract.backend import Call
from attnreg.core.contract.spec import Direction
from attnreg.core.torchlib.layout import contiguous_strides

# The tensors of a graph; the numbers, from 1 on, are their uids.
Slot = enum.IntEnum(
    "Slot",
    "Q K V OUT STATS GRAD_OUT GRAD_Q GRAD_K GRAD_V SEQ_LEN_Q SEQ_LEN_K BIAS GRAD_BIAS SEED OFFSET",
)

# The arguments and results of each direction's function, in the contract's order.
GIVEN = {
    "forward": (Slot.Q, Slot.K, Slot.V),
    "backward": (Slot.GRAD_OUT, Slot.Q, Slot.K, Slot.V, Slot.OUT, Slot.STATS),
}
RESULTS = {"forward": (Slot.OUT, Slot.STATS), "backward": (Slot.GRAD_Q, Slot.GRAD_K, Slot.GRAD_V)}

OF_KEYS = frozenset({Slot.K, Slot.V, Slot.GRAD_K, Slot.GRAD_V})
OF_VALUES = frozenset({Slot.V, Slot.OUT, Slot.GRAD_OUT, Slot.GRAD_V})  # with the head dim of the value


# How many 16-bit numbers have sixteen bytes.
STEP = 8


class RaggedOffset(NamedTuple):
    """The offsets of a packed tensor's sequences, in elements: `cu_seqlens` times the token stride.

    Attributes:
        of_keys: whether they are made from the offsets of the keys.
        token_stride: the tensor's stride from token to token, in elements.
    """

    of_keys: bool
    token_stride: int


# Strides of a tensor in the contract's layout, (batch, token, head, head dim); packed tensors have no batch.
Strides = tuple[int, ...]


class PlanKind(NamedTuple):
    """A problem without its lengths and strides.

    Attributes:
        one_offsets: whether this is a masked backward of packed tensors whose queries and keys share a
            tensor of offsets.
        bias: whether a bias is added to the scores.
        bias_gradient: whether a backward computes the bias's gradient.
        deterministic: whether this is a backward with the same bits at each run.
        dropout: the probability of dropping a weight.
    """

    direction: Direction
    device: int
    dtype: torch.dtype
    heads_q: int
    heads_k: int
    head_dim: int
    head_dim_v: int
    scale: float
    window: tuple[int, int]
    packed: bool
    one_offsets: bool
    bias: bool = False
    bias_gradient: bool = False
    deterministic: bool = False
    dropout: float = 0.0

    @property
    def is_plain(self) -> bool:
        """Whether its execution plans read nothing but the function's tensors and lengths."""
        return not (self.bias or self.dropout)

    def contiguous(self, slot: Slot) -> Strides:
        """Return the strides of a contiguous packed tensor."""
        heads = self.heads_k if slot in OF_KEYS else self.heads_q
        dim = self.head_dim_v if slot in OF_VALUES else self.head_dim
        return heads * dim, dim, 1

    def problem(
        self, batch: int, max_q: int, max_k: int, tokens_q: int, tokens_k: int, strides: tuple[Strides, ...]
    ) -> Problem:
        """Return the problem of a call; `ExecutionPlans.select` rounds it later.

        Args:
            strides: the strides of the function's tensors. The LSE's are ignored.
        """
        backward = self.direction == "backward"
        if self.packed:
            tokens_k = tokens_k if backward else 0
            return Problem(
                self, batch, max_q, max_k, tokens_q, tokens_k, strides[:5], self.one_offsets, False
            )
        # With a bias or dropout cuDNN has no mask that is aligned bottom-right.
        square = (backward or not self.is_plain) and max_q == max_k and self.window != (-1, -1)
        return Problem(self, batch, max_q, max_k, 0, 0, strides[:5], square, False)


class Problem(NamedTuple):
    """Everything that an execution plan depends on; equal problems share an execution plan.

    Results are contiguous.

    Attributes:
        tokens_q, tokens_k: the largest number of tokens of packed tensors. `tokens_k` is 0 in a forward,
            whose workspace doesn't depend on the keys.
        strides: the strides of the function's tensors without the LSE, in the order of `GIVEN`.
        square: whether this is a masked backward, or a masked call with a bias or dropout, in which each
            sequence has as many keys as queries. Then both alignments of the mask are equal. Top-left cuDNN
            9.19 skips hidden scores, and takes a bias and dropout.
        exact: whether the execution plan is for exactly `tokens_q` tokens. Its LSE is contiguous, (H, T).
            A shared execution plan is for any number of tokens, and its LSE has the token first, (T, H).
        bias: the strides of the bias, (B, H, S_q, S_k); empty without one.
    """

    kind: PlanKind
    batch: int
    max_q: int
    max_k: int
    tokens_q: int
    tokens_k: int
    strides: tuple[Strides, ...]
    square: bool = False
    exact: bool = False
    bias: Strides = ()

    @property
    def token_first(self) -> bool:
        """Whether the execution plan writes or reads the LSE as (T, H)."""
        return self.kind.packed and not self.exact

    def lse_strides(self, size: tuple[int, ...]) -> Strides:
        """Return the strides of the LSE, whose size in the contract's layout is given."""
        return (1, self.kind.heads_q) if self.token_first else contiguous_strides(size)

    def __str__(self) -> str:
        """Return a description for a log line."""
        kind, dtype = self.kind, str(self.kind.dtype).removeprefix("torch.")
        dims = "/".join(map(str, dict.fromkeys((kind.head_dim, kind.head_dim_v))))
        heads = "/".join(map(str, dict.fromkeys((kind.heads_q, kind.heads_k))))
        packed = "packed " if kind.packed else ""
        return (
            f"{packed}{kind.direction} of {self.batch} x {self.max_q} queries and {self.max_k} keys, "
            f"{heads} heads of {dims}, {dtype}"
        )


def strides_of_scores(size: tuple[int, ...]) -> Strides:
    """Return the strides of a tensor (B, H, S_q, S_k) whose rows begin at multiples of sixteen bytes."""
    return contiguous_strides((*size[:-1], size[-1] + -size[-1] % STEP))


def kind_of(direction: Direction, tensors: Sequence[Tensor], call: Call) -> PlanKind:
    """Return the kind of a call on a function's tensors.

    They are query, key and value, of a backward (grad_out, query, key, value, ...), each (B, S, H, D) or
    packed (T, H, D), float16 or bfloat16.
    """
    query, key, value = tensors[:3] if direction == "forward" else tensors[1:4]
    packed = call.cu_seqlens_q is not None
    one_offsets = call.cu_seqlens_q is call.cu_seqlens_k and call.seqused_k is None
    return PlanKind(
        direction, query.get_device(), query.dtype, query.shape[-2], key.shape[-2],
        query.shape[-1], value.shape[-1], float(call.scale), call.window, packed,
        packed and one_offsets and direction == "backward" and call.window != (-1, -1),
        call.attn_bias is not None, direction == "backward" and bool(call.bias_gradient),
        direction == "backward" and call.deterministic, call.dropout,
    )  # fmt: skip


def problem_of(kind: PlanKind, tensors: Sequence[Tensor], call: Call) -> Problem:
    """Return the problem of a call of a kind on a function's tensors.

    They are (query, key, value), of a backward (grad_out, query, key, value, out), each (B, S, H, D) or
    packed (T, H, D), float16 or bfloat16.
    """
    query, key = tensors[:2] if kind.direction == "forward" else tensors[1:3]
    batch = query.shape[0] if call.cu_seqlens_q is None else call.cu_seqlens_q.shape[0] - 1
    strides = tuple([x.stride() for x in tensors])
    return kind.problem(batch, call.max_q, call.max_k, query.shape[0], key.shape[0], strides)
