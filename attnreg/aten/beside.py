"""What an op returns beside its results where nothing is random: tensors that nobody reads."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["cudnn_extras", "flash_extras", "shared"]

_made: dict[tuple[Any, ...], tuple[Tensor, ...]] = {}


def flash_extras(query: Tensor) -> tuple[Tensor, ...]:
    """Return the random state, the unused scalar and the debug mask of a flash op."""
    state = query.new_empty(2, dtype=torch.uint64)
    return state, query.new_empty((), dtype=torch.uint64), query.new_empty(0)


def cudnn_extras(query: Tensor) -> tuple[Tensor, ...]:
    """Return the seed and the offset of a cuDNN op."""
    return query.new_empty((), dtype=torch.int64), query.new_empty((), dtype=torch.int64)


def shared(make: Callable[[Tensor], tuple[Tensor, ...]], query: Tensor) -> tuple[Tensor, ...]:
    """Return what `make` makes, the same tensors at each call where that does no harm.

    Allocating them takes the host as long as torch takes to enter the router. But what Inductor compiles
    takes an op's outputs for its own and may write to them, and those of a CUDA graph lie in its memory.
    """
    if "torch._inductor" in sys.modules:
        return make(query)
    found = _made.get((make, query.device, query.dtype))
    if found is not None:
        return found
    with torch.inference_mode(False):  # or autograd couldn't save them later
        extras = make(query)
    if not (query.is_cuda and torch.cuda.is_current_stream_capturing()):
        _made[make, query.device, query.dtype] = extras
    return extras
