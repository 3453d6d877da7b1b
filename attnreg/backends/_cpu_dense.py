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

from attnreg.backends._cpu_mask import Mask
from attnreg.backends._cpu_tiles import Part, Strip, cut

if TYPE_CHECKING:
    from torch import Tensor

    from attnreg.backends._cpu_flash import Flash

__all__ = ["backward", "forward"]

Window = tuple[int, int]
Partial = tuple["Tensor", "Tensor"]


def forward(
    flash: Flash, q: Tensor, k: Tensor, v: Tensor, scale: float, window: Window, mask: Mask
) -> Partial:
    """Return the output in the dtype of the query, and the LSE."""
    strips = _strips(q, k, window, mask)
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
    mask: Mask,
) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value, in their dtype."""
    strips = _strips(q, k, window, mask)
    if len(strips) == 1 and (strips[0].rows, strips[0].parts[0].keys) == (q.size(1), k.size(1)):
        whole = mask._replace(band=strips[0].parts[0].band)
        grads = flash.backward(grad_out, q, k, v, out, lse, scale, whole)
        return tuple(grad.to(q.dtype) for grad in grads)
    totals = [torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v)]
    for strip in strips:
        _add_strip(totals, flash, (grad_out, q, out, lse), (k, v), scale, strip)
    return tuple(total.to(q.dtype) for total in totals)


def _strips(q: Tensor, k: Tensor, window: Window, mask: Mask) -> tuple[Strip, ...]:
    """Return the strips of a call; a bias is a tensor of all scores, and nothing is won by cutting."""
    if mask.bias is None or not k.size(1):
        return cut(q.size(1), k.size(1), window)
    shift = k.size(1) - q.size(1)
    low = shift - window[0] if window[0] >= 0 else -q.size(1)
    high = shift + window[1] if window[1] >= 0 else k.size(1)
    band = None if window == (-1, -1) else (low, high)
    return (Strip(0, q.size(1), (Part(0, k.size(1), band),)),)


def _strip_forward(
    flash: Flash, q: Tensor, k: Tensor, v: Tensor, scale: float, strip: Strip, mask: Mask
) -> Partial:
    rows = _take(q, strip.row, strip.rows, strip)
    partials: list[Partial] = []
    for part in strip.parts:
        keys, values = (_take(x, part.key, part.keys, strip) for x in (k, v))
        partials.append(flash.forward(rows, keys, values, scale, mask._replace(band=part.band)))
    out, lse = functools.reduce(_merged, partials)
    batch = (q.size(0), strip.count * strip.rows)
    return out.to(q.dtype).reshape(*batch, *out.shape[2:]), lse.reshape(*batch, -1)


def _merged(first: Partial, second: Partial) -> Partial:
    lse = torch.logaddexp(first[1], second[1])
    return torch.lerp(first[0], second[0], (second[1] - lse).exp().unsqueeze(-1)), lse


def _add_strip(
    totals: list[Tensor],
    flash: Flash,
    of_rows: tuple[Tensor, ...],
    of_keys: tuple[Tensor, ...],
    scale: float,
    strip: Strip,
) -> None:
    grad_out, q, out, lse = (_take(x, strip.row, strip.rows, strip) for x in of_rows)
    for part in strip.parts:
        k, v = (_take(x, part.key, part.keys, strip) for x in of_keys)
        grads = flash.backward(grad_out, q, k, v, out, lse, scale, Mask(part.band))
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
