"""Kernels that do nothing, for a front's own cost to be all there is."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["aten_nothing", "nothing_backward", "nothing_forward"]


def nothing_forward(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Return tensors of the right shapes and no values."""
    return torch.empty_like(query), query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32)


def nothing_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    """Return gradients of the right shapes and no values."""
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


@contextlib.contextmanager
def aten_nothing() -> Iterator[None]:
    """Have such kernels straight under aten's flash ops on a CPU, for torch's own varlen_attn."""

    def forward(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
        random_state = query.new_empty(2, dtype=torch.uint64), query.new_empty((), dtype=torch.uint64)
        return (*nothing_forward(query, key, value), *random_state, query.new_empty(0))

    def backward(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
        return nothing_backward(grad_out, query, key, value)

    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        library.impl("_flash_attention_forward", forward, "CPU")  # type: ignore[no-untyped-call]
        library.impl("_flash_attention_backward", backward, "CPU")  # type: ignore[no-untyped-call]
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]
