"""Checks that the tensors of a call are in memory.

The storage of a tensor may be freed or shrunk after the tensor was made. Kernels would read address 0 then,
or memory of other tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnreg.core.contract.backend import Call
from attnreg.core.contract.options import options_on
from attnreg.errors import UnsupportedInputError

# Others may have no memory of their own.
_TYPES = (Tensor, torch.nn.Parameter)
_OF_FORWARD, _OF_BACKWARD = ("query", "key", "value"), ("grad_out", "query", "key", "value", "out", "lse")


def check_in_memory(**tensors: object) -> None:
    """Check that each tensor lies in its storage; FSDP frees storages of parameters that aren't gathered.

    What has no memory by itself is right: fakes, zeros of autograd, tensors of function transforms.
    Raises `UnsupportedInputError`.
    """
    if torch.compiler.is_compiling():
        return
    for name, tensor in tensors.items():
        if type(tensor) in _TYPES and (got := _out_of_bounds(tensor)):
            raise UnsupportedInputError(f"{name}: got {got}, expected one in memory")


def address_of(tensor: Tensor) -> int:
    """Return the address of a tensor, of any shape and dtype, for C++, which doesn't know its storage's size.

    Raises `UnsupportedInputError` if elements lie outside of the storage.
    """
    check_in_memory(tensor=tensor)
    return tensor.data_ptr()


def inputs_of(tensors: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value among the tensors of a kernel, in their shapes and dtypes.

    A forward's begin with them. A backward's are (grad_out, query, key, value, output, LSE).
    """
    query, key, value = tensors[:3] if len(tensors) < len(_OF_BACKWARD) else tensors[1:4]
    return query, key, value


def check_all_in_memory(tensors: tuple[Tensor, ...], call: Call) -> None:
    """Check all tensors of a forward or backward call with `check_in_memory`, options included.

    Args:
        tensors: query, key and value; for a backward (grad_out, query, key, value, output, LSE). Any shape
            will do.
        call: the other arguments.

    Raises:
        UnsupportedInputError: the storage of a tensor was freed.
    """
    names = _OF_FORWARD if len(tensors) == len(_OF_FORWARD) else _OF_BACKWARD
    check_in_memory(
        **dict(zip(names, tensors, strict=True)), cu_seq_q=call.cu_seqlens_q, cu_seq_k=call.cu_seqlens_k,
        **{row.name: getattr(call, row.name) for row in options_on(call)},
    )  # fmt: skip


# In C++ `is_in_memory` does the same.
def _out_of_bounds(tensor: Any) -> str:
    """Return how a tensor reaches beyond its storage, or an empty string."""
    try:
        size = tensor.untyped_storage().size()
    except RuntimeError:  # it has none
        return ""
    if tensor.is_contiguous():
        end = tensor.numel()
    else:
        end = 1 + sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + end) * tensor.element_size()
    if needed <= size or not tensor.numel() or tensor._is_zerotensor():
        return ""
    if not size:
        return "a tensor whose storage was freed (its size is 0)"
    return f"a tensor that ends at byte {needed} of a storage that was shrunk to {size} bytes"
