"""What both providers of FA2 need: results by the contract, masks by the kernels' rules."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnreg.contract.offsets import facts
from attnreg.torchlib.layout import stream_of

if TYPE_CHECKING:
    from torch import Tensor

    from attnreg.contract.backend import Call

__all__ = [
    "by_contract",
    "covered",
    "empty",
    "kernels_lse",
    "key_offsets",
    "longest",
    "mask",
    "nothing_to_do",
    "zero_tail",
]


def nothing_to_do(query: Tensor, key: Tensor, call: Call) -> bool:
    """Whether there is no score to compute; the kernels refuse some of these calls."""
    sequences = 1 if call.cu_seqlens_q is None else call.cu_seqlens_q.shape[0] - 1
    return not (query.numel() and key.numel() and sequences and call.max_q and call.max_k)


def empty(query: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Return output and LSE of queries that see no key."""
    lse = query.new_full(query.shape[:-1], -torch.inf, dtype=torch.float32)
    return query.new_zeros(query.shape), lse.transpose(-1, -2).contiguous()


def mask(call: Call) -> tuple[bool, int, int]:
    """Return is_causal and the two bounds of the window."""
    left, right = call.window
    if call.alibi_slopes is not None and (left, right) == (-1, 0):
        # A causal kernel takes the bias's part that is the same along a row off the scores, and so off
        # the LSE. A left bound that reaches every key makes the mask a window, whose kernel doesn't.
        return False, call.max_k - 1, 0
    return call.causal, left, right


def longest(query: Tensor, key: Tensor, call: Call) -> tuple[int, int]:
    """Return the longest lengths."""
    # With one query per sequence and fewer key heads the kernel folds heads into rows, and then
    # takes no empty sequence; a longest length of 2 keeps it from that.
    folds = call.varlen and call.max_q == 1 and query.shape[-2] != key.shape[-2]
    return 2 if folds else call.max_q, call.max_k


def key_offsets(call: Call) -> Tensor | None:
    """Return the offsets of the keys; with pages some that tell the lengths, as there must be any."""
    if call.cu_seqlens_k is not None or call.seqused_k is None:
        return call.cu_seqlens_k
    return torch.nn.functional.pad(call.seqused_k.cumsum(0, dtype=torch.int32), (1, 0))


def covered(query: Tensor, key: Tensor, call: Call) -> bool:
    """Whether it is known that every row sees a key and is written, so that nothing is to be put right."""
    if call.cu_seqlens_q is not None:
        return (
            query.is_cuda and facts(call, query.shape[0], key.shape[0], stream_of(query)).every_row_sees_a_key
        )
    return call.seqused_k is None and (call.max_q <= call.max_k or call.window == (-1, -1))


def by_contract(out: Tensor, lse: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Return results in which rows without a key, and those past the last offset, are as promised."""
    lse = torch.where(lse == torch.inf, -torch.inf, lse)
    if call.cu_seqlens_q is not None:
        lse.masked_fill_(_tail(lse.shape[-1], call.cu_seqlens_q), -torch.inf)
    return zero_tail(out, call.cu_seqlens_q), lse


def kernels_lse(lse: Tensor) -> Tensor:
    """Return the LSE as the backward takes it: it knows a row without a key by +inf."""
    return torch.where(lse == -torch.inf, torch.inf, lse)


def zero_tail(packed: Tensor, offsets: Tensor | None) -> Tensor:
    """Zero the rows past the last offset, which the kernels have never written."""
    if offsets is None:
        return packed
    return packed.masked_fill_(_tail(packed.shape[0], offsets)[:, None, None], 0.0)


def _tail(tokens: int, offsets: Tensor) -> Tensor:
    return torch.arange(tokens, device=offsets.device) >= offsets[-1]
