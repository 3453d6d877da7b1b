"""How a tensor lies in memory, as kernels that load sixteen bytes at a time see it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["aligned", "readable"]


def aligned(x: Tensor, repeats: bool = True) -> bool:
    """Whether sixteen-byte loads along the head dim can read it.

    The strides of dimensions of one element count, too: descriptors are made of them. `repeats` says
    whether a stride may be 0, as those of an expanded tensor are.
    """
    return x.data_ptr() % 16 == 0 and _in_steps(x.stride(), 16 // x.element_size(), repeats)


@functools.lru_cache(maxsize=4096)
def _in_steps(strides: tuple[int, ...], width: int, repeats: bool) -> bool:
    *steps, last = strides
    return last == 1 and all(step % width == 0 and (repeats or step) for step in steps)


def readable(x: Tensor, repeats: bool = True) -> Tensor:
    """Return a tensor that sixteen-byte loads along the head dim can read; a copy only where needed."""
    return x if aligned(x, repeats) else x.clone(memory_format=torch.contiguous_format)
