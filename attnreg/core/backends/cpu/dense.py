"""Attention over a batch of equally long sequences by torch's kernel, one block of rows after the other.

The kernel knows only "all keys" and "causal", and that aligned top-left. A causal mask of the contract,
aligned bottom-right, is a square that the kernel takes as it is, and the keys before it. A window is cut into
blocks of rows with the keys in reach, so that no mask is larger than a block, and the cost grows with what is
visible.

Tensors come in as the kernel reads them, (B, H, S, D) and (B, H, S), and go out as the contract has them,
(B, S, H, D) and (B, S, H). Every query row belongs to one block; where its keys come in several ranges, the
outputs are merged by their LSE. The backward needs no merging: from the LSE of all keys, each range gives its
own share of the gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from attnreg.core.backends.cpu.flash import Band, Flash, lse_dtype
from attnreg.core.backends.cpu.sequences import Window, visible

Partial = tuple[Tensor, Tensor]

OPEN = (-1, -1)

# Rows of a block under a window: low blocks compute little that is hidden, high ones run faster.
_LOW, _HIGH = 64, 192


def forward(
    flash: Flash, q: Tensor, k: Tensor, v: Tensor, scale: float, window: Window, bias: Tensor | None = None
) -> Partial:
    """Return output and LSE."""
    blocks = _blocks(q, k, window, bias)
    if len(blocks) == 1 and _is_one_call(blocks[0], q, k):
        out, lse = flash.forward(q, k, v, scale, blocks[0].ranges[0].band, bias)
        return out.transpose(1, 2), lse.transpose(1, 2)
    done = [_block_forward(flash, q, k, v, scale, block) for block in blocks]
    if unseeing := blocks[0].row:
        shape = (q.size(0), unseeing, q.size(1))
        done.insert(0, (q.new_zeros(*shape, v.size(3)), q.new_full(shape, -inf, dtype=lse_dtype(q))))
    if len(done) == 1:
        return done[0]
    outs, lses = zip(*done, strict=True)
    return torch.cat(outs, dim=1), torch.cat(lses, dim=1)


def backward(
    flash: Flash, tensors: Sequence[Tensor], scale: float, window: Window, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value; `tensors` are those that `Flash.backward` takes."""
    grad_out, q, k, v, out, lse = tensors
    blocks = _blocks(q, k, window, bias)
    if len(blocks) == 1 and _is_one_call(blocks[0], q, k):
        grads = flash.backward(tensors, scale, blocks[0].ranges[0].band, bias)
        return grads[0].transpose(1, 2), grads[1].transpose(1, 2), grads[2].transpose(1, 2)
    totals = [x.new_zeros(x.transpose(1, 2).shape).transpose(1, 2) for x in (q, k, v)]
    for block in blocks:
        rows = [_take(x, block.row, block.rows, block) for x in (grad_out, q, out, lse)]
        for one in block.ranges:
            keys = [_take(x, one.key, one.keys, block) for x in (k, v)]
            grads = flash.backward((*rows[:2], *keys, *rows[2:]), scale, one.band)
            for total, start, grad in zip(totals, (block.row, one.key, one.key), grads, strict=True):
                _add(total, grad, start, block)
    return totals[0].transpose(1, 2), totals[1].transpose(1, 2), totals[2].transpose(1, 2)


def _blocks(q: Tensor, k: Tensor, window: Window, bias: Tensor | None) -> tuple[RowBlock, ...]:
    """Return the blocks of a call; with a bias, a tensor of all scores, nothing is gained by cutting."""
    rows, keys = q.size(2), k.size(2)
    if bias is None:
        return _row_blocks(rows, keys, window)
    low = keys - rows - window[0] if window[0] >= 0 else -rows
    high = keys - rows + window[1] if window[1] >= 0 else keys
    return (RowBlock(0, rows, (KeyRange(0, keys, None if window == OPEN else (low, high)),)),)


def _is_one_call(block: RowBlock, q: Tensor, k: Tensor) -> bool:
    """Return whether a block is one call of the kernel for all rows and keys."""
    return block.rows == q.size(2) and block.ranges[0].keys == k.size(2)


def _block_forward(flash: Flash, q: Tensor, k: Tensor, v: Tensor, scale: float, block: RowBlock) -> Partial:
    rows = _take(q, block.row, block.rows, block)
    partials: list[Partial] = []
    for one in block.ranges:
        keys, values = (_take(x, one.key, one.keys, block) for x in (k, v))
        partials.append(flash.forward(rows, keys, values, scale, one.band))
    out, lse = functools.reduce(_merged, partials)
    if block.count > 1:
        out, lse = (_repeated(x, block).movedim(1, 2).flatten(2, 3) for x in (out, lse))
    return out.transpose(1, 2), lse.transpose(1, 2)


