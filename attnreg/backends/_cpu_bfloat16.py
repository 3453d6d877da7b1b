"""The backward for bfloat16, by batched products of whole heads.

oneDNN multiplies bfloat16 several times faster than float32, but hands back bfloat16. So that
this costs no precision, nothing large is rounded: the LSE is subtracted inside the product, as
further columns (three, each the rest of the one before) against -1 in the key, likewise
`rowsum(out * grad_out)`; and what rounding the exponent lost comes from a second product, which
subtracts the first. A key that is padding has a column of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from attnreg.backends._cpu_mask import Mask

__all__ = ["backward", "is_fast", "takes"]

# Scores computed at a time: as many as stay in the cache.
_CHUNK = 2**20
# What is subtracted from a score that doesn't count; large, but far from the end of the range.
_FAR = 1e30


class Wide(NamedTuple):
    """Query, key, gradient and value as (B * kv heads, rows, D + columns), query heads as rows."""

    q: Tensor
    k: Tensor
    grad_out: Tensor
    v: Tensor


def is_fast() -> bool:
    """Return whether this CPU multiplies bfloat16 in hardware."""
    known = torch.cpu.get_capabilities()
    return bool(known.get("avx512_bf16") or known.get("amx_bf16"))


def takes(q: Tensor, scale: float, mask: Mask) -> bool:
    """Return whether `backward` can serve a call; the LSE is divided by the scale."""
    return q.dtype == torch.bfloat16 and mask.bias is None and abs(scale) > 1e-6


def backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, mask: Mask
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients as `Flash.backward` does, in bfloat16."""
    heads, groups = k.size(2), q.size(2) // k.size(2)
    offset = torch.where(lse.isinf(), _FAR, lse) / scale
    delta = (grad_out.float() * out.float()).sum(-1)
    hidden = () if mask.real is None else (torch.where(mask.real, 0.0, _FAR / scale).to(q.dtype),)
    minus_one = k.new_full((1, 1), -1.0)
    wide = Wide(
        _widened(q, heads, [*_split(offset, 3), *(minus_one for _ in hidden)]),
        _widened(k, heads, [minus_one] * 3 + [column[:, :, None] for column in hidden]),
        _widened(grad_out, heads, _split(delta, 2)),
        _widened(v, heads, [minus_one] * 2),
    )
    per_head = q.size(1) * k.size(1) * groups
    some = max(1, _CHUNK // per_head)
    done = [_some_heads(Wide(*(x[n : n + some] for x in wide)), q.size(3), groups, scale, mask) for n in range(0, wide.k.size(0), some)]
    grads = (torch.cat(x) if len(x) > 1 else x[0] for x in zip(*done, strict=True))
    return tuple(_narrowed(g, x) for g, x in zip(grads, (q, k, v), strict=True))


def _some_heads(wide: Wide, size: int, groups: int, scale: float, mask: Mask) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of some heads, by blocks of rows."""
    rows, keys = wide.q.size(1) // groups, wide.k.size(1)
    step = max(64, _CHUNK // (keys * groups))
    if step >= rows:
        return _block(wide, size, groups, scale, mask.band)
    low, high = mask.band or (-rows, keys)
    grad_q = []
    totals = torch.zeros(2, *wide.k.shape[:2], size)
    for row in range(0, rows, step):
        first, last = max(0, row + low), min(keys, row + step + high)
        at, seen = slice(row * groups, (row + step) * groups), slice(first, last)
        part = Wide(wide.q[:, at], wide.k[:, seen], wide.grad_out[:, at], wide.v[:, seen])
        band = None if mask.band is None else (low + row - first, high + row - first)
        grads = _block(part, size, groups, scale, band)
        grad_q.append(grads[0])
        totals[0, :, seen] += grads[1]
        totals[1, :, seen] += grads[2]
    grad_k, grad_v = totals.to(wide.k.dtype)
    return torch.cat(grad_q, dim=1), grad_k, grad_v


def _block(
    wide: Wide, size: int, groups: int, scale: float, band: tuple[int, int] | None
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, grad_out, v = wide
    keys = k.transpose(1, 2)
    exponent = torch.baddbmm(_nothing(q), q, keys, beta=0, alpha=scale)
    rest = torch.baddbmm(exponent, q, keys, beta=-1, alpha=scale)
    p = exponent.exp_()
    p.addcmul_(p, rest)
    if band is not None:
        per_head = p.unflatten(1, (-1, groups)).transpose(1, 2)
        per_head.tril_(band[1]).triu_(band[0])
    transposed = p.transpose(1, 2)
    grad_v = torch.bmm(transposed, grad_out[..., :size])
    p.mul_(torch.bmm(grad_out, v.transpose(1, 2)))
    grad_q = torch.baddbmm(_nothing(q), p, k[..., :size], beta=0, alpha=scale)
    grad_k = torch.baddbmm(_nothing(q), transposed, q[..., :size], beta=0, alpha=scale)
    return grad_q, grad_k, grad_v


def _nothing(like: Tensor) -> Tensor:
    return like.new_empty(1, 1, 1)


def _split(x: Tensor, terms: int) -> list[Tensor]:
    """Return bfloat16 tensors that add up to `x`, each the rounded rest of those before."""
    found = []
    for _ in range(terms):
        found.append(x.bfloat16())
        x = x - found[-1]
    return found


def _widened(x: Tensor, heads: int, columns: list[Tensor]) -> Tensor:
    """Return (B, S, H, D) as (B * heads, S * H / heads, D + columns)."""
    batch, length, total, size = x.shape
    wide = x.new_empty(batch, heads, length, total // heads, size + len(columns))
    rows = wide.transpose(1, 2).flatten(2, 3) if total == heads else wide.transpose(1, 2)
    by_head = wide.transpose(1, 2)
    by_head[..., :size] = x.unflatten(2, (heads, total // heads))
    for place, column in enumerate(columns):
        full = column.expand(batch, length, total)
        by_head[..., size + place] = full.unflatten(2, (heads, total // heads))
    return wide.flatten(2, 3).flatten(0, 1)


def _narrowed(grad: Tensor, like: Tensor) -> Tensor:
    """Return (B * heads, S * H / heads, D) as the (B, S, H, D) of `like`."""
    batch, length, total, size = like.shape
    by_head = grad.view(batch, -1, length, grad.size(1) // length, size)
    return by_head.transpose(1, 2).flatten(2, 3)
