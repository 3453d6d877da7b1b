"""Kinds of flex programs: everything that a compiled program depends on but lengths.

A tensor's layout has names in the place of lengths: `("S_q", 64)` are sizes, and a stride is a number and
the names that it is multiplied by.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from attnreg.core.contract.spec import Direction

Size = int | str
# A number, and the lengths that it is multiplied by.
Stride = tuple[int, tuple[str, ...]]


class TensorLayout(NamedTuple):
    """A tensor without its lengths."""

    dtype: torch.dtype
    sizes: tuple[Size, ...]
    strides: tuple[Stride, ...]


class ProgramKind(NamedTuple):
    """All that a program depends on but lengths.

    Attributes:
        direction: "forward" or "backward".
        device: where it runs.
        scale, softcap: of the call.
        bias: "none", "added" (to the scores) or "mask".
        slopes: the number of dimensions of ALiBi's slopes; 0 for none.
        packed: whether slopes (B, H) go by the sequence of a query, not by its batch.
        block: the queries and keys of a block of the table.
        layouts: of each tensor, by its name. Names that are missing belong to tensors that a call hasn't.
    """

    direction: Direction
    device: torch.device
    scale: float
    softcap: float
    bias: str
    slopes: int
    packed: bool
    block: int
    layouts: tuple[tuple[str, TensorLayout], ...]


def layout_of(x: Tensor, names: tuple[str, ...], lengths: Mapping[str, int]) -> TensorLayout:
    """Return the layout of a tensor.

    Args:
        x: any shape and dtype.
        names: for each dimension the name of its length, or an empty string where its size is fixed.
        lengths: the lengths by name; lengths of 1 are fixed, as torch compiles for them apart.
    """
    sizes = tuple(
        name if name and lengths[name] > 1 else size for name, size in zip(names, x.shape, strict=True)
    )
    strides: list[Stride] = [(1, ())] * x.dim()
    number = 1  # of the next stride, if dimensions follow each other without gaps
    factors: tuple[str, ...] = ()
    for dim in sorted(range(x.dim()), key=lambda dim: (x.stride(dim), -dim)):
        size, stride = sizes[dim], x.stride(dim)
        value = number
        for name in factors:
            value *= lengths[name]
        if stride != value and x.shape[dim] > 1:
            number, factors = stride, ()
        strides[dim] = number, factors
        if stride == 0 and x.shape[dim] > 1:
            number, factors = 1, ()
        elif isinstance(size, str):
            factors = (*factors, size)
        else:
            number *= size
    return TensorLayout(x.dtype, sizes, tuple(strides))