def _merged(first: Partial, second: Partial) -> Partial:
    lse = torch.logaddexp(first[1], second[1])
    # In the LSE's precision: what is merged may be merged again.
    out, other = first[0].to(lse.dtype), second[0].to(lse.dtype)
    return torch.lerp(out, other, (second[1] - lse).exp().unsqueeze(-1)), lse


def _repeated(x: Tensor, block: RowBlock) -> Tensor:
    """Return the batch that `_take` made, (B * count, ...), as (B, count, ...)."""
    return x.reshape(-1, block.count, *x.shape[1:])


def _take(x: Tensor, start: int, size: int, block: RowBlock) -> Tensor:
    """Return `size` rows from `start` on, and of each repetition of the block, as one batch."""
    if block.count == 1:
        return x.narrow(2, start, size)
    reach = x.narrow(2, start, (block.count - 1) * block.step + size)
    return reach.unfold(2, size, block.step).movedim(2, 1).transpose(-1, 3).flatten(0, 1)


def _add(total: Tensor, grad: Tensor, start: int, block: RowBlock) -> None:
    """Add to the rows that `_take` returned; repetitions may have rows in common."""
    repetitions = _repeated(grad, block)
    for index in range(block.count):
        total.narrow(2, start + index * block.step, grad.size(2)).add_(repetitions[:, index])


class KeyRange(NamedTuple):
    """`keys` keys from `key` on, all of them visible or those in a band, counted from the first of both."""

    key: int
    keys: int
    band: Band | None = None


class RowBlock(NamedTuple):
    """`rows` rows from `row` on, and the keys that they see, as ranges.

    A block with a `count` stands for as many, each `step` rows and keys after the one before.
    """

    row: int
    rows: int
    ranges: tuple[KeyRange, ...]
    count: int = 1  # type: ignore[assignment]  # not the tuple's method
    step: int = 0

    def moved(self, rows: int, keys: int) -> RowBlock:
        """Return the block so many rows and keys further on."""
        ranges = tuple(each._replace(key=each.key + keys) for each in self.ranges)
        return self._replace(row=self.row + rows, ranges=ranges)


@functools.lru_cache(maxsize=1024)
def _row_blocks(len_q: int, len_k: int, window: Window) -> tuple[RowBlock, ...]:
    """Return the blocks of a sequence, in the order of their rows; rows in none see no key."""
    seen = visible(len_q, len_k, window)
    assert seen is not None  # neither side is empty
    row, key, (left, right) = seen
    rows, keys = len_q - row, len_k - key
    if (left, right) == OPEN:
        blocks = [RowBlock(0, rows, (KeyRange(0, keys),))]
    elif left >= 0:
        blocks = _windowed(rows, keys, left, right)
    else:
        blocks = _causal(rows, keys, right)
    return tuple(blocks if row == key == 0 else [block.moved(row, key) for block in blocks])


def _causal(rows: int, keys: int, right: int) -> list[RowBlock]:
    """Cut a mask without a left bound: keys that all rows see, a causal square, rows that see all."""
    square = rows - right
    before = (KeyRange(0, keys - square),) if keys > square else ()
    blocks = [RowBlock(0, square, (*before, KeyRange(keys - square, square, band=(1 - square, 0))))]
    return [*blocks, RowBlock(square, right, (KeyRange(0, keys),))] if right else blocks


def _windowed(rows: int, keys: int, left: int, right: int) -> list[RowBlock]:
    """Cut a window with a left bound into blocks with the keys in reach; equal neighbours become one."""
    shift = keys - rows
    low, high = shift - left, shift + right if right >= 0 else keys
    size = _LOW if high - low < 4 * _LOW else _HIGH
    blocks: list[RowBlock] = []
    for row in range(0, rows, size):
        height = min(size, rows - row)
        first, last = max(0, row + low), min(keys, row + height + high)
        near, far = low + row - first, high + row - first
        hides = near > 1 - height or far < last - first - 1
        block = RowBlock(row, height, (KeyRange(first, last - first, (near, far) if hides else None),))
        before = size * blocks[-1].count if blocks else 0
        if blocks and blocks[-1].moved(before, before)[:3] == block[:3]:
            blocks[-1] = blocks[-1]._replace(count=blocks[-1].count + 1, step=size)
        else:
            blocks.append(block)
    return blocks
