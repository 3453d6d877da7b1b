"""Sinks counted after a kernel: its results as if each row saw one more key, without a value.

Let L be log(sum_j exp(s_j) + exp(sink)), and out the output with the sink's weight counted. A backward that
gets out and L, in place of the results of the kernel's forward, returns the right gradients of query, key and
value. Its weights are then exp(s_j - L), and it subtracts rowsum(grad_out * out) as in any call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

# How many rows are computed at a time. On a CPU torch makes copies of 16-bit numbers that it computes with in
# a wider dtype: of few rows, which stay in the cache, that took a fifth of the time. On a GPU a product in
# float32 of all rows of a long batch would be larger than any of its tensors.
_ROWS, _ROWS_OF_GPU = 128, 8192


def rescaled(out: Tensor, lse: Tensor, sinks: Tensor, batch_invariant: bool = False) -> tuple[Tensor, Tensor]:
    """Return a forward's results with sinks, (H,), counted; writes to `out`, which is the kernel's own.

    A 16-bit output is rounded here a second time: the contract's kernels return it in the query's dtype.
    Rows that see no key stay as they are. `batch_invariant` says whether the bits of a sequence's results may
    not depend on its batch.
    """
    # Of -inf, the sink of a head without one, a row that sees no key would make NaN.
    sinks = sinks.to(lse.dtype).clamp(min=torch.finfo(lse.dtype).min)[:, None]
    above = lse - sinks
    if lse.is_cpu and batch_invariant:
        # Torch computes contiguous numbers as vectors, and the last few singly. The two round differently, so
        # that bits would depend on a row's place in the batch. Numbers with gaps are all computed singly.
        above, lse = (torch.stack((x, x), dim=-1)[..., 0] for x in (above, lse))
    total = torch.logaddexp(lse, sinks).masked_fill_(lse == -torch.inf, -torch.inf)
    for part, share in _parts(out, above.sigmoid_().mT[..., None]):
        part.mul_(share)
    return out, total.contiguous()


def grad_of_sinks(
    grad_out: Tensor | None, results: Sequence[Tensor], sinks: Tensor, grad_lse: Tensor | None
) -> Tensor:
    """Return the gradient of sinks, (H,), in their dtype.

    The gradient of a score is its weight times (gradient of the weight - rowsum(grad_out * out) + grad_lse).
    The weight of a sink has no gradient, because it has no value.

    Args:
        grad_out: (T, H, D_v), in the dtype of the output; None for none.
        results: what `rescaled` has returned: the output (T, H, D_v) and the LSE (H, T), float32 or float64.
        sinks: (H,), floating point.
        grad_lse: (H, T), floating point; None for none.
    """
    out, lse = results
    of_rows = 0.0 if grad_lse is None else grad_lse.to(lse.dtype)
    if grad_out is not None:
        # A sum with a wide zero is computed in its dtype, without a wide copy of the factors on a GPU.
        zero = lse.new_zeros(1)
        deltas = [torch.addcmul(zero, grad, part).sum(-1) for grad, part in _parts(grad_out, out)]
        of_rows = of_rows - (deltas[0] if len(deltas) == 1 else torch.cat(deltas)).mT
    weights = (sinks.to(lse.dtype)[:, None] - lse).exp()
    # The weight of a row without a key is infinite here. A NaN stays one.
    return torch.where(lse == -torch.inf, 0.0, weights * of_rows).sum(-1).to(sinks.dtype)


def _parts(rows: Tensor, others: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """Return some rows of both at a time; all of them where a graph is traced, as their number may change."""
    if not type(rows) is type(others) is Tensor:
        return ((rows, others),)
    count = _ROWS if rows.is_cpu else _ROWS_OF_GPU
    return zip(torch.split(rows, count), torch.split(others, count), strict=True)
