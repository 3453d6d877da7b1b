"""The backward in bfloat16, by batched products of oneDNN.

They run several times as fast as the flash kernel's, but round what they return to bfloat16. So
that this costs no precision, nothing large is rounded: the LSE is subtracted from the scores inside
the product, by columns of the query (each the rounded rest of the one before) that meet -1 in the
key, likewise `rowsum(out * grad_out)`; what rounding the exponent loses comes from a second product
that subtracts the first. Padding gets columns that make its scores so low that it takes and gives
nothing.
"""

from __future__ import annotations

import functools
from math import copysign, log
from typing import TYPE_CHECKING, NamedTuple

import torch

from attnreg.backends.cpu.batches import batches, packed, portions
from attnreg.backends.cpu.strips import strips_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from attnreg.backends.cpu.runs import Run
    from attnreg.backends.cpu.strips import KeyStrip
    from attnreg.contract.backend import Call

__all__ = ["backward", "takes"]

# exp2 is faster than exp.
_LOG2 = log(2)
# Scores, and rows, computed at a time: as many as stay in the cache.
_SCORES, _ROWS = 2**21, 2**13
# As many bfloat16 numbers add up to a float32.
_COLUMNS = 3
_MINUS_ONE = (-1.0,) * _COLUMNS
# The exponent of padding; it stays finite over the smallest scale.
_FAR = 1e30
_SMALLEST = 1e-6


class Factors(NamedTuple):
    """The rows and keys of some sequences, (sequences * key heads, rows or keys, size)."""

    q: Tensor
    grad_out: Tensor
    k: Tensor
    v: Tensor

    def within(self, strip: KeyStrip, groups: int) -> Factors:
        """Return the factors of a strip."""
        rows = slice(strip.row * groups, (strip.row + strip.rows) * groups)
        keys = slice(strip.key, strip.key + strip.keys)
        return Factors(self.q[:, rows], self.grad_out[:, rows], self.k[:, keys], self.v[:, keys])


def takes(q: Tensor, call: Call) -> bool:
    """Return whether `backward` serves a call; it divides by the scale."""
    served = q.dtype == torch.bfloat16 and call.attn_bias is None and abs(call.scale) >= _SMALLEST
    return served and _is_fast()


@functools.cache
def _is_fast() -> bool:
    """Return whether this CPU multiplies bfloat16 in hardware."""
    known = torch.cpu.get_capabilities()
    return bool(known.get("avx512_bf16") or known.get("amx_bf16"))


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    runs: Iterable[Run],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of packed tensors (T, H, D), from an LSE (T, H)."""
    grad_out, q, k, v = (x.contiguous() for x in (grad_out, q, k, v))
    grads, to = zip(*(packed(x) for x in (q, k, v)), strict=True)
    flat_lse, flat_delta = lse.flatten(), _delta(grad_out, out).flatten()
    for batch in batches(runs, q.shape[:2], k.shape[:2]):
        count, height, width = batch.shape
        strips = strips_of(height, batch.groups, width, batch.band)
        area = max(strip.rows * strip.keys for strip in strips) * batch.groups
        for some in portions(count, min(_SCORES // area, _ROWS // max(height * batch.groups, width))):
            rows, keys = batch.rows.of(some), batch.keys.of(some)
            split_lse = _split(rows.padded(flat_lse, _FAR) / scale)
            split_delta = _split(rows.padded(flat_delta, 0.0))
            ones = [copysign(1.0, scale)]
            factors = Factors(
                rows.taken(q, [*split_lse, *ones]),
                rows.taken(grad_out, split_delta),
                keys.taken(k, [*_MINUS_ONE, keys.padded(None, -_FAR)]),
                keys.taken(v, _MINUS_ONE),
            )
            found = _solve(factors, q.size(2), strips, batch.groups, scale)
            for flat, places, grad in zip(to, (rows, keys, keys), found, strict=True):
                places.write(flat, grad)
    return grads


def _solve(
    factors: Factors, size: int, strips: Sequence[KeyStrip], groups: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    if len(strips) == 1 and strips[0].rows * groups == factors.q.size(1):
        return _product(factors, size, strips[0], groups, scale)
    # Each key lies in one strip, a row in several.
    grad_q = torch.zeros(*factors.q.shape[:2], size, device="cpu")
    grad_k, grad_v = (torch.zeros(*x.shape[:2], size, dtype=x.dtype, device="cpu") for x in factors[2:])
    for strip in strips:
        found = _product(factors.within(strip, groups), size, strip, groups, scale)
        grad_q[:, strip.row * groups : (strip.row + strip.rows) * groups].add_(found[0])
        for grad, part in zip((grad_k, grad_v), found[1:], strict=True):
            grad[:, strip.key : strip.key + strip.keys] = part
    return grad_q.bfloat16(), grad_k, grad_v


def _product(
    factors: Factors, size: int, strip: KeyStrip, groups: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    q, grad_out, k, v = factors
    # Keys first: of five products only one then has to read the scores transposed, which is slow.
    p = _scaled(k, q.mT, scale / _LOG2)
    # Where attention is even, all exponents of a row are rounded alike: their rest doesn't average out.
    rest = torch.baddbmm(p, k, q.mT, beta=-1, alpha=scale / _LOG2)
    p.exp2_().addcmul_(p, rest, value=_LOG2)
    _hide(p, strip, groups)
    grad_v = torch.bmm(p, grad_out[..., :size])
    p.mul_(torch.bmm(v, grad_out.mT, out=rest))
    return _scaled(p.mT, k[..., :size], scale), _scaled(p, q[..., :size], scale), grad_v


def _hide(p: Tensor, strip: KeyStrip, groups: int) -> None:
    """Set to 0 what a band leaves out."""
    if strip.band is None:
        return
    heads = p if groups == 1 else p.view(-1, strip.keys, strip.rows, groups).permute(0, 3, 1, 2)
    if strip.band[1] < strip.keys - 1:
        heads.triu_(-strip.band[1])
    if strip.band[0] > 1 - strip.rows:
        heads.tril_(-strip.band[0])


def _scaled(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return the scaled product, rounded once."""
    out = a.new_empty(a.size(0), a.size(1), b.size(2))
    return torch.baddbmm(out, a, b, beta=0, alpha=scale, out=out)


def _split(x: Tensor) -> list[Tensor]:
    """Return bfloat16 numbers that add up to `x`, each the rounded rest of those before."""
    found: list[Tensor] = []
    for _ in range(_COLUMNS):
        found.append(x.bfloat16())
        x = x - found[-1].float()
    return found


def _delta(grad_out: Tensor, out: Tensor) -> Tensor:
    """Return rowsum(out * grad_out) in float32."""
    # Of few rows at a time: a float32 copy of all would be as large as the inputs.
    pairs = zip(torch.split(grad_out, 128), torch.split(out, 128), strict=True)
    return torch.cat([(grad.float() * o.float()).sum(-1) for grad, o in pairs])
