"""Whether a call is one of plain tensors, or torch has to see it as an op."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether these are tensors of a CPU or a GPU that no mode, subclass or function transform is to see."""
    if torch._C._len_torch_dispatch_stack() or is_transformed():
        return False
    if torch._C._is_torch_function_mode_enabled() or torch._C._is_tracing():
        return False
    given = [x for x in tensors if x is not None]
    return all(type(x) in (Tensor, torch.nn.Parameter) and (x.is_cuda or x.is_cpu) for x in given)


def is_transformed() -> bool:
    """Whether a function transform or forward-mode AD is under way."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
