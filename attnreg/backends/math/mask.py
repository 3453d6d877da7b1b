"""Which scores of a group count, and what is added to them, tile by tile.

A tile is a slice of rows (queries) and a slice of columns (keys) of the padded score matrix. Only a single
tile of the matrix exists at a time. Tiles that the window excludes are skipped, so the work grows with the
window, not with the square of the length. A group has no keys that no query sees (`batch.py`).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from attnreg.backends.math.batch import Group
from attnreg.core.contract.backend import Call
from attnreg.core.launching import elementwise
from attnreg.core.torchlib.modes import outside_of_ops
from attnreg.errors import InvalidInputError

TILE_QUERIES = 256
TILE_KEYS = 512

# The lower 32 bits of an int64.
_WORD = 0xFFFFFFFF


class Tile(NamedTuple):
    """A part of the score matrix; boolean `visible` broadcasts to its scores, None if all of them count."""

    rows: slice
    cols: slice
    visible: Tensor | None


class Mask:
    """The hidden scores of a group, and what is added to its visible scores.

    Attributes:
        scale: what products of queries and keys are multiplied by.
        grad_bias: what the gradient of the bias is added to, in the bias's shape; None if none is wanted.
    """

    def __init__(self, call: Call, group: Group, heads: int, grad_bias: Tensor | None = None) -> None:
        self.call = call
        self.grad_bias = grad_bias
        self.group = group
        self.heads = heads
        self.width_q, self.width_k = group.queries.width, group.keys.width
        self.shift = self.width_k - self.width_q
        self.device = group.keys.rows.device
        self.scale = call.scale

    def row_blocks(self) -> Iterator[slice]:
        """Yield the rows in blocks."""
        return _blocks(0, self.width_q, TILE_QUERIES)

    def tiles(self, rows: slice) -> Iterator[Tile]:
        """Yield the tiles of some rows, without tiles that the window hides entirely."""
        left, right = self.call.window
        low = max(0, rows.start + self.shift - left) if left >= 0 else 0
        high = min(self.width_k, rows.stop + self.shift + right) if right >= 0 else self.width_k
        for cols in _blocks(low, high, TILE_KEYS):
            parts = [*self._conditions(rows, cols)]
            yield Tile(rows, cols, functools.reduce(operator.and_, parts) if parts else None)

    def modified(self, scores: Tensor, tile: Tile) -> Tensor:
        """Return what `score_mod` makes of a tile, (b, H, rows, columns), in float32 or float64."""
        function = self.call.score_mod
        return scores if function is None else elementwise.modified(function, scores, *self._places(tile))

    def modified_with_slope(self, scores: Tensor, tile: Tile) -> tuple[Tensor, Tensor | None]:
        """Return what `modified` does, and the derivative of each result by its score; None for all ones.

        Scores, results and derivatives are (b, H, rows, columns), float32 or float64.
        """
        if self.call.score_mod is None:
            return scores, None
        with outside_of_ops(), torch.enable_grad():
            leaf = scores.detach().requires_grad_()
            results = self.modified(leaf, tile)
            if not results.requires_grad:  # no result depends on its score
                return results, torch.zeros_like(scores)
            (slope,) = torch.autograd.grad(results.sum(), leaf)
        return results.detach(), slope

    def added(self, tile: Tile, dtype: torch.dtype) -> Tensor | None:
        """Return the bias and slopes that are added to the scaled scores of a tile, or None."""
        bias, slopes = self._part_of(self.call.attn_bias, tile.rows, tile.cols), self.call.alibi_slopes
        if bias is not None and bias.dtype == torch.bool:
            bias = None
        if slopes is None:
            return bias
        slopes = (slopes[None] if slopes.dim() == 1 else slopes[self.group.batch]).to(dtype)
        alibi = -slopes[:, :, None, None] * self._distance(tile.rows, tile.cols).abs()
        return alibi if bias is None else alibi + bias

    def kept(self, tile: Tile, dtype: torch.dtype) -> Tensor | None:
        """Return the factors of dropout: 0 where a weight is dropped, else 1 / (1 - p)."""
        p, rng_state = self.call.dropout, self.call.rng_state
        if p == 0.0:
            return None
        if rng_state is None:
            raise InvalidInputError(f"rng_state: got None with dropout_p {p}, expected a seed and an offset")
        # Rows and columns are counted from the end, so that a weight's number doesn't depend on padding.
        survives = _survivors(
            rng_state,
            p,
            self._numbers(self.group.batch),
            torch.arange(self.heads, device=self.device),
            self.width_q - 1 - self._numbers(tile.rows),
            self.width_k - 1 - self._numbers(tile.cols),
        )
        return survives.to(dtype).mul_(1.0 / (1.0 - p) if p < 1.0 else 0.0)

    def _conditions(self, rows: slice, cols: slice) -> Iterator[Tensor]:
        """Yield the conditions for a score to count, without conditions that all scores meet."""
        left, right = self.call.window
        if left >= 0 and cols.start < rows.stop - 1 + self.shift - left:
            yield (self._distance(rows, cols) <= left)[None, None]
        if right >= 0 and cols.stop - 1 > rows.start + self.shift + right:
            yield (self._distance(rows, cols) >= -right)[None, None]
        if self.group.queries.padded:
            yield (self.group.queries.positions[:, rows] >= 0)[:, None, :, None]
        if self.group.keys.padded:
            yield (self.group.keys.positions[:, cols] >= 0)[:, None, None, :]
        if self.call.key_ranges is not None:
            yield self._in_ranges(self.call.key_ranges, rows, cols)
        if self.call.mask_mod is not None:
            places = self._places(Tile(rows, cols, None))
            yield elementwise.visible(self.call.mask_mod, self.heads, *places)
        bias = self._part_of(self.call.attn_bias, rows, cols)
        if bias is not None:
            # A key at -inf is hidden, not merely unlikely: its NaN must not reach the output.
            yield bias if bias.dtype == torch.bool else bias != -torch.inf

    def _places(self, tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sequences of a tile (b,), the places of its queries (b, rows) and keys (b, columns).

        A function may read tensors at these places, so all of them exist: padding has the first place of its
        sequence, and a sequence that lacks queries or keys has the number of another.
        """
        queries, keys = self.group.queries.positions, self.group.keys.positions
        numbers = self._numbers(self.group.batch)
        if self.group.queries.padded or self.group.keys.padded:
            has_scores = (queries[:, -1] >= 0) & (keys[:, -1] >= 0)
            another = numbers.take(has_scores.int().argmax())  # an index in brackets is read on the host
            numbers = torch.where(has_scores, numbers, another)
        places = numbers, queries[:, tile.rows].clamp(min=0), keys[:, tile.cols].clamp(min=0)
        return places[0].int(), places[1].int(), places[2].int()

    def _in_ranges(self, key_ranges: Tensor, rows: slice, cols: slice) -> Tensor:
        """Return which keys lie in a range of their query; of padding, which is hidden anyway, any."""
        of_rows = key_ranges[self.group.queries.rows[:, rows].clamp(max=key_ranges.shape[0] - 1)]
        places = self.group.keys.positions[:, None, cols]
        inside = torch.zeros(*of_rows.shape[:2], places.shape[-1], dtype=torch.bool, device=self.device)
        for low, high in (bounds.unbind(-1) for bounds in of_rows.unbind(2)):
            inside |= (places >= low[..., None]) & (places < high[..., None])
        return inside[:, None]

    def add_gradients(self, of_scores: Tensor, tile: Tile) -> None:
        """Add the gradients of a tile's scores, (b, H, rows, columns), to that of the bias, if one is wanted.

        They are float32 or float64. Those of hidden scores are set to 0.
        """
        part = self._part_of(self.grad_bias, tile.rows, tile.cols)
        if part is not None:
            if tile.visible is not None:
                of_scores.masked_fill_(~tile.visible, 0.0)
            part += of_scores.sum_to_size(part.shape)

    def _part_of(self, bias: Tensor | None, rows: slice, cols: slice) -> Tensor | None:
        """Return the part of a bias, or of its gradient, for a tile; a view if no key is padding."""
        if bias is None:
            return None
        bias = bias[(None,) * (4 - bias.dim())]
        first = self.group.queries.start
        rows = slice(first + rows.start, first + rows.stop)
        for dim, part in ((0, self.group.batch), (2, rows)):
            bias = bias.narrow(dim, part.start, part.stop - part.start) if bias.shape[dim] > 1 else bias
        if bias.shape[3] == 1:
            return bias
        if not self.group.keys.padded:
            first = self.group.keys.start
            return bias[..., first + cols.start : first + cols.stop]
        places = self.group.keys.positions[:, None, None, cols].clamp(min=0)
        return bias.take_along_dim(places, dim=3)

    def _distance(self, rows: slice, cols: slice) -> Tensor:
        """Return the distance from each key to each query, positive for earlier keys, (rows, cols)."""
        return self._numbers(rows)[:, None] + self.shift - self._numbers(cols)

    def _numbers(self, part: slice) -> Tensor:
        return torch.arange(part.start, part.stop, device=self.device)


