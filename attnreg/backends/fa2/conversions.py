"""What both providers of FA2 share: arguments as the kernels take them, results as the contract has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnreg.contract.offsets import facts
from attnreg.torchlib.layout import stream_of

if TYPE_CHECKING:
    from torch import Tensor

    from attnreg.contract.backend import Call


def is_empty(query: Tensor, key: Tensor, call: Call) -> bool:
    """Whether there is no score to compute; the kernels refuse some of these calls."""
    sequences = 1 if call.cu_seqlens_q is None else call.cu_seqlens_q.shape[0] - 1
    return not (query.numel() and key.numel() and sequences and call.max_q and call.max_k)


def kernel_mask(call: Call) -> tuple[bool, int, int]:
    """Return is_causal and the two bounds of the window."""
    left, right = call.window
    if call.alibi_slopes is not None and (left, right) == (-1, 0):
        # A causal kernel leaves the part of the bias that a row has in common out of the scores, and so out
        # of the LSE. A left bound that reaches every key makes the mask a window, whose kernel doesn't.
        return False, call.max_k - 1, 0
    return call.causal, left, right


def kernel_lengths(query: Tensor, key: Tensor, call: Call) -> tuple[Tensor | None, Tensor | None, int, int]:
    """Return the offsets and the longest lengths, of queries and of keys."""
    if call.cu_seqlens_q is None:
        return None, None, call.max_q, call.max_k
    cu_seqlens_k = call.cu_seqlens_k
    if cu_seqlens_k is None and call.seqused_k is not None:
        # Pages have no offsets: these have the right lengths.
        cu_seqlens_k = torch.nn.functional.pad(call.seqused_k.cumsum(0, dtype=torch.int32), (1, 0))
    # With one query in each sequence and fewer key heads the kernel folds heads into rows, and then it takes
    # no empty sequence; a longest length of 2 keeps it from that.
    folds = call.max_q == 1 and query.shape[-2] != key.shape[-2]
    return call.cu_seqlens_q, cu_seqlens_k, 2 if folds else call.max_q, call.max_k


def keeps_contract(query: Tensor, key: Tensor, call: Call) -> bool:
    """Whether it is known that each query sees a key and no row is unused: nothing needs converting then."""
    if call.cu_seqlens_q is None:
        return call.seqused_k is None and (call.max_q <= call.max_k or call.window == (-1, -1))
    return query.is_cuda and facts(call, query.shape[0], key.shape[0], stream_of(query)).every_row_sees_a_key


def to_contract(out: Tensor, lse: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Return results in which rows without a key and unused rows are by the contract."""
    lse = torch.where(lse == torch.inf, -torch.inf, lse)
    if call.cu_seqlens_q is not None:
        lse.masked_fill_(_unused(lse.shape[-1], call.cu_seqlens_q), -torch.inf)
    return zero_unused_rows(out, call.cu_seqlens_q), lse


def zero_unused_rows(packed: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Zero the rows past the last offset, which the kernels have never written."""
    if cu_seqlens is None:
        return packed
    return packed.masked_fill_(_unused(packed.shape[0], cu_seqlens)[:, None, None], 0.0)


def _unused(tokens: int, cu_seqlens: Tensor) -> Tensor:
    return torch.arange(tokens, device=cu_seqlens.device) >= cu_seqlens[-1]
