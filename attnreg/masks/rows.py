"""The rows of query, key and value that each packed call takes, and results put back in their places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnreg.core.torchlib.layout import in_large_elements
from attnreg.core.torchlib.modes import differentiable_once

# Whether a row is in one packed call, in several, or in one of them several times.
APART, OVERLAPPING, REPEATED = "apart", "overlapping", "repeated"


class Choice(NamedTuple):
    """Which rows packed calls take of a tensor (B * S, H, D).

    Attributes:
        rows: indices of rows; two calls that take the same share them.
        of_call: for each call the number of its indices; None if it takes all rows, as they lie.
        overlap: "apart", "overlapping" or "repeated".
    """

    rows: tuple[Tensor, ...]
    of_call: tuple[int | None, ...]
    overlap: str

    @classmethod
    def of(cls, rows: Sequence[Tensor | None], overlap: str) -> Choice:
        """Return the choice of calls of which each takes these rows, or all."""
        distinct = {id(one): one for one in rows if one is not None}
        numbers = {name: number for number, name in enumerate(distinct)}
        return cls(tuple(distinct.values()), tuple(numbers.get(id(one)) for one in rows), overlap)

    def gradient(self, grads: Sequence[Tensor], shape: torch.Size) -> Tensor:
        """Return the gradient of all rows from those of the chosen ones."""
        if self.overlap == REPEATED:
            of_all = grads[0].new_zeros(shape)
            for rows, grad in zip(self.rows, grads, strict=True):
                of_all.index_add_(0, rows, grad)
            return of_all
        first = len(grads) if self.overlap == APART else 1
        of_all = _joined(shape[0], self.rows[:first], grads[:first])
        for rows, grad in zip(self.rows[first:], grads[first:], strict=True):
            # By copies: on a GPU `index_add_` of half precision works by atomic operations.
            _put(of_all, rows, grad + of_all.index_select(0, rows))
        return of_all


def chosen(tensors: Sequence[Tensor], choices: Sequence[Choice], differentiable: bool) -> list[list[Tensor]]:
    """Return for each of some tensors (B * S, H, D) the rows that each packed call takes."""
    if not any(choice.rows for choice in choices):
        return [[x] * len(choice.of_call) for x, choice in zip(tensors, choices, strict=True)]
    # Python's part of an autograd node takes longer than the copies of a small call: there is one for all.
    take: Any = _Chosen.apply if differentiable else _taken
    pieces, found = iter(take(choices, *tensors)), []
    for x, choice in zip(tensors, choices, strict=True):
        mine = [next(pieces) for _ in choice.rows]
        found.append([x if number is None else mine[number] for number in choice.of_call])
    return found


def joined(count: int, rows: Sequence[Tensor], results: Sequence[Tensor], differentiable: bool) -> Tensor:
    """Return the results of some rows each as those of `count` rows; 0 in the others."""
    if not differentiable:
        return _joined(count, rows, results)
    all_rows: Any = _Joined.apply(count, rows, *results)  # type: ignore[no-untyped-call]
    return all_rows  # type: ignore[no-any-return]


def _taken(choices: Sequence[Choice], *tensors: Tensor) -> tuple[Tensor, ...]:
    pairs = zip(tensors, choices, strict=True)
    return tuple(x.index_select(0, rows) for x, choice in pairs for rows in choice.rows)


# Autograd's own backward of `index_select` adds row by row, which takes a CPU longer than attention itself;
# and one gradient for all packed calls saves a pass over it for each.
class _Chosen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, choices: Sequence[Choice], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.choices, ctx.shapes = choices, [x.shape for x in tensors]
        return _taken(choices, *tensors)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found: list[Tensor | None] = []
        wanted = ctx.needs_input_grad[1:]
        for choice, shape, is_wanted in zip(ctx.choices, ctx.shapes, wanted, strict=True):
            mine, grads = grads[: len(choice.rows)], grads[len(choice.rows) :]
            found.append(choice.gradient(mine, shape) if mine and is_wanted else None)
        return None, *found


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
    for one, part in zip(rows, parts, strict=True):
        _put(all_rows, one, part)
    return all_rows


def _put(to: Tensor, rows: Tensor, values: Tensor) -> None:
    """Write some rows of (rows, H, D)."""
    to, values = in_large_elements(to, values)
    to.index_copy_(0, rows, values)
