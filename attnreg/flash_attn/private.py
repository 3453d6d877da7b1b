"""Names of `flash_attn.flash_attn_interface` that programs import beside its public functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnreg.flash_attn import directions, functions


def _get_block_size_n(*_: Any) -> int:
    """Return the keys of a block, by which flash-attention's own tests rescale weights with dropout.

    flash-attn's kernels write weights relative to the highest score of a block and the blocks after it.
    `dropped_weights` returns weights relative to the highest of all scores, as with a single block.
    """
    return 2**31 - 1


def _maybe_contiguous(x: Tensor | None) -> Tensor | None:
    """Return a tensor whose last stride is 1, a copy if it has to be; None for None."""
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def _round_multiple(x: int, m: int) -> int:
    """Return the lowest multiple of `m` that isn't below `x`."""
    return -(-x // m) * m


def _applied(name: str, function: Callable[..., Any]) -> type:
    """Return a class in the place of one of flash-attn's autograd functions, for programs that call `apply`.

    That takes the function's arguments by place. Behind them flash-attn 2.8 takes whether gradients are on.
    """
    count = len(inspect.signature(function).parameters)

    def apply(*arguments: Any) -> Any:
        if len(arguments) > count + 1:
            raise TypeError(f"{name}.apply: got {len(arguments)} arguments, expected at most {count + 1}")
        with torch.set_grad_enabled(torch.is_grad_enabled() and all(arguments[count:])):
            return function(*arguments[:count])

    return type(name, (), {"__doc__": f"`apply` is `{function.__name__}`.", "apply": staticmethod(apply)})


_DIRECTIONS = {name: function for name, function in vars(directions).items() if name.startswith("flash_attn")}
_APPLIED: dict[str, Callable[..., Any]] = {
    "FlashAttnFunc": functions.flash_attn_func,
    "FlashAttnKVPackedFunc": functions.flash_attn_kvpacked_func,
    "FlashAttnQKVPackedFunc": functions.flash_attn_qkvpacked_func,
    "FlashAttnVarlenFunc": functions.flash_attn_varlen_func,
    "FlashAttnVarlenKVPackedFunc": functions.flash_attn_varlen_kvpacked_func,
    "FlashAttnVarlenQKVPackedFunc": functions.flash_attn_varlen_qkvpacked_func,
}

NAMES: dict[str, Any] = {
    "USE_TRITON_ROCM": False,
    "_get_block_size_n": _get_block_size_n,
    "maybe_contiguous": _maybe_contiguous,
    "round_multiple": _round_multiple,
    **{f"_{name}": function for name, function in _DIRECTIONS.items()},
    **{f"_wrapped_{name}": function for name, function in _DIRECTIONS.items()},
    **{name: _applied(name, function) for name, function in _APPLIED.items()},
}
