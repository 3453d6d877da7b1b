"""Copy the rows of query, key and value for each packed call, and write results back to their places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnreg.core.torchlib.layout import in_large_elements
from attnreg.core.torchlib.modes import differentiable_once

# Whether each row is in at most one packed call, in several calls, or several times in a call.
APART, OVERLAPPING, REPEATED = "apart", "overlapping", "repeated"


class RowChoice(NamedTuple):
    """The rows of a tensor (B * S, H, D) that packed calls read.

    Attributes:
        rows: int64 indices of rows, (n,) each; calls with equal rows share a tensor.
        of_call: for each call, the place of its indices in `rows`; None if it reads all rows in order.
        overlap: "apart", "overlapping" or "repeated".
    """

    rows: tuple[Tensor, ...]
    of_call: tuple[int | None, ...]
    overlap: str

    @classmethod
    def of(cls, rows: Sequence[Tensor | None], overlap: str) -> RowChoice:
        """Return the choice for calls with these rows, one entry a call; None for all rows.

        Rows are int64 indices, of shape (n,).
        """
        distinct = {id(indices): indices for indices in rows if indices is not None}
        numbers = {name: number for number, name in enumerate(distinct)}
        return cls(tuple(distinct.values()), tuple(numbers.get(id(indices)) for indices in rows), overlap)

    def gradient(self, grads: Sequence[Tensor], shape: torch.Size) -> Tensor:
        """Return the gradient of all rows, of shape `shape`, from the gradients of the chosen rows."""
        if self.overlap == REPEATED:
            of_all = grads[0].new_zeros(shape)
            for rows, grad in zip(self.rows, grads, strict=True):
                of_all.index_add_(0, rows, grad)
            return of_all
        first = len(grads) if self.overlap == APART else 1
        of_all = _joined(shape[0], self.rows[:first], grads[:first])
        for rows, grad in zip(self.rows[first:], grads[first:], strict=True):
            # By copies, because on a GPU `index_add_` in half precision uses atomic operations.
            _put(of_all, rows, grad + of_all.index_select(0, rows))
        return of_all


def chosen(
    tensors: Sequence[Tensor], choices: Sequence[RowChoice], differentiable: bool
) -> list[list[Tensor]]:
    """Return, for each tensor (B * S, H, D), the rows that each packed call reads, (rows, H, D)."""
    if not any(choice.rows for choice in choices):
        return [[x] * len(choice.of_call) for x, choice in zip(tensors, choices, strict=True)]
    # A single autograd node for all: its part in Python takes longer than the copies of a small call.
    take: Any = _Chosen.apply if differentiable else _taken
    pieces, rows_of_tensors = iter(take(choices, *tensors)), []
    for x, choice in zip(tensors, choices, strict=True):
        mine = [next(pieces) for _ in choice.rows]
        rows_of_tensors.append([x if number is None else mine[number] for number in choice.of_call])
    return rows_of_tensors


def joined(count: int, rows: Sequence[Tensor], results: Sequence[Tensor], differentiable: bool) -> Tensor:
    """Return results (rows, H, D) of several calls as (count, H, D); rows of no call are 0."""
    if not differentiable:
        return _joined(count, rows, results)
    all_rows: Any = _Joined.apply(count, rows, *results)  # type: ignore[no-untyped-call]
    return all_rows  # type: ignore[no-any-return]


def _taken(choices: Sequence[RowChoice], *tensors: Tensor) -> tuple[Tensor, ...]:
    pairs = zip(tensors, choices, strict=True)
    return tuple(x.index_select(0, rows) for x, choice in pairs for rows in choice.rows)


# Autograd's own backward of `index_select` adds row by row, which on a CPU takes longer than attention
# itself. A single gradient for all packed calls saves one pass over it for each call.
class _Chosen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, choices: Sequence[RowChoice], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.choices, ctx.shapes = choices, [x.shape for x in tensors]
        return _taken(choices, *tensors)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gradients: list[Tensor | None] = []
        wanted = ctx.needs_input_grad[1:]
        for choice, shape, is_wanted in zip(ctx.choices, ctx.shapes, wanted, strict=True):
            mine, grads = grads[: len(choice.rows)], grads[len(choice.rows) :]
            gradients.append(choice.gradient(mine, shape) if mine and is_wanted else None)
        return None, *gradients


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, count: int, rows: Sequence[Tensor], *results: Tensor) -> Tensor:
        ctx.rows = rows
        return _joined(count, rows, results)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(grad.index_select(0, rows) for rows in ctx.rows)


def _joined(count: int, rows: Sequence[Tensor], parts: Sequence[Tensor]) -> Tensor:
    like, fills_all_rows = parts[0], sum(map(len, rows)) == count
    all_rows = (like.new_empty if fills_all_rows else like.new_zeros)((count, *like.shape[1:]))
    for indices, part in zip(rows, parts, strict=True):
        _put(all_rows, indices, part)
    return all_rows


def _put(to: Tensor, rows: Tensor, values: Tensor) -> None:
    """Write some rows of (rows, H, D)."""
    to, values = in_large_elements(to, values)
    to.index_copy_(0, rows, values)
