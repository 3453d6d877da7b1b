"""Jagged nested tensors on a CPU: sent to the flash op with offsets, as torch itself does on CUDA.

`F.scaled_dot_product_attention` chooses the kernel of nested tensors in Python, and torch's choices on a CPU
have no router. While routers are registered, a function of attnreg's replaces torch's choice. If a backend is
asked for, it chooses the flash op, whose router runs any backend. Calls of plain tensors don't reach it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nested._internal import sdpa
from torch.nn.attention import SDPBackend

from attnreg.core.dispatch import scope, trace
from attnreg.core.dispatch.planning import NOTHING_ASKS, device_of
from attnreg.core.dispatch.state import state
from attnreg.core.selection.decision import Preference
from attnreg.core.torchlib.frames import FRAMES, leave_wrapper_uncompiled

# A private name: if torch renames it, torch's own choice stays.
NAME = "_select_sdp_backend"
KERNELS = "torch's kernels for nested tensors"
SDPA = "F.scaled_dot_product_attention"
is_looked_at = False  # whether `bypassed` looks at each call of SDPA, and counts those that torch runs


def install() -> Callable[[], None]:
    """Replace torch's choice by attnreg's; returns the function that restores torch's."""
    torchs = getattr(sdpa, NAME, None)
    if torchs is None:
        return lambda: None

    # Private: without it calls between the graphs of a compiled program are chosen for as others are.
    is_traced = getattr(FRAMES, "get_eval_frame_callback", lambda: None)

    def choosing(query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> SDPBackend:
        # Not `query.is_cpu`: on a nested tensor it costs a microsecond in `__torch_function__`.
        if query._values.is_cpu and not is_traced():
            is_causal = options.get("is_causal", rest[2] if len(rest) > 2 else False)
            if not (why := why_torchs(query, key, value, is_causal)):
                return SDPBackend.FLASH_ATTENTION
            if why != NOTHING_ASKS and not is_looked_at and not torch.compiler.is_compiling():
                trace.count_bypassed(SDPA, KERNELS, why, (query, key, value))
        return torchs(query, key, value, *rest, **options)  # type: ignore[no-any-return]

    # Between the graphs of a compiled program torch's kernels run. For the flash op torch would store the
    # longest length in tensors that a graph returned. The graph's backward then gets more than it was
    # compiled for (torch 2.13). Dynamo must not compile this function by itself either.
    leave_wrapper_uncompiled(choosing)

    def remove() -> None:
        if getattr(sdpa, NAME) is choosing:  # a replacement by other code stays
            setattr(sdpa, NAME, torchs)

    setattr(sdpa, NAME, choosing)
    return remove


def why_torchs(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, leading: Preference | None = None
) -> str:
    """Return why a call on a CPU runs torch's own kernels; empty if it runs the flash op.

    Query, key and value are jagged nested tensors (B, H, S, D) whose length S is ragged, floating point.
    `leading` is a choice for this call alone, in place of the scoped choice.
    """
    if not _selects_backend(query, leading):
        return NOTHING_ASKS
    return "; ".join(_against_flash(query, key, value, is_causal))


def is_dense_inside(query: Any) -> bool:
    """Whether another dimension than the length is ragged: torch then calls SDPA on the dense `values()`."""
    return query.layout is torch.jagged and query._ragged_idx == 1


def _selects_backend(query: Tensor, leading: Preference | None) -> bool:
    policy, choice = state().policy, scope.current()
    first = leading or (choice.preference if choice is not None else None)
    device = device_of(query.device)
    chosen = first is not None and first.applies_to(device)
    return chosen or (state().active and not policy.only_recording)


def _against_flash(query: Any, key: Any, value: Any, is_causal: bool) -> Iterator[str]:
    """Yield reasons against the flash op: it can't express the call, or torch's code around it fails."""
    named = {"query": query, "key": key, "value": value}
    for name, x in named.items():
        if x.layout is not torch.jagged:
            yield f"the layout of {name} must be torch.jagged, got {x.layout}"
            return
        if x.dim() != 4 or x._ragged_idx != 2:
            yield f"{name} must be (batch, heads, length, head_dim) with ragged lengths"
            return
    if torch.compiler.is_compiling():
        # A graph outlives `uninstall`, and without a router the op has no kernel on a CPU.
        yield "torch.compile traces it"
    if not torch.backends.cuda.flash_sdp_enabled():  # type: ignore[no-untyped-call]
        yield "the flash kernel is disabled (torch.nn.attention.sdpa_kernel)"
    for name, x in named.items():
        if x.lengths() is not None:
            yield f"{name} must have no lengths(): its sequences must lie one after the other"
    if len(heads := {x._size[1] for x in named.values()}) > 1:
        yield f"query, key and value must have the same number of heads, got {sorted(heads)}"
    # Torch pads head dims, and doesn't remove the padding of a nested result.
    dims = {x._size[3] for x in named.values()}
    if len(dims) > 1 or any(dim % 8 for dim in dims):
        yield f"head_dim must be one multiple of 8, got {', '.join(map(str, sorted(dims)))}"
    if not _same_lengths(key, value):
        yield "key and value must have the same lengths"
    if len(query.offsets()) != len(key.offsets()):
        yield "query and key must have the same number of sequences"
    elif is_causal and not _same_lengths(query, key):
        yield "with is_causal query and key must have the same lengths"


def _same_lengths(first: Any, second: Any) -> bool:
    # Usually the offsets are the same tensor: torch requires that even for adding two nested tensors.
    return first.offsets() is second.offsets() or torch.equal(first.offsets(), second.offsets())
