"""The kernels, in PyTorch operations: put yours in their place.

Shapes: query (B, S_q, H, D), key (B, S_k, H_k, D), value (B, S_k, H_k, D_v), LSE (B, H, S_q).
"""

from __future__ import annotations

import torch
from torch import Tensor

import attnreg


def forward(q: Tensor, k: Tensor, v: Tensor, call: attnreg.Call) -> tuple[Tensor, Tensor]:
    """Return the output (B, S_q, H, D_v) and the LSE (B, H, S_q)."""
    with torch.autocast(q.device.type, enabled=False):
        wide_q, wide_k, wide_v = _by_group(q, k, v)
        scores = _scores(wide_q, wide_k, call)
        lse = scores.logsumexp(-1)
        out = _weights(scores, lse) @ wide_v
    return _ungrouped(out).to(q.dtype), lse.flatten(1, 2)


def backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: attnreg.Call
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, in their shapes."""
    with torch.autocast(q.device.type, enabled=False):
        wide_q, wide_k, wide_v = _by_group(q, k, v)
        grad, wide_out = (_grouped(x, k.shape[2]) for x in (grad_out, out))
        weights = _weights(_scores(wide_q, wide_k, call), lse.unflatten(1, wide_q.shape[1:3]))
        delta = (grad * wide_out).sum(-1, keepdim=True)
        slope = call.scale * weights * (grad @ wide_v.mT - delta)
        dq = _ungrouped(slope @ wide_k)
        # The heads of a group share a key head, whose gradient is the sum of theirs.
        dk, dv = (x.sum(2).transpose(1, 2) for x in (slope.mT @ wide_q, weights.mT @ grad))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _grouped(x: Tensor, heads_k: int) -> Tensor:
    """Return (B, S, H, D) as (B, H_k, group, S, D), halves in float32: head h has the key head h // group."""
    wide = x if x.dtype == torch.float64 else x.float()
    return wide.transpose(1, 2).unflatten(1, (heads_k, -1))


def _by_group(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    return [_grouped(x, k.shape[2]) for x in (q, k, v)]


def _ungrouped(x: Tensor) -> Tensor:
    """Return (B, H_k, group, S, D) as (B, S, H, D)."""
    return x.flatten(1, 2).transpose(1, 2)


def _scores(q: Tensor, k: Tensor, call: attnreg.Call) -> Tensor:
    """Return the scaled scores (B, H_k, group, S_q, S_k), -inf where a query may not see a key."""
    scores = call.scale * q @ k.mT
    if call.window == (-1, -1):
        return scores
    # The only other window that is declared is causal: the last query sees the last key.
    rows, keys = scores.shape[-2:]
    seen = torch.ones(rows, keys, dtype=torch.bool, device=scores.device).tril(keys - rows)
    return scores.masked_fill(~seen, -torch.inf)


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """Return exp(score - LSE), and 0 in a row that sees no key, where both are -inf."""
    return (scores - lse.masked_fill(lse == -torch.inf, torch.inf)[..., None]).exp()
