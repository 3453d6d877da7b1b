"""The softmax of rows of scores, of which tiles come one after the other."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Softmax:
    """The softmax of some rows, of which one tile of keys after another comes.

    Attributes:
        peak: the highest score so far, (b, H, rows, 1); -inf for a row without a key.
        total: the sum of the weights so far, relative to the peak.
    """

    def __init__(self, q: Tensor) -> None:
        self.peak = q.new_full((*q.shape[:-1], 1), -torch.inf)
        self.total = torch.zeros_like(self.peak)

    def add(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights of a tile relative to the new peak, and the factor on what was summed before."""
        before, self.peak = self.peak, torch.maximum(self.peak, scores.amax(-1, keepdim=True))
        weights, fade = self.weights(scores), (before - self._anchor).exp_()
        self.total = self.total * fade + weights.sum(-1, keepdim=True)
        return weights, fade

    def weights(self, scores: Tensor) -> Tensor:
        """Return the weights of a tile relative to the peak."""
        return (scores - self._anchor).exp_()

    @property
    def _anchor(self) -> Tensor:
        # A row without a key so far has no peak: -inf - -inf would be NaN.
        return self.peak.masked_fill(self.peak == -torch.inf, 0.0)

    @property
    def divisor(self) -> Tensor:
        """The sum of all weights, 1 for a row without a key."""
        return self.total.masked_fill(self.total == 0, 1.0)


class ForwardResults(NamedTuple):
    """The output and the LSE (b, H, S_q, 1) that a backward is given; maybe of more keys than it is given.

    `rounding` is how much of an LSE its kernel may have rounded it by.
    """

    out: Tensor
    lse: Tensor
    rounding: float

    def share(self, rows: slice, softmax: Softmax) -> Tensor:
        """Return how much of the weight of some rows is on the keys of `softmax`: 1 if it is all."""
        lse, here = self.lse[:, :, rows], softmax.peak + softmax.total.log()
        share = (here - lse).exp().nan_to_num(nan=1.0)  # -inf - -inf: a row without a key
        # Equal but for rounding: what the LSE has been rounded by is no share.
        has_more = (lse == torch.inf) | (here < lse - self.rounding * lse.abs().clamp(min=1.0))
        return share.where(has_more, 1.0)

    def delta(self, rows: slice, grad_out: Tensor) -> Tensor:
        """Return what the softmax's backward subtracts in rows that see other keys as well."""
        return (self.out[:, :, rows] * grad_out).sum(-1, keepdim=True)
