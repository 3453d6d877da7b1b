"""Attention over a batch of equally long sequences, strip by strip.

Tensors come in as the kernel reads them, (B, H, S, D) and (B, H, S), and go out as the contract
has them, (B, S, H, D) and (B, S, H). Every query row lies in one strip; where its keys come in
parts, the outputs are merged by their LSE. The backward needs no merging: from the LSE of the
whole row each part finds its own share of the gradients.
"""

from __future__ import annotations

import functools
from math import inf
from typing import TYPE_CHECKING

import torch

from attnreg.backends.cpu.flash import lse_dtype
from attnreg.backends.cpu.tiles import Part, Strip, cut

if TYPE_CHECKING:
    from torch import Tensor

    from attnreg.backends.cpu.flash import Flash

__all__ = ["backward", "forward"]

Window = tuple[int, int]
Partial = tuple["Tensor", "Tensor"]


def forward(
    flash: Flash, q: Tensor, k: Tensor, v: Tensor, scale: float, window: Window, bias: Tensor | None = None
) -> Partial:
    """Return output and LSE."""
    strips = _strips(q, k, window, bias)
    if len(strips) == 1 and _is_whole(strips[0], q, k):
        out, lse = flash.forward(q, k, v, scale, strips[0].parts[0].band, bias)
        return out.transpose(1, 2), lse.transpose(1, 2)
    done = [_strip_forward(flash, q, k, v, scale, strip, bias) for strip in strips]
    if blind := strips[0].row if strips else q.size(2):
        shape = (q.size(0), blind, q.size(1))
        done.insert(0, (q.new_zeros(*shape, v.size(3)), q.new_full(shape, -inf, dtype=lse_dtype(q))))
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
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value."""
    strips = _strips(q, k, window, bias)
    if len(strips) == 1 and _is_whole(strips[0], q, k):
        grads = flash.backward(grad_out, q, k, v, out, lse, scale, strips[0].parts[0].band, bias)
        return grads[0].transpose(1, 2), grads[1].transpose(1, 2), grads[2].transpose(1, 2)
    totals = [x.new_zeros(x.transpose(1, 2).shape).transpose(1, 2) for x in (q, k, v)]
    for strip in strips:
        rows = [_take(x, strip.row, strip.rows, strip) for x in (grad_out, q, out, lse)]
        for part in strip.parts:
            key, value = (_take(x, part.key, part.keys, strip) for x in (k, v))
            grads = flash.backward(rows[0], rows[1], key, value, rows[2], rows[3], scale, part.band)
            for total, start, grad in zip(totals, (strip.row, part.key, part.key), grads, strict=True):
                _add(total, grad, start, strip)
    return totals[0].transpose(1, 2), totals[1].transpose(1, 2), totals[2].transpose(1, 2)


def _strips(q: Tensor, k: Tensor, window: Window, bias: Tensor | None) -> tuple[Strip, ...]:
    """Return the strips of a call; with a bias, a tensor of all scores, nothing is won by cutting."""
    rows, keys = q.size(2), k.size(2)
    if bias is None or not rows * keys:
        return cut(rows, keys, window)
    low = keys - rows - window[0] if window[0] >= 0 else -rows
    high = keys - rows + window[1] if window[1] >= 0 else keys
    band = None if window == (-1, -1) else (low, high)
    return (Strip(0, rows, (Part(0, keys, band),)),)


def _is_whole(strip: Strip, q: Tensor, k: Tensor) -> bool:
    """Return whether a strip is one call of the kernel for all rows and keys."""
    return strip.rows == q.size(2) and strip.parts[0].keys == k.size(2)


def _strip_forward(
    flash: Flash, q: Tensor, k: Tensor, v: Tensor, scale: float, strip: Strip, bias: Tensor | None
) -> Partial:
    rows = _take(q, strip.row, strip.rows, strip)
    partials: list[Partial] = []
    for part in strip.parts:
        keys, values = (_take(x, part.key, part.keys, strip) for x in (k, v))
        partials.append(flash.forward(rows, keys, values, scale, part.band, bias))
    out, lse = functools.reduce(_merged, partials)
    if strip.count > 1:
        out, lse = (_repeated(x, strip).movedim(1, 2).flatten(2, 3) for x in (out, lse))
    return out.transpose(1, 2), lse.transpose(1, 2)


def _merged(first: Partial, second: Partial) -> Partial:
    lse = torch.logaddexp(first[1], second[1])
    # In the LSE's precision: what is merged may be merged again.
    out, other = first[0].to(lse.dtype), second[0].to(lse.dtype)
    return torch.lerp(out, other, (second[1] - lse).exp().unsqueeze(-1)), lse


def _repeated(x: Tensor, strip: Strip) -> Tensor:
    """Return the batch that `_take` made, (B * count, ...), as (B, count, ...)."""
    return x.reshape(-1, strip.count, *x.shape[1:])


def _take(x: Tensor, start: int, size: int, strip: Strip) -> Tensor:
    """Return `size` rows from `start` on of each of the strip's repetitions, as one batch."""
    if strip.count == 1:
        return x.narrow(2, start, size)
    reach = x.narrow(2, start, (strip.count - 1) * strip.step + size)
    return reach.unfold(2, size, strip.step).movedim(2, 1).transpose(-1, 3).flatten(0, 1)


def _add(total: Tensor, grad: Tensor, start: int, strip: Strip) -> None:
    """Add what belongs to the rows that `_take` took, which may be several times the same."""
    repetitions = _repeated(grad, strip)
    for index in range(strip.count):
        total.narrow(2, start + index * strip.step, grad.size(2)).add_(repetitions[:, index])
