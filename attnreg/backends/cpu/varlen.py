"""Attention over packed sequences, run by run.

The kernel reads packed rows where they lie, and a call of it costs a few microseconds: one call
for each run of equally long neighbours is faster than any sorting and padding of sequences.
Tensors are (T, H, D), LSE is (T, H).
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import torch

from attnreg.backends.cpu import dense
from attnreg.backends.cpu.flash import forward_dtype, lse_dtype, readable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from attnreg.backends.cpu.flash import Flash
    from attnreg.backends.cpu.runs import Run

__all__ = ["backward", "forward"]


def forward(
    flash: Flash, q: Tensor, k: Tensor, v: Tensor, scale: float, runs: Sequence[Run]
) -> tuple[Tensor, Tensor]:
    """Return output and LSE."""
    rows, keys = _Spans(runs, "row"), _Spans(runs, "key")
    out = rows.result(q.shape, q.dtype)
    lse = rows.result(q.shape[:2], lse_dtype(q), -inf)
    to = zip(runs, rows.views(out), rows.views(lse), strict=True)
    dtype = forward_dtype(q)
    tensors = zip(rows.batches(q, dtype), keys.batches(k, dtype), keys.batches(v, dtype), strict=True)
    for (run, run_out, run_lse), (query, key, value) in zip(to, tensors, strict=True):
        found = dense.forward(flash, query, key, value, scale, run.window)
        _write(run_out, found[0])
        _write(run_lse, found[1])
    return out, lse


def backward(
    flash: Flash,
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    runs: Sequence[Run],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value."""
    rows, keys = _Spans(runs, "row"), _Spans(runs, "key")
    grads = rows.result(q.shape, q.dtype), keys.result(k.shape, k.dtype), keys.result(v.shape, v.dtype)
    to = zip(rows.views(grads[0]), keys.views(grads[1]), keys.views(grads[2]), strict=True)
    sides = (rows, grad_out), (rows, q), (keys, k), (keys, v), (rows, out), (rows, lse.unsqueeze(-1))
    tensors = zip(*(side.batches(x, lse.dtype) for side, x in sides), strict=True)
    for run, views, (g, query, key, value, o, row_lse) in zip(runs, to, tensors, strict=True):
        found = dense.backward(flash, g, query, key, value, o, row_lse[..., 0], scale, run.window)
        for view, grad in zip(views, found, strict=True):
            _write(view, grad)
    return grads


class _Spans:
    """Where the rows, or the keys, of all runs lie in a packed tensor."""

    def __init__(self, runs: Sequence[Run], side: str) -> None:
        self._counts = [run.count for run in runs]
        self._cuts: list[int] = []
        end = 0
        for run in runs:
            start, length = (run.row, run.rows) if side == "row" else (run.key, run.keys)
            size = length * run.count
            self._cuts += (start - end, size)
            end = start + size
        self._end = end

    def _split(self, x: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
        return torch.split(x, [*self._cuts, x.size(dim) - self._end], dim)

    def views(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the part of each run."""
        return self._split(x)[1::2]

    def result(self, shape: Sequence[int], dtype: torch.dtype, fill: float = 0.0) -> Tensor:
        """Return a tensor to write the parts of all runs to, filled where there is none."""
        x = torch.empty(shape, dtype=dtype, device="cpu")
        for gap in self._split(x)[::2]:
            gap.fill_(fill)
        return x

    def batches(self, x: Tensor, dtype: torch.dtype) -> list[Tensor]:
        """Return the part of each run as a batch (count, H, S, D) that the kernels can read."""
        parts = self._split(readable(x.unsqueeze(0), dtype), 2)[1::2]
        return [
            part if count == 1 else part[0].unflatten(1, (count, -1)).transpose(0, 1)  # type: ignore[no-untyped-call]
            for part, count in zip(parts, self._counts, strict=True)
        ]


def _write(view: Tensor, batch: Tensor) -> None:
    view.view(batch.shape).copy_(batch)
