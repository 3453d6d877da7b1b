"""The backward in bfloat16, by batched products of oneDNN.

These products run several times as fast as the flash kernel's, but round their results to bfloat16. That
costs no precision as long as nothing large is rounded:

- The LSE is subtracted from the scores inside the product. The query has further columns that add up to the
  LSE, each the rounded rest of the previous column, and the key has columns of -1. `rowsum(out * grad_out)`
  is subtracted in the same way.
- Rounding the exponent leaves a rest. A second product, which subtracts the first, computes it.

Padding has columns that make its weights 0.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from math import copysign, log
from typing import NamedTuple

import torch
from torch import Tensor

from attnreg.backends.cpu.flash import Band
from attnreg.backends.cpu.padding import padded_batches, powers_of_two, zeros
from attnreg.backends.cpu.sequences import UniformBatch
from attnreg.core.contract.backend import Call

# exp2 is faster than exp.
_LOG2 = log(2)
# Scores, and rows, computed at a time, so that they stay in the CPU's cache.
_SCORES, _ROWS = 2**21, 2**13
# Scores of a block of keys of one head, so that two heads stay in the CPU's cache.
_AREA = 2**20
# Keys of a block. Fewer than _LEAST_KEYS aren't worth a product's call. Under a band the corners of a block
# are computed for nothing: there a block has _NARROW to _WIDE keys, enough for a fast product.
_LEAST_KEYS, _NARROW, _WIDE = 32, 64, 256
# How many bfloat16 numbers add up to a float32.
_COLUMNS = 3
_MINUS_ONE = (-1.0,) * _COLUMNS
# The exponent of padding; divided by the smallest scale it stays finite.
_FAR = 1e30
_SMALLEST = 1e-6


def takes(q: Tensor, call: Call) -> bool:
    """Return whether `backward` can run a call with the query `q`, (B, S, H, D) or packed (T, H, D).

    The query has to be bfloat16. `backward` divides by the scale, which must not be too small.
    """
    fits = q.dtype == torch.bfloat16 and call.attn_bias is None and abs(call.scale) >= _SMALLEST
    return fits and _is_fast()


@functools.cache
def _is_fast() -> bool:
    """Return whether this CPU multiplies bfloat16 in hardware."""
    flags = torch.cpu.get_capabilities()
    return bool(flags.get("avx512_bf16") or flags.get("amx_bf16"))


def backward(
    tensors: Sequence[Tensor], scale: float, uniform: Iterable[UniformBatch]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, packed (T, H, D) in bfloat16.

    Args:
        tensors: grad_out, query, key, value and out, (T, H, D) in bfloat16, and the LSE (T, H) in float32.
        scale: the factor of the scores.
        uniform: the sequences.
    """
    *_, out, lse = tensors
    grad_out, q, k, v = (x.contiguous() for x in tensors[:4])
    grads, to = zip(*(zeros(x) for x in (q, k, v)), strict=True)
    flat_lse, flat_delta = lse.flatten(), _delta(grad_out, out).flatten()
    for batch in padded_batches(uniform, q.shape[:2], k.shape[:2]):
        count, height, width = batch.shape
        blocks = key_blocks(height, batch.groups, width, batch.band)
        area = max(block.rows * block.keys for block in blocks) * batch.groups
        for part in powers_of_two(count, min(_SCORES // area, _ROWS // max(height * batch.groups, width))):
            rows, keys = batch.rows.of(part), batch.keys.of(part)
            split_lse = _split(rows.gather_numbers(flat_lse, _FAR) / scale)
            split_delta = _split(rows.gather_numbers(flat_delta, 0.0))
            grads_of_part = _solve(
                rows.gather_rows(q, [*split_lse, copysign(1.0, scale)]),
                rows.gather_rows(grad_out, split_delta),
                keys.gather_rows(k, [*_MINUS_ONE, keys.gather_numbers(None, -_FAR)]),
                keys.gather_rows(v, _MINUS_ONE),
                blocks,
                batch.groups,
                scale,
            )
            for flat, places, grad in zip(to, (rows, keys, keys), grads_of_part, strict=True):
                places.write(flat, grad)
    return grads


def _solve(
    q: Tensor, grad_out: Tensor, k: Tensor, v: Tensor, blocks: Sequence[KeyBlock], groups: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of some sequences, (sequences * key heads, rows or keys, size).

    The tensors have the same layout, and `_COLUMNS` further columns (see the module's docstring).
    """
    if len(blocks) == 1 and blocks[0].rows * groups == q.size(1):
        return _product(q, grad_out, k, v, blocks[0], groups, scale)
    # Each key belongs to one block, a row to several.
    size = v.size(2) - _COLUMNS
    grad_q = torch.zeros(*q.shape[:2], size, dtype=torch.float32, device="cpu")
    grad_k, grad_v = (x.new_zeros(*x.shape[:2], size) for x in (k, v))
    for block in blocks:
        rows = slice(block.row * groups, (block.row + block.rows) * groups)
        keys = slice(block.key, block.key + block.keys)
        grads = _product(q[:, rows], grad_out[:, rows], k[:, keys], v[:, keys], block, groups, scale)
        grad_q[:, rows].add_(grads[0])
        grad_k[:, keys], grad_v[:, keys] = grads[1:]
    return grad_q.bfloat16(), grad_k, grad_v


def _product(
    q: Tensor, grad_out: Tensor, k: Tensor, v: Tensor, block: KeyBlock, groups: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    size = v.size(2) - _COLUMNS
    # Keys first: then only one of five products reads the scores transposed, which is slow.
    p = _scaled(k, q.mT, scale / _LOG2)
    # With even attention all exponents of a row are rounded alike, so that their rests don't average out.
    rest = torch.baddbmm(p, k, q.mT, beta=-1, alpha=scale / _LOG2)
    p.exp2_().addcmul_(p, rest, value=_LOG2)
    _hide(p, block, groups)
    grad_v = torch.bmm(p, grad_out[..., :size])
    p.mul_(torch.bmm(v, grad_out.mT, out=rest))
    return _scaled(p.mT, k[..., :size], scale), _scaled(p, q[..., :size], scale), grad_v


def _hide(p: Tensor, block: KeyBlock, groups: int) -> None:
    """Set weights outside of the block's band to 0."""
    if block.band is None:
        return
    heads = p if groups == 1 else p.view(-1, block.keys, block.rows, groups).permute(0, 3, 1, 2)
    if block.band[1] < block.keys - 1:
        heads.triu_(-block.band[1])
    if block.band[0] > 1 - block.rows:
        heads.tril_(-block.band[0])


def _scaled(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return the scaled product, rounded once."""
    out = a.new_empty(a.size(0), a.size(1), b.size(2))
    return torch.baddbmm(out, a, b, beta=0, alpha=scale, out=out)


def _split(x: Tensor) -> list[Tensor]:
    """Return `_COLUMNS` bfloat16 tensors that add up to `x`, each the rounded rest of the previous sum."""
    parts: list[Tensor] = []
    for _ in range(_COLUMNS):
        parts.append(x.bfloat16())
        x = x - parts[-1].float()
    return parts


def _delta(grad_out: Tensor, out: Tensor) -> Tensor:
    """Return rowsum(out * grad_out) in float32."""
    # Few rows at a time: a float32 copy of all rows would be as large as the inputs.
    pairs = zip(torch.split(grad_out, 128), torch.split(out, 128), strict=True)
    return torch.cat([(grad.float() * o.float()).sum(-1) for grad, o in pairs])


class KeyBlock(NamedTuple):
    """A rectangle of scores: some keys, and the rows that see at least one of these keys."""

    row: int
    rows: int
    key: int
    keys: int
    band: Band | None


@functools.lru_cache(maxsize=256)
def key_blocks(rows: int, group: int, keys: int, band: Band | None) -> tuple[KeyBlock, ...]:
    """Cut a sequence into blocks that share no key; `group` query heads share a key head."""
    low, high = (-rows, keys) if band is None else band
    reach = min(rows, high - low + 1)
    size = max(_LEAST_KEYS, _AREA // (reach * group) // 32 * 32)
    if band is not None:
        size = min(size, max(_NARROW, min(_WIDE, 1 << reach.bit_length() - 1)))
    blocks = []
    for key in range(0, keys, size):
        width = min(size, keys - key)
        first, last = max(0, key - high), min(rows, key + width - low)
        if first < last:
            block_band = (low + first - key, high + first - key)
            hides = block_band[0] > 1 - (last - first) or block_band[1] < width - 1
            blocks.append(KeyBlock(first, last - first, key, width, block_band if hides else None))
    return tuple(blocks)
