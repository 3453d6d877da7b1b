"""A softcap on Hopper, as functions of scores that the package compiles into its kernels (`score_mod`).

The package's own divides each score by the softcap, rounded as IEEE says, which takes many instructions.
These multiply by its inverse. Like the package's they take the tanh of the hardware, which is what FA2's
softcap does, too, and why flash-attention's own tests allow three times the error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor


def options(direction: str, softcap: float, multiplies: bool) -> dict[str, Any]:
    """Return the keywords of one of the package's functions for a softcap; 0.0 for none."""
    # To turn it off, one function takes None and the other 0.0.
    off: dict[str, Any] = {"softcap": None if direction == "forward" else 0.0}
    if not softcap:
        return off
    if not multiplies:
        return {"softcap": softcap}
    capped, gradient = _on_scores(softcap)
    return off | {"score_mod": capped} | ({"score_mod_bwd": gradient} if direction == "backward" else {})


def fits(query: Tensor) -> bool:
    """Whether the kernels of the tensor's device are Hopper's.

    Of the others, one for Blackwell refuses a softcap, and might not see it as a function.
    """
    return query.is_cuda and torch.cuda.get_device_capability(query.device)[0] == 9


@functools.lru_cache(maxsize=64)  # the package tells functions apart by their source and these numbers
def _on_scores(softcap: float) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the capped score of scaled ones, and the gradient of these by that of capped ones."""
    cute = import_module("cutlass.cute")
    inverse = 1.0 / softcap

    # The package reads the source of both, and gives them more by keyword: where a score is.
    @cute.jit  # type: ignore[untyped-decorator]
    def capped(
        scores: Any, batch: Any, head: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any
    ) -> Any:
        return softcap * cute.math.tanh(scores * inverse, fastmath=True)

    @cute.jit  # type: ignore[untyped-decorator]
    def gradient(
        grad: Any,
        scores: Any,
        batch: Any,
        head: Any,
        q_idx: Any,
        kv_idx: Any,
        seqlen_info: Any,
        aux_tensors: Any,
    ) -> Any:
        tanh = cute.math.tanh(scores * inverse, fastmath=True)
        return grad * (1.0 - tanh * tanh)

    return capped, gradient
