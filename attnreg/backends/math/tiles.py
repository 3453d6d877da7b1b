"""Attention over one padded group, tile by tile, forward and backward.

Shapes: query (b, H, S_q, D), key (b, H_k, S_k, D), value (b, H_k, S_k, D_v), all of the dtype that
the work is done in. The forward keeps a running softmax per row (Milakov and Gimelshein,
https://arxiv.org/abs/1805.02867); the backward rebuilds each tile's weights from the LSE (Dao et
al., https://arxiv.org/abs/2205.14135).
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnreg.backends.math.mask import Mask, Tile


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    """Return the output and the LSE (b, H, S_q, 1)."""
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    lse = q.new_full((*q.shape[:-1], 1), -torch.inf)
    for rows in mask.row_blocks():
        out[:, :, rows], lse[:, :, rows] = _attend_rows(q[:, :, rows], k, v, mask, rows)
    return out, lse


def _attend_rows(q: Tensor, k: Tensor, v: Tensor, mask: Mask, rows: slice) -> tuple[Tensor, Tensor]:
    peak = q.new_full((*q.shape[:-1], 1), -torch.inf)
    total = torch.zeros_like(peak)
    weighted = q.new_zeros(*q.shape[:-1], v.shape[-1])
    for tile in mask.tiles(rows):
        scores = _scores(q, _seen_keys(k, tile), tile, mask)
        higher = torch.maximum(peak, scores.amax(-1, keepdim=True))
        # A row without a key so far has no peak: -inf - -inf would be NaN.
        anchor = higher.masked_fill(higher == -torch.inf, 0.0)
        weights, fade = (scores - anchor).exp_(), (peak - anchor).exp_()
        total = total * fade + weights.sum(-1, keepdim=True)
        kept = mask.kept(tile, q.dtype)
        dropped = weights if kept is None else weights * kept
        weighted = weighted * fade + _times(dropped, _seen_keys(v, tile))
        peak = higher
    return weighted / total.masked_fill(total == 0, 1.0), peak + total.log()


def attend_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Mask
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value; `lse` is (b, H, S_q, 1)."""
    grad_q, grad_k, grad_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    # Equal to sum(weights * grad_weights) of each row, which the softmax's backward needs, and cheaper.
    delta = (grad_out * out).sum(-1, keepdim=True)
    for rows in mask.row_blocks():
        for tile in mask.tiles(rows):
            q_rows, grad_rows = _seen_rows(q[:, :, rows], tile), _seen_rows(grad_out[:, :, rows], tile)
            keys = _seen_keys(k, tile)
            weights = _hide((_scores(q_rows, keys, tile, mask) - lse[:, :, rows]).exp_(), tile, 0.0)
            grad_weights = _times(grad_rows, _seen_keys(v, tile).mT)
            kept = mask.kept(tile, q.dtype)
            if kept is not None:
                grad_weights *= kept
            grad_v[:, :, tile.cols] += _summed(weights if kept is None else weights * kept, grad_rows, k)
            grad_scores = weights.mul_(grad_weights.sub_(delta[:, :, rows])).mul_(mask.call.scale)
            grad_scores = _hide(grad_scores, tile, 0.0)
            grad_q[:, :, rows] += _times(grad_scores, keys)
            grad_k[:, :, tile.cols] += _summed(grad_scores, q_rows, k)
    return grad_q, grad_k, grad_v


def _scores(q: Tensor, keys: Tensor, tile: Tile, mask: Mask) -> Tensor:
    """Return the scores of a tile, -inf where they don't count."""
    scores = _times(q, keys.mT).mul_(mask.call.scale)
    added = mask.added(tile, q.dtype)
    if added is not None:
        scores += added
    return _hide(scores, tile, -torch.inf)


def _hide(x: Tensor, tile: Tile, value: float) -> Tensor:
    return x if tile.visible is None else x.masked_fill_(~tile.visible, value)


def _seen_rows(x: Tensor, tile: Tile) -> Tensor:
    """Return rows, 0 for those that see no key of the tile: their NaN would survive a weight of 0."""
    return x if tile.visible is None else x.masked_fill(~tile.visible.any(-1)[..., None], 0.0)


def _seen_keys(x: Tensor, tile: Tile) -> Tensor:
    """Return the keys or values of a tile, 0 for those that no query sees."""
    x = x[:, :, tile.cols]
    if tile.visible is None:
        return x
    seen = tile.visible.any(-2)
    if seen.shape[1] > 1:  # query heads: a key head is seen if one of its group sees it
        seen = seen.view(seen.shape[0], x.shape[1], -1, seen.shape[2]).any(2)
    return x.masked_fill(~seen[..., None], 0.0)


def _times(x: Tensor, y: Tensor) -> Tensor:
    """Return (b, H, n, a) times (b, H_k, a, c) as (b, H, n, c), each y shared by a group of heads."""
    return (_folded(x, y.shape[1]) @ y).view(*x.shape[:-1], y.shape[-1])


def _summed(weights: Tensor, x: Tensor, k: Tensor) -> Tensor:
    """Return the transposed weights (b, H, n, m) times (b, H, n, c), summed over groups of heads."""
    return _folded(weights, k.shape[1]).mT @ _folded(x, k.shape[1])


def _folded(x: Tensor, heads: int) -> Tensor:
    """Return (b, H, n, c) as (b, heads, H / heads * n, c): heads that share a key become rows."""
    batch, all_heads, rows, size = x.shape
    return x.reshape(batch, heads, all_heads // heads * rows, size)
