"""The online softmax of rows of scores, which arrive tile by tile."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# The least size of an output, relative to the largest value, at which a share of it is known precisely,
# because its weighted values don't cancel.
PRECISE = 0.1
# Up to this part of the limit of `Output.compared` a difference is only rounding.
ROUNDING = 0.25


class Softmax:
    """The softmax of some rows, to which tiles of keys are added.

    Attributes:
        peak: the highest score so far, (b, H, rows, 1); -inf for a row without a key.
        total: the sum of the weights so far, relative to the peak.
    """

    def __init__(self, q: Tensor) -> None:
        self.peak = q.new_full((*q.shape[:-1], 1), -torch.inf)
        self.total = torch.zeros_like(self.peak)

    def add(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights of a tile relative to the new peak, and the factor for earlier sums.

        `scores` and the weights are (b, H, rows, columns), the factor is (b, H, rows, 1).
        """
        before, self.peak = self.peak, torch.maximum(self.peak, scores.amax(-1, keepdim=True))
        weights, fade = self.weights(scores), (before - self._anchor).exp_()
        self.total = self.total * fade + weights.sum(-1, keepdim=True)
        return weights, fade

    def weights(self, scores: Tensor) -> Tensor:
        """Return the weights of a tile relative to the peak, in the shape of the scores.

        `scores` are (b, H, rows, columns), in the dtype of the computation, float32 or float64.
        """
        return (scores - self._anchor).exp_()

    @property
    def _anchor(self) -> Tensor:
        # A row that hasn't seen a key has no peak: -inf - -inf would be NaN.
        return self.peak.masked_fill(self.peak == -torch.inf, 0.0)

    @property
    def divisor(self) -> Tensor:
        """The sum of all weights, 1 for a row without a key."""
        return self.total.masked_fill(self.total == 0, 1.0)


class ForwardResults(NamedTuple):
    """The output (b, H, S_q, D_v) and the LSE (b, H, S_q, 1) of a forward, which may have seen more keys.

    `rounding` is the relative rounding error that an LSE may have. `is_exact` says whether the output has as
    many bits as the computation here.
    """

    out: Tensor
    lse: Tensor
    rounding: float
    is_exact: bool

    def share(self, rows: slice, softmax: Softmax) -> Tensor:
        """Return the share of the weight of some rows that is on the keys of `softmax`; 1 is all of it."""
        lse, here = self.lse[:, :, rows], softmax.peak + softmax.total.log()
        share = (here - lse).exp().nan_to_num(nan=1.0)  # -inf - -inf: a row without a key
        # A difference within the LSE's rounding is no share.
        has_more = (lse == torch.inf) | (here < lse - self.rounding * lse.abs().clamp(min=1.0))
        return share.where(has_more, 1.0)

    def delta(self, rows: slice, grad_out: Tensor) -> Tensor:
        """Return the sum that the softmax's backward subtracts in rows that see further keys.

        It is (b, H, rows, 1), in the dtype of `grad_out`, which is (b, H, rows, D_v).
        """
        return (self.out[:, :, rows] * grad_out).sum(-1, keepdim=True)


class Output:
    """The output of some rows, computed anew tile by tile, for comparison with the forward's output."""

    def __init__(self, q: Tensor, previous: Tensor) -> None:
        self._q, self._previous, self._sum = q, previous, torch.zeros_like(previous)
        self._longest_key = self._largest_value = previous.new_zeros(())

    def add(self, weighted: Tensor, fade: Tensor, keys: Tensor, values: Tensor) -> None:
        """Add the weighted values of a tile; its keys and values determine the expected rounding.

        `weighted` is (b, H, rows, D_v) and `fade`, the factor for earlier sums, (b, H, rows, 1). Keys are (b,
        H_k, columns, D), values (b, H_k, columns, D_v). All have the dtype of the computation.
        """
        self._sum = self._sum * fade + weighted
        self._longest_key = torch.maximum(self._longest_key, _largest(keys.norm(dim=-1)))
        self._largest_value = torch.maximum(self._largest_value, _largest(values))

    def compared(self, softmax: Softmax, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """Express the forward's output, by row, as a factor times the output computed here and a rest.

        Returns the factor (b, H, rows, 1), the rest (b, H, rows, D_v), and whether the factor is the share of
        the weights on these keys. The LSE determines that share less precisely. It changes if a forward sums
        scores in another order, by as much as by a small sink. An output is divided by the sum of its own
        weights.
        """
        here = self._sum / softmax.divisor
        square = here.square().sum(-1, keepdim=True)
        part = ((self._previous * here).sum(-1, keepdim=True) / square).where(square > 0.0, 1.0)
        rest = self._previous - part * here
        largest = rest.abs().amax(-1, keepdim=True)
        # About the difference of scores that are summed in another order, which is the relative one of
        # weights.
        rounding = 8.0 + abs(scale) * self._q.norm(dim=-1, keepdim=True) * self._longest_key
        limit = torch.finfo(here.dtype).eps * rounding * self._largest_value
        is_precise = (largest <= limit) & (here.abs().amax(-1, keepdim=True) > PRECISE * self._largest_value)
        return part, rest.masked_fill(largest <= ROUNDING * limit, 0.0), is_precise


def _largest(x: Tensor) -> Tensor:
    return x.abs().nan_to_num(0.0, 0.0, 0.0).amax() if x.numel() else x.new_zeros(())
