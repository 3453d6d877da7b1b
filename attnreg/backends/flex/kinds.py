"""Kinds of flex programs: everything that a compiled program depends on but lengths.

A tensor's layout has names in the place of lengths: `("S_q", 64)` are sizes, and a stride is a number and
the names that it is multiplied by.
"""

from __future__ import annotations

import functools
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
        score_mod, mask_mod: the texts of the call's functions, as `launching.lifted` has them; "" for none.
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
    score_mod: str = ""
    mask_mod: str = ""

    @property
    def head_dim(self) -> int:
        """The larger of the head dims of query and value."""
        layouts = dict(self.layouts)
        dims = [layouts[name].sizes[-1] for name in ("query", "value")]
        return max(dim for dim in dims if isinstance(dim, int))


def layout_of(x: Tensor, names: tuple[str, ...]) -> TensorLayout:
    """Return the layout of a tensor, of any shape and dtype.

    `names` has for each dimension the name of its length, or an empty string where its size is fixed. Sizes
    of 1 are fixed, because torch compiles for them apart.
    """
    return _layout(x.dtype, x.shape, x.stride(), names)


@functools.lru_cache(maxsize=4096)
def _layout(
    dtype: torch.dtype, shape: torch.Size, steps: tuple[int, ...], names: tuple[str, ...]
) -> TensorLayout:
    sizes = tuple(name if name and size > 1 else size for name, size in zip(names, shape, strict=True))
    strides: list[Stride] = [(1, ())] * len(shape)
    # Of the next stride, if dimensions follow each other without gaps: a number, lengths, their product.
    factors: tuple[str, ...] = ()
    number = value = 1
    for dim in sorted(range(len(shape)), key=lambda dim: (steps[dim], -dim)):
        if steps[dim] != value and shape[dim] > 1:
            number, factors, value = steps[dim], (), steps[dim]
        strides[dim] = number, factors
        size = sizes[dim]
        if value == 0:  # repeats: the next dimension begins anew
            number, factors, value = 1, (), 1
            continue
        value *= shape[dim]
        if isinstance(size, str):
            factors = (*factors, size)
        else:
            number *= size
    return TensorLayout(dtype, sizes, tuple(strides))
