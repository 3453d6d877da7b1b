"""The backward in bfloat16, by batched products of oneDNN.

They run several times as fast as those of the flash kernel, but round what they return to bfloat16. So
that this costs no precision, nothing large is rounded: the LSE is subtracted from the scores inside the
product, by further columns of the query (each the rounded rest of the one before) against columns of -1
in the key, and `rowsum(out * grad_out)` likewise. What is lost when the exponent is rounded comes from a
second product that subtracts the first. Padding gets columns that make its weights 0.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from math import copysign, log
from typing import NamedTuple

import torch
from torch import Tensor

from attnreg.core.backends.cpu.flash import Band
from attnreg.core.backends.cpu.padding import padded_batches, powers_of_two, zeros
from attnreg.core.backends.cpu.sequences import UniformBatch
from attnreg.core.contract.backend import Call

# exp2 is faster than exp.
_LOG2 = log(2)
# Scores, and rows, computed at a time: as many as stay in the cache.
_SCORES, _ROWS = 2**21, 2**13
# Scores of a block of keys of one head: two heads at a time stay in the cache.
_AREA = 2**20
# Keys of a block: at least as many as make a product worth its call, and under a band, whose corners are
# computed for nothing, at most as many as make a fast one.
_LEAST_KEYS, _NARROW, _WIDE = 32, 64, 256
# As many bfloat16 numbers add up to a float32.
_COLUMNS = 3
_MINUS_ONE = (-1.0,) * _COLUMNS
# The exponent of padding; it stays finite over the smallest scale.
_FAR = 1e30
_SMALLEST = 1e-6


def takes(q: Tensor, call: Call) -> bool:
    """Return whether `backward` can run a call; it divides by the scale."""
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
    """Return the gradients of packed tensors (T, H, D), from an LSE (T, H)."""
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
            split_lse = _split(rows.padded(flat_lse, _FAR) / scale)
            split_delta = _split(rows.padded(flat_delta, 0.0))
            found = _solve(
                rows.taken(q, [*split_lse, copysign(1.0, scale)]),
                rows.taken(grad_out, split_delta),
                keys.taken(k, [*_MINUS_ONE, keys.padded(None, -_FAR)]),
                keys.taken(v, _MINUS_ONE),
                blocks,
                batch.groups,
                scale,
            )
            for flat, places, grad in zip(to, (rows, keys, keys), found, strict=True):
                places.write(flat, grad)
    return grads


def _solve(
    q: Tensor, grad_out: Tensor, k: Tensor, v: Tensor, blocks: Sequence[KeyBlock], groups: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of some sequences, (sequences * key heads, rows or keys, size).

    The tensors lie likewise, and have the further columns.
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
        found = _product(q[:, rows], grad_out[:, rows], k[:, keys], v[:, keys], block, groups, scale)
        grad_q[:, rows].add_(found[0])
        grad_k[:, keys], grad_v[:, keys] = found[1:]
    return grad_q.bfloat16(), grad_k, grad_v


def _product(
    q: Tensor, grad_out: Tensor, k: Tensor, v: Tensor, block: KeyBlock, groups: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    size = v.size(2) - _COLUMNS
    # Keys first: of five products only one then has to read the scores transposed, which is slow.
    p = _scaled(k, q.mT, scale / _LOG2)
    # Where attention is even, all exponents of a row are rounded alike: their rest doesn't average out.
    rest = torch.baddbmm(p, k, q.mT, beta=-1, alpha=scale / _LOG2)
    p.exp2_().addcmul_(p, rest, value=_LOG2)
    _hide(p, block, groups)
    grad_v = torch.bmm(p, grad_out[..., :size])
    p.mul_(torch.bmm(v, grad_out.mT, out=rest))
    return _scaled(p.mT, k[..., :size], scale), _scaled(p, q[..., :size], scale), grad_v


def _hide(p: Tensor, block: KeyBlock, groups: int) -> None:
    """Set to 0 what a band leaves out."""
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


class KeyBlock(NamedTuple):
    """A rectangle of scores: some keys, and the rows that see one of them."""

    row: int
    rows: int
    key: int
    keys: int
    band: Band | None


@functools.lru_cache(maxsize=256)
def key_blocks(rows: int, group: int, keys: int, band: Band | None) -> tuple[KeyBlock, ...]:
    """Return the blocks of a sequence, no two with a key in common; `group` query heads share a key head."""
    low, high = (-rows, keys) if band is None else band
    reach = min(rows, high - low + 1)
    size = max(_LEAST_KEYS, _AREA // (reach * group) // 32 * 32)
    if band is not None:
        size = min(size, max(_NARROW, min(_WIDE, 1 << reach.bit_length() - 1)))
    found = []
    for key in range(0, keys, size):
        width = min(size, keys - key)
        first, last = max(0, key - high), min(rows, key + width - low)
        if first < last:
            here = (low + first - key, high + first - key)
            hides = here[0] > 1 - (last - first) or here[1] < width - 1
            found.append(KeyBlock(first, last - first, key, width, here if hides else None))
    return tuple(found)