def _blocks(low: int, high: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, high)) for start in range(low, high, size))


def _survivors(
    rng_state: Tensor, p: float, batch: Tensor, heads: Tensor, rows: Tensor, cols: Tensor
) -> Tensor:
    """Return which weights (b, H, rows, cols) are kept; each is dropped with probability `p`.

    A weight has its own random number: a hash of the random state, (2,) uint64, and of the numbers of its
    batch, head, row and column. So any part of the mask can be computed again on any device. The backward
    needs only the random state from the forward, which is never read on the host. `Dropout` in the cpu
    backend's kernel/options.h is the same function.
    """
    places = (batch[:, None, None, None], heads[:, None, None], rows[:, None])
    step, start = (_key(rng_state, lane, *places) for lane in (1, 2))
    # An odd step visits every word once: no two columns of a row collide before the hash.
    drawn = _hash((cols * (step | 1) + start) & _WORD)
    return drawn >= round(p * 2**32)


def _key(rng_state: Tensor, lane: int, *places: Tensor) -> Tensor:
    """Return 32 random bits, as int64, for each row of the mask; each lane has different bits."""
    seed, offset = rng_state.view(torch.int64).unbind()
    key = _hash((seed & _WORD) ^ lane)
    for word in (seed >> 32, offset, offset >> 32, *places):
        key = _hash(key ^ (word & _WORD))
    return key


def _hash(word: Tensor) -> Tensor:
    """Mix 32 bits in an int64: both constants are below 2**31, so that nothing overflows.

    The constants are from https://github.com/skeeto/hash-prospector/issues/19.
    """
    word = (word ^ (word >> 16)) * 0x21F0AAAD & _WORD
    word = (word ^ (word >> 15)) * 0x735A2D97 & _WORD
    return word ^ (word >> 15)
