"""Checks that the tensors of a call are in memory: of a freed tensor kernels would read address 0."""

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


def check_in_memory(**given: object) -> None:
    """Check that no tensor's storage was freed; so FSDP leaves parameters that it hasn't gathered.

    What has no memory by itself is right: fakes, zeros of autograd, tensors of function transforms.
    Raises `UnsupportedInputError`.
    """
    if torch.compiler.is_compiling():
        return
    for name, tensor in given.items():
        if type(tensor) in _TYPES and _is_freed(tensor):
            got = "a tensor whose storage was freed (its size is 0)"
            raise UnsupportedInputError(f"{name}: got {got}, expected one in memory")


def check_all_in_memory(tensors: tuple[Tensor, ...], call: Call, sinks: Tensor | None) -> None:
    """Check all tensors of a forward or backward call with `check_in_memory`, sinks and options included.

    Args:
        tensors: query, key and value; for a backward (grad_out, query, key, value, output, LSE). Any shape
            will do.
        call: the other arguments.
        sinks: (H,), or None.

    Raises:
        UnsupportedInputError: the storage of a tensor was freed.
    """
    names = _OF_FORWARD if len(tensors) == len(_OF_FORWARD) else _OF_BACKWARD
    check_in_memory(
        **dict(zip(names, tensors, strict=True)), cu_seq_q=call.cu_seqlens_q, cu_seq_k=call.cu_seqlens_k,
        **{row.name: getattr(call, row.name) for row in options_on(call)} | {"sinks": sinks},
    )  # fmt: skip


# In C++ `is_freed` does the same.
def _is_freed(tensor: Any) -> bool:
    try:
        if tensor.untyped_storage().size():
            return False
    except RuntimeError:  # it has none
        return False
    return bool(tensor.numel()) and not tensor._is_zerotensor()
