"""Attention over a batch of equally long sequences by torch's kernel, block of rows by block of rows.

The kernel has only two masks: none, and causal aligned top-left. The contract's causal mask is aligned
bottom-right. It is cut into a square, on which both masks are equal, and the keys before the square. A window
is cut into blocks of rows with the keys in reach. So no mask is larger than a block, and the cost grows with
the number of visible scores.

Input tensors have the kernel's layout, (B, H, S, D) and (B, H, S). Results have the layouts (B, S, H, D) and
(B, S, H). Every query row belongs to one block. Where its keys form several ranges, the outputs are merged by
their LSE. The backward needs no merging: from the LSE of all keys, each range yields its own share of the
gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from attnreg.backends.cpu.flash import Band, Flash, lse_dtype
from attnreg.backends.cpu.sequences import Window, visible

Partial = tuple[Tensor, Tensor]

OPEN = (-1, -1)

# Rows of a block under a window: low blocks compute few hidden scores, high blocks run faster.
_LOW, _HIGH = 64, 192


def forward(
    flash: Flash, q: Tensor, k: Tensor, v: Tensor, scale: float, window: Window, bias: Tensor | None = None
) -> Partial:
    """Return output (B, S, H, D) and LSE (B, S, H), of query, key and value as (B, H, S, D).

    Query, key and value have the same dtype, the LSE has `lse_dtype`. `bias` is as `additive` returns it.
    """
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
    """Return the gradients of query, key and value, (B, S, H, D); `tensors` are as in `Flash.backward`."""
    grad_out, q, k, v, out, lse = tensors
    blocks = _blocks(q, k, window, bias)
    if len(blocks) == 1 and _is_one_call(blocks[0], q, k):
        grads = flash.backward(tensors, scale, blocks[0].ranges[0].band, bias)
        return grads[0].transpose(1, 2), grads[1].transpose(1, 2), grads[2].transpose(1, 2)
    totals = [x.new_zeros(x.transpose(1, 2).shape).transpose(1, 2) for x in (q, k, v)]
    for block in blocks:
        rows = [_take(x, block.row, block.rows, block) for x in (grad_out, q, out, lse)]
        for key_range in block.ranges:
            keys = [_take(x, key_range.key, key_range.keys, block) for x in (k, v)]
            grads = flash.backward((*rows[:2], *keys, *rows[2:]), scale, key_range.band)
            for total, start, grad in zip(
                totals, (block.row, key_range.key, key_range.key), grads, strict=True
            ):
                _add(total, grad, start, block)
    return totals[0].transpose(1, 2), totals[1].transpose(1, 2), totals[2].transpose(1, 2)


def _blocks(q: Tensor, k: Tensor, window: Window, bias: Tensor | None) -> tuple[RowBlock, ...]:
    """Cut a call into blocks; with a bias, a tensor of all scores, cutting saves nothing."""
    rows, keys = q.size(2), k.size(2)
    if bias is None:
        return _row_blocks(rows, keys, window)
    low = keys - rows - window[0] if window[0] >= 0 else -rows
    high = keys - rows + window[1] if window[1] >= 0 else keys
    return (RowBlock(0, rows, (KeyRange(0, keys, None if window == OPEN else (low, high)),)),)


def _is_one_call(block: RowBlock, q: Tensor, k: Tensor) -> bool:
    """Return whether a block has all rows and keys, so that it is a single call of the kernel."""
    return block.rows == q.size(2) and block.ranges[0].keys == k.size(2)


def _block_forward(flash: Flash, q: Tensor, k: Tensor, v: Tensor, scale: float, block: RowBlock) -> Partial:
    rows = _take(q, block.row, block.rows, block)
    partials: list[Partial] = []
    for key_range in block.ranges:
        keys, values = (_take(x, key_range.key, key_range.keys, block) for x in (k, v))
        partials.append(flash.forward(rows, keys, values, scale, key_range.band))
    out, lse = functools.reduce(_merged, partials)
    if block.count > 1:
        out, lse = (_repeated(x, block).movedim(1, 2).flatten(2, 3) for x in (out, lse))
    return out.transpose(1, 2), lse.transpose(1, 2)


def _merged(first: Partial, second: Partial) -> Partial:
    lse = torch.logaddexp(first[1], second[1])
    # In the LSE's precision, because a merged output may be merged again.
    out, other = first[0].to(lse.dtype), second[0].to(lse.dtype)
    return torch.lerp(out, other, (second[1] - lse).exp().unsqueeze(-1)), lse


def _repeated(x: Tensor, block: RowBlock) -> Tensor:
    """Return the batch that `_take` made, (B * count, ...), as (B, count, ...)."""
    return x.reshape(-1, block.count, *x.shape[1:])


def _take(x: Tensor, start: int, size: int, block: RowBlock) -> Tensor:
    """Return `size` rows from `start` on, for each repetition of the block, as one batch."""
    if block.count == 1:
        return x.narrow(2, start, size)
    reach = x.narrow(2, start, (block.count - 1) * block.step + size)
    return reach.unfold(2, size, block.step).movedim(2, 1).transpose(-1, 3).flatten(0, 1)


def _add(total: Tensor, grad: Tensor, start: int, block: RowBlock) -> None:
    """Add a gradient to the rows that `_take` selects; repetitions may share rows."""
    repetitions = _repeated(grad, block)
    for index in range(block.count):
        total.narrow(2, start + index * block.step, grad.size(2)).add_(repetitions[:, index])


class KeyRange(NamedTuple):
    """`keys` keys from `key` on: all are visible, or the keys in a band relative to the first row and key."""

    key: int
    keys: int
    band: Band | None = None


class RowBlock(NamedTuple):
    """`rows` rows from `row` on, and the keys that they see, as ranges.

    A block with a `count` represents that many blocks, each `step` rows and keys after the previous block.
    """

    row: int
    rows: int
    ranges: tuple[KeyRange, ...]
    count: int = 1  # type: ignore[assignment]  # not the tuple's method
    step: int = 0

    def moved(self, rows: int, keys: int) -> RowBlock:
        """Return the block, moved by some rows and keys."""
        ranges = tuple(each._replace(key=each.key + keys) for each in self.ranges)
        return self._replace(row=self.row + rows, ranges=ranges)


@functools.lru_cache(maxsize=1024)
def _row_blocks(len_q: int, len_k: int, window: Window) -> tuple[RowBlock, ...]:
    """Cut a sequence into blocks, in the order of their rows; rows outside of all blocks see no key."""
    part = visible(len_q, len_k, window)
    assert part is not None  # neither side is empty
    row, key, (left, right) = part
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
    """Cut a window with a left bound into blocks with the keys in reach; equal neighbours are merged."""
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
