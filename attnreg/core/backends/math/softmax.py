"""The softmax of rows of scores, of which tiles come one after the other."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# How large an output has to be, relative to the largest value, for a part of it to be known precisely: its
# weighted values don't cancel.
PRECISE = 0.1
# Up to which part of the limit of `Output.compared` a difference is nothing but rounding.
ROUNDING = 0.25


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

    `rounding` is how much of an LSE its kernel may have rounded it by; `is_exact` says that the output has as
    many bits as what is computed here.
    """

    out: Tensor
    lse: Tensor
    rounding: float
    is_exact: bool

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


class Output:
    """The output of some rows, computed anew tile by tile, beside the one that a backward is given."""

    def __init__(self, q: Tensor, previous: Tensor) -> None:
        self._q, self._previous, self._sum = q, previous, torch.zeros_like(previous)
        self._longest_key = self._largest_value = previous.new_zeros(())

    def add(self, weighted: Tensor, fade: Tensor, keys: Tensor, values: Tensor) -> None:
        """Add the weighted values of a tile, whose keys and values are given, too."""
        self._sum = self._sum * fade + weighted
        self._longest_key = torch.maximum(self._longest_key, _largest(keys.norm(dim=-1)))
        self._largest_value = torch.maximum(self._largest_value, _largest(values))

    def compared(self, softmax: Softmax, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return by row how the output that was given is made of the one computed here.

        That is a factor on it, what is left, and whether the factor is the share of the weights that is on
        these keys. An LSE says less of that share: it differs where a forward has summed scores in another
        order, by as much as a small sink changes it; an output is divided by the sum of its own weights.
        """
        here = self._sum / softmax.divisor
        square = here.square().sum(-1, keepdim=True)
        part = ((self._previous * here).sum(-1, keepdim=True) / square).where(square > 0.0, 1.0)
        rest = self._previous - part * here
        largest = rest.abs().amax(-1, keepdim=True)
        # By about so much scores differ that were summed in another order, and weights by this part.
        rounding = 8.0 + abs(scale) * self._q.norm(dim=-1, keepdim=True) * self._longest_key
        limit = torch.finfo(here.dtype).eps * rounding * self._largest_value
        is_precise = (largest <= limit) & (here.abs().amax(-1, keepdim=True) > PRECISE * self._largest_value)
        return part, rest.masked_fill(largest <= ROUNDING * limit, 0.0), is_precise


def _largest(x: Tensor) -> Tensor:
    return x.abs().nan_to_num(0.0, 0.0, 0.0).amax() if x.numel() else x.new_zeros(())
