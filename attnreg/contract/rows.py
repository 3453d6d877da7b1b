"""A stand-in for the module of this name that comes with the rest of this change; replace it by that."""

from __future__ import annotations

import torch
from torch import Tensor


def clear_forward(
    out: Tensor, lse: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, window: tuple[int, int]
) -> None:
    """Set output rows that see no key, or belong to no sequence, to 0 and their LSE to -inf."""
    rows, inside, sequence = _sequences(len(out), cu_seqlens_q)
    keys = cu_seqlens_k.diff()[sequence]
    place, (left, right) = rows - cu_seqlens_q[1:][sequence] + keys, window
    begin = (place - left).clamp(min=0) if left >= 0 else torch.zeros_like(place)
    last = torch.minimum(place + right, keys - 1) if right >= 0 else keys - 1
    unseeing = ~inside | (begin > last)
    out.masked_fill_(unseeing[:, None, None], 0)
    lse.masked_fill_(unseeing, -torch.inf)


def clear_backward(dq: Tensor, dk: Tensor, dv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    """Set gradients to 0 of rows that belong to no sequence, or to one without keys (dq) or queries."""
    dq.masked_fill_(_alone(len(dq), cu_seqlens_q, cu_seqlens_k)[:, None, None], 0)
    alone = _alone(len(dk), cu_seqlens_k, cu_seqlens_q)[:, None, None]
    dk.masked_fill_(alone, 0)
    dv.masked_fill_(alone, 0)


def blanked(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return a copy of x, (T, H, D), with zeros in the rows at or past the last offset."""
    past = torch.arange(len(x), dtype=cu_seqlens.dtype, device=x.device) >= cu_seqlens[-1]
    return torch.where(past[:, None, None], torch.zeros((), dtype=x.dtype, device=x.device), x)


def _sequences(tokens: int, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = torch.arange(tokens, dtype=offsets.dtype, device=offsets.device)
    sequence = torch.searchsorted(offsets.contiguous(), rows, right=True) - 1
    batch = len(offsets) - 1
    return rows, (sequence >= 0) & (sequence < batch), sequence.clamp(0, max(batch - 1, 0))


def _alone(tokens: int, offsets: Tensor, others: Tensor) -> Tensor:
    _, inside, sequence = _sequences(tokens, offsets)
    return ~inside | (others.diff()[sequence] <= 0)
