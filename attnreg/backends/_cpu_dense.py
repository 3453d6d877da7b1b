"""Attention over a batch of equally long sequences, strip by strip.

Tensors are (B, S, H, D), LSE is (B, S, H), as the kernel writes them. Every query row lies in one
strip; where its keys come in parts, the outputs are merged by their LSE. The backward needs no
merging: from the LSE of the whole row each part finds its own share of the gradients.
"""

from __future__ import annotations

import functools
from math import inf
from typing import TYPE_CHECKING

import torch

from attnreg.backends._cpu_tiles import cut

if TYPE_CHECKING:
    from torch import Tensor

    from attnreg.backends._cpu_flash import Flash
    from attnreg.backends._cpu_tiles import Strip

__all__ = ["backward", "band_mask", "forward"]

Window = tuple[int, int]
Partial = tuple["Tensor", "Tensor"]


def forward(
    flash: Flash, q: Tensor, k: Tensor, v: Tensor, scale: float, window: Window, mask: Tensor | None = None
) -> Partial:
    """Return the output in the dtype of the query, and the LSE. With a `mask` the window is open."""
    strips = cut(q.size(1), k.size(1), window)
    done = [_strip_forward(flash, q, k, v, scale, strip, mask) for strip in strips]
    if blind := strips[0].row if strips else q.size(1):
        shape = (q.size(0), blind, q.size(2))
        lse = q.new_full(shape, -inf, dtype=torch.promote_types(q.dtype, torch.float32))
        done.insert(0, (q.new_zeros(*shape, v.size(3)), lse))
    if len(done) == 1:
        return done[0]
    outs, lses = zip(*done, strict=True)
    return torch.cat(outs, dim=1), torch.cat(lses, dim=1)


def backward(
    flash: Flash,
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    window: Window,
    mask: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value, in their dtype."""
    strips = cut(q.size(1), k.size(1), window)
    if len(strips) == 1 and (strips[0].rows, strips[0].parts[0].keys) == (q.size(1), k.size(1)):
        causal = strips[0].parts[0].causal
        grads = flash.backward(grad_out, q, k, v, out, lse, scale, causal, mask)
        return tuple(grad.to(q.dtype) for grad in grads)
    totals = [torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v)]
    for strip in strips:
        _add_strip(totals, flash, (grad_out, q, out, lse), (k, v), scale, strip)
    return tuple(total.to(q.dtype) for total in totals)


def band_mask(like: Tensor, rows: int, keys: int, band: tuple[int, int]) -> Tensor:
    """Return a mask (rows, keys) of 0 where `low <= key - row <= high` and -inf elsewhere."""
    distance = torch.arange(keys, device=like.device) - torch.arange(rows, device=like.device)[:, None]
    seen = (distance >= band[0]) & (distance <= band[1])
    return torch.zeros(rows, keys, device=like.device).masked_fill_(~seen, -inf)


def _strip_forward(
    flash: Flash, q: Tensor, k: Tensor, v: Tensor, scale: float, strip: Strip, mask: Tensor | None
) -> Partial:
    rows = _take(q, strip.row, strip.rows, strip)
    partials: list[Partial] = []
    for part in strip.parts:
        keys, values = (_take(x, part.key, part.keys, strip) for x in (k, v))
        part_mask = mask if part.band is None else band_mask(q, strip.rows, part.keys, part.band)
        partials.append(flash.forward(rows, keys, values, scale, part.causal, part_mask))
    out, lse = functools.reduce(_merged, partials)
    batch = (q.size(0), strip.count * strip.rows)
    return out.to(q.dtype).reshape(*batch, *out.shape[2:]), lse.reshape(*batch, -1)


def _merged(first: Partial, second: Partial) -> Partial:
    lse = torch.logaddexp(first[1], second[1])
    return torch.lerp(first[0], second[0], (second[1] - lse).exp().unsqueeze(-1)), lse


def _add_strip(
    totals: list[Tensor],
    flash: Flash,
    of_rows: tuple[Tensor, Tensor, Tensor, Tensor],
    of_keys: tuple[Tensor, Tensor],
    scale: float,
    strip: Strip,
) -> None:
    grad_out, q, out, lse = (_take(x, strip.row, strip.rows, strip) for x in of_rows)
    for part in strip.parts:
        k, v = (_take(x, part.key, part.keys, strip) for x in of_keys)
        mask = None if part.band is None else band_mask(q, strip.rows, part.keys, part.band)
        grads = flash.backward(grad_out, q, k, v, out, lse, scale, part.causal, mask)
        for total, start, grad in zip(totals, (strip.row, part.key, part.key), grads, strict=True):
            _add(total, grad, start, strip)


def _take(x: Tensor, start: int, size: int, strip: Strip) -> Tensor:
    """Return `size` rows from `start` on of each of the strip's repetitions, as one batch."""
    if strip.count == 1:
        return x[:, start : start + size]
    reach = x[:, start : start + (strip.count - 1) * strip.step + size]
    return reach.unfold(1, size, strip.step).movedim(-1, 2).flatten(0, 1)


def _add(total: Tensor, grad: Tensor, start: int, strip: Strip) -> None:
    """Add what belongs to the rows that `_take` took, which may be several times the same."""
    size = grad.size(1)
    repetitions = grad.unflatten(0, (total.size(0), strip.count))
    for index in range(strip.count):
        first = start + index * strip.step
        total[:, first : first + size].add_(repetitions[:, index])
