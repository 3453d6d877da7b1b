"""A softcap on Hopper, as functions of scores that the package compiles into its kernels (`score_mod`).

The package's own softcap divides each score, with IEEE rounding, which takes many instructions. Here the
scale is divided by the softcap, so that scores arrive divided. A backward in float16 multiplies scores by the
inverse instead. Like the package's, these functions use the hardware's tanh. So does FA2's softcap, which is
why flash-attention's own tests allow three times the error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from attnreg.backends.fa4.compiled_kinds import SOFTCAP_TILE, Family, has_softcap_tile
from attnreg.core.contract.backend import Call


def options(family: Family, call: Call, *, own: bool) -> dict[str, Any]:
    """Return the keywords of one of the package's functions for a call's softcap, which may be 0.

    `own` says whether the functions of this module may be used. They are used on Hopper only. A Blackwell
    kernel refuses a softcap, and might not recognise it as a function.
    """
    # No softcap is None in the forward and 0.0 in the backward.
    off: dict[str, Any] = {"softcap": None if family.direction == "forward" else 0.0}
    if not call.softcap:
        return off
    if not (own and family.major == 9):
        return {"softcap": call.softcap}
    # The gradient of a divided score is larger by the factor of the softcap. The package rounds it to the
    # query's dtype before it multiplies by the scale: float16 would overflow.
    divided = family.direction == "forward" or family.dtype != torch.float16
    capped, gradient = _on_scores(call.softcap, divided)
    keywords = off | {"score_mod": capped}
    if divided:
        keywords["softmax_scale"] = call.scale / call.softcap
    if family.direction == "backward":
        return keywords | {"score_mod_bwd": gradient}
    if has_softcap_tile(family, call.max_q):
        keywords["tile_mn"] = SOFTCAP_TILE
    return keywords


@functools.lru_cache(maxsize=64)  # the package tells functions apart by their source and these numbers
def _on_scores(softcap: float, divided: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return two functions: the capped score of a scaled score, and the gradient of the scaled score.

    The second is a function of the capped score's gradient and the scaled score. `divided` says whether the
    scale is divided by the softcap.
    """
    inverse, slope = (1.0, softcap) if divided else (1.0 / softcap, 1.0)
    cute = import_module("cutlass.cute")

    # The package reads the source of both, and passes the position of a score by keyword.
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
        return grad * (slope - slope * tanh * tanh)

    return capped, gradient
