"""Attention over packed sequences, run by run.

A call of the kernel costs a few microseconds, and it reads packed rows where they lie: one call
for each run of equally long neighbours is faster than any padding or sorting of sequences.
Tensors are (T, H, D), LSE is (T, H).
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import torch

from attnreg.backends import _cpu_dense as dense
from attnreg.backends._cpu_flash import readable, working_dtype

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from attnreg.backends._cpu_flash import Flash
    from attnreg.backends._cpu_runs import Run

__all__ = ["backward", "forward"]


def forward(
    flash: Flash, q: Tensor, k: Tensor, v: Tensor, scale: float, runs: Iterable[Run]
) -> tuple[Tensor, Tensor]:
    """Return output and LSE."""
    out = _Packed(q, q.dtype)
    lse = _Packed(q[..., 0], working_dtype(q), -inf)
    for run in runs:
        rows, keys, values = _rows(q, run), _keys(k, run), _keys(v, run)
        run_out, run_lse = dense.forward(flash, rows, keys, values, scale, run.window)
        out.place(run.row, run_out)
        lse.place(run.row, run_lse)
    return out.whole(), lse.whole()


def backward(
    flash: Flash,
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    runs: Iterable[Run],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value."""
    grad_q, grad_k, grad_v = (_Packed(x, x.dtype) for x in (q, k, v))
    for run in runs:
        of_rows = [_rows(x, run) for x in (grad_out, q, out)]
        of_keys = [_keys(x, run) for x in (k, v)]
        run_lse = _span(lse, run.row, run.rows, run.count).transpose(1, 2)
        grads = dense.backward(flash, *of_rows[:2], *of_keys, of_rows[2], run_lse, scale, run.window)
        grad_q.place(run.row, grads[0])
        grad_k.place(run.key, grads[1])
        grad_v.place(run.key, grads[2])
    return grad_q.whole(), grad_k.whole(), grad_v.whole()


class _Packed:
    """A packed result, written run by run in the order of its rows while they are in the cache."""

    def __init__(self, like: Tensor, dtype: torch.dtype, fill: float = 0.0) -> None:
        self._rows = torch.empty(like.shape, dtype=dtype, device=like.device)
        self._fill = fill
        self._end = 0

    def place(self, start: int, batch: Tensor) -> None:
        """Write (count, rows, ...) at row `start`, which lies behind all that was written before."""
        self._rows[self._end : start].fill_(self._fill)
        self._end = start + batch.size(0) * batch.size(1)
        self._rows[start : self._end].view(batch.shape).copy_(batch)

    def whole(self) -> Tensor:
        """Return all rows; those that nothing was written to hold the fill value."""
        self._rows[self._end :].fill_(self._fill)
        return self._rows


def _rows(x: Tensor, run: Run) -> Tensor:
    return readable(_span(x, run.row, run.rows, run.count))


def _keys(x: Tensor, run: Run) -> Tensor:
    return readable(_span(x, run.key, run.keys, run.count))


def _span(x: Tensor, start: int, size: int, count: int) -> Tensor:
    """Return the rows of a run, each of its sequences as one of the batch."""
    return x[start : start + size * count].unflatten(0, (count, size))
