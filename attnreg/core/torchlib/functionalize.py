"""The rule of `torch.func.functionalize` for autograd.Functions of attnreg's; torch has none for any."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

_functions: set[type[torch.autograd.Function]] = set()
_torchs: Any = None


def allow(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """Let functionalize, and transforms below or above it, call an autograd.Function; returns it.

    The function writes to none of its tensors, and returns no view of one.
    """
    global _torchs
    _functions.add(function)
    with contextlib.suppress(Exception):  # private; without it functionalize raises torch's error
        from torch._functorch.autograd_function import custom_function_call

        table, key = custom_function_call.functorch_table, torch._C._functorch.TransformType.Functionalize
        if _torchs is None:
            _torchs, table[key] = table[key], _rule
    return function


def _rule(interpreter: Any, function: Any, *operands: Any, **options: Any) -> Any:
    """Call `function` on the tensors that functionalize has wrapped, for the transforms below it."""
    from torch._functorch.autograd_function import custom_function_call

    if function not in _functions:
        return _torchs(interpreter, function, *operands, **options)
    functorch = torch._C._functorch
    adds_views, level = interpreter.functionalize_add_back_views(), interpreter.level()

    def unwrapped(x: Any) -> Any:
        if not torch._is_functional_tensor(x):
            return x
        torch._functionalize_sync(x)
        return functorch._unwrap_functional_tensor(x, adds_views)

    operands = tree_map_only(torch.Tensor, unwrapped, operands)
    with interpreter.lower():
        results = custom_function_call(function, *operands)
    return tree_map_only(torch.Tensor, lambda x: functorch._wrap_functional_tensor(x, level), results)
