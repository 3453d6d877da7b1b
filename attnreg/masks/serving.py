"""Calls of `F.scaled_dot_product_attention` whose mask has structure, run as packed calls without a mask.

A call whose mask isn't recognised runs with its mask, and `stats().masks` counts it with the reason.
"""

from __future__ import annotations

import functools
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnreg.core import registry
from attnreg.core.aten import bypassed
from attnreg.core.aten.bypassed import SdpaCall
from attnreg.core.contract.spec import AttentionSpec
from attnreg.core.dispatch import counters, scope, timed
from attnreg.core.dispatch.calls import (
    decided,
    packed_bounds,
    wants_batch_invariant,
    wants_deterministic,
    wants_gradient,
)
from attnreg.core.dispatch.planning import device_of
from attnreg.core.dispatch.state import FEW_SHAPES, state
from attnreg.core.settings.environment import LARGE, RECOGNISE
from attnreg.core.torchlib.layout import needs_graph_memory
from attnreg.core.torchlib.modes import autocast, is_plain
from attnreg.core.varlen.front import varlen_attn
from attnreg.errors import AttnregError
from attnreg.masks.cache import find
from attnreg.masks.rows import chosen, joined
from attnreg.masks.structure import MaskPart, Structure

LEFT = "as given: "

# The most kinds of calls remembered for one mask: enough for a model's layers.
MOST_KINDS = 64

# Pairs of a query and a key, B * S_q * S_k, from which on calls on a GPU are large. A look at their mask
# takes the host a few ms, in which it waits for the device. Two layers save more.
LARGE_PAIRS = 2**24
# The same after `FEW_SHAPES` shapes of masked calls of this size. cuDNN would take 50 ms to set up each
# further shape, so `efficient` would run them, in twice cuDNN's time. A step of a Llama with 8 layers and
# 2,048 tokens of a new total takes 0.26 of torch's time, without this 0.33 (`docs/results/fresh.md`).
LARGE_PAIRS_OF_NEW_SHAPES = 2**21
# Where a mask takes several packed calls, the least number of queries and of keys. At 1,024 such calls took
# up to 1.2 times as long as torch's (H200; `benchmarks/masks.py`).
LARGE_IN_PARTS = 2048
# Tensors whose sizes may be read; a subclass has to see the call first.
_SIZED = Tensor, torch.nn.Parameter

# Shapes (B, S_q, S_k) of masked calls between the two sizes above, until they are more than `FEW_SHAPES`.
_shapes: set[tuple[int, int, int]] = set()


def follow() -> None:
    """Route calls here if the settings in force ask for recognised masks."""
    bypassed.run_recognised = run
    bypassed.follow()
    _shapes.clear()


def run(arguments: tuple[Any, ...], options: dict[str, Any]) -> Tensor | None:
    """Return the result of a call whose mask has structure; None if torch is to run the call.

    The arguments are SDPA's, by place and by name. Of small calls only the sizes are read. For a report alone
    masks are only counted. torch itself raises the errors of a wrong call.
    """
    state()  # which finds out whether a report is asked for
    query = arguments[0] if arguments else options.get("query")
    is_served = serves(query, arguments[1] if len(arguments) > 1 else options.get("key"))
    if not (is_served or timed.is_on):
        return None
    try:
        call = SdpaCall(*arguments, **options)
    except TypeError:  # torch's function raises the error that the caller expects
        return None
    structure = recognised(call, is_served)
    if structure is None:
        return None
    if timed.is_on:
        known = structure if isinstance(structure, Structure) else None
        timed.count_mask(known.seen if known else str(structure), known.shares if known else None)
    if not is_served:
        return None
    if isinstance(structure, str):
        counters.mask_seen(LEFT + structure)
        return None
    this_call = object()
    structure.running.add(this_call)  # another thread may find meanwhile that the mask has changed
    try:
        out = _without_mask(call, structure)
        structure.is_used = True
    finally:
        structure.running.discard(this_call)
    counters.mask_seen(structure.seen)
    return out


def _without_mask(call: SdpaCall, structure: Structure) -> Tensor:
    """Return the result of a call by the structure of its mask."""
    if structure.is_causal is None:
        return _packed(call, structure)
    return F.scaled_dot_product_attention(
        call.query, call.key, call.value, None, call.dropout_p, structure.is_causal,
        scale=call.scale, enable_gqa=call.enable_gqa,
    )  # fmt: skip


def serves(query: Any, key: Any, runs: bool = True) -> bool:
    """Whether the settings have a call's mask recognised; of a wrong call these may be no tensors.

    `runs`: whether the call will run. A call that is only explained isn't counted among the shapes.
    """
    if bypassed.mask_mode != LARGE:
        return bypassed.mask_mode == RECOGNISE
    is_sized = type(query) in _SIZED and type(key) in _SIZED and not (query.is_nested or key.is_nested)
    return is_sized and not torch._C._is_tracing() and is_large(query, key, runs)


def is_large(query: Tensor, key: Tensor, runs: bool) -> bool:
    """Whether a call is on a GPU, and has so many scores that a look at its mask is worth it.

    The tensors are (B, H, S, D), or of any shape, where no mask is looked at. The look waits for the device,
    which is an error or a warning in torch's sync debug mode.
    """
    if not query.is_cuda or query.dim() != 4 or key.dim() != 4:
        return False
    shape = query.shape[0], query.shape[2], key.shape[2]
    pairs = prod(shape)
    is_many = pairs >= LARGE_PAIRS or (pairs >= LARGE_PAIRS_OF_NEW_SHAPES and _has_many_shapes(shape, runs))
    return is_many and not torch.cuda.get_sync_debug_mode()


def _has_many_shapes(shape: tuple[int, int, int], runs: bool) -> bool:
    """Whether masked calls have had more than `FEW_SHAPES`, this one included; counts it if it runs."""
    shapes = _shapes | {shape}
    if runs and len(_shapes) <= FEW_SHAPES:
        _shapes.add(shape)
    return len(shapes) > FEW_SHAPES


def _has_mask(call: SdpaCall) -> bool:
    """Whether a call has a boolean mask, and arguments that torch takes: else torch raises its own error."""
    query, key, value, mask = call[:4]
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        return False
    if not all(isinstance(x, Tensor) for x in (query, key, value)):
        return False  # the placeholders of `torch.fx.symbolic_trace`
    if query.is_nested or key.is_nested or value.is_nested:
        return False  # nested tensors of the strided layout have no shape to compare
    if not (isinstance(call.dropout_p, int | float) and 0.0 <= call.dropout_p <= 1.0):
        return False
    is_number = call.scale is None or isinstance(call.scale, int | float)
    return is_number and isinstance(call.is_causal, bool) and isinstance(call.enable_gqa, bool)


def recognised(call: SdpaCall, is_served: bool = False) -> Structure | str | None:
    """Return the structure of a call's mask, or why the call keeps it; None without a boolean mask.

    `is_served` says that the call may run without the mask.
    """
    query, key, value, mask = call[:4]
    if mask is None or not _has_mask(call):
        return None
    if not is_plain(query, key, value, mask):
        return "dispatch modes, subclasses or function transforms have to see it"
    if call.is_causal or not _fits(call, mask):
        return "packed calls can't take its shapes, devices or arguments"
    if needs_graph_memory(query):
        return "it is in a CUDA graph, or may be"
    if not torch.backends.cuda.flash_sdp_enabled():  # type: ignore[no-untyped-call]
        return "sdpa_kernel forbids the flash kernels"
    try:
        structure = find(mask, (query.shape[0], query.shape[2], key.shape[2]), is_served)
    except torch.OutOfMemoryError:
        return "a look at it takes more memory than there is"
    if isinstance(structure, str) or structure.is_causal is not None:
        return structure
    query, key, value = autocast(query, key, value)
    choice, scale_is_positive = scope.current(), call.scale is None or call.scale > 0.0
    of_call = (
        state().generation, choice, query.dtype, query.shape, key.shape, value.shape, call.dropout_p,
        scale_is_positive, wants_gradient(query, key, value), wants_deterministic(),
    )  # fmt: skip
    reason = structure.refused.get(of_call)
    if reason is None:
        if len(structure.refused) >= MOST_KINDS:
            structure.refused.clear()
        reason = structure.refused[of_call] = _refused(call, structure)
    return reason or structure


def _fits(call: SdpaCall, mask: Tensor) -> bool:
    """Whether packed calls can express a call: shapes, devices and dtypes fit together."""
    query, key, value = call[:3]
    if {query.dim(), key.dim(), value.dim()} != {4} or not 2 <= mask.dim() <= 4 or not query.numel():
        return False
    heads_q, heads_k = query.shape[1], key.shape[1]
    is_grouped = call.enable_gqa and heads_k > 0 and heads_q % heads_k == 0
    full = query.shape[0], heads_q, query.shape[2], key.shape[2]
    sizes = zip(mask.shape, full[4 - mask.dim() :], strict=True)
    return (
        query.shape[0] == key.shape[0]
        and key.shape[:3] == value.shape[:3]
        and query.shape[3] == key.shape[3]
        and (heads_q == heads_k or is_grouped)
        and len({x.device for x in (query, key, value, mask)}) == 1
        and len({x.dtype for x in autocast(query, key, value)}) == 1
        and query.is_floating_point()
        and all(of_mask in (1, of_call) for of_mask, of_call in sizes)
        and key.numel() > 0
    )


def spec_of(call: SdpaCall, part: MaskPart) -> AttentionSpec:
    """Return the spec of one of the packed calls that replace a call."""
    query, key, value = autocast(*call[:3])
    return AttentionSpec(
        device=device_of(query.device), dtype=str(query.dtype), batch=len(part.cu_seq_q) - 1,
        max_q=part.max_q, max_k=part.max_k, heads_q=query.shape[1], heads_k=key.shape[1],
        head_dim=query.shape[3], head_dim_v=value.shape[3], tokens_q=_count(part.rows_q, query),
        tokens_k=_count(part.rows_k, key), varlen=True,
        window=packed_bounds(part.window, False, part.max_q, part.max_k), dropout=call.dropout_p,
        positive_scale=call.scale is None or call.scale > 0.0,
        needs_backward=wants_gradient(query, key, value), deterministic=wants_deterministic(),
        batch_invariant=wants_batch_invariant(),
    )  # fmt: skip


def _count(rows: Tensor | None, x: Tensor) -> int:
    return x.shape[0] * x.shape[2] if rows is None else len(rows)


def _refused(call: SdpaCall, structure: Structure) -> str:
    """Return why packed calls would be slower than torch's kernels; empty if they wouldn't.

    They would be if only a backend that stands in for others could run a part, and nothing asks for it.
    Several short calls may be, too. These run only where the setting says "recognise". So do calls that no
    preferred backend can run packed.
    """
    by_policy = bypassed.mask_mode == LARGE
    is_short = min(call.query.shape[2], call.key.shape[2]) < LARGE_IN_PARTS
    if by_policy and len(structure.parts) > 1 and is_short:
        return f"{len(structure.parts)} packed calls may take longer than torch's kernel"
    known = registry.entries()
    for part in structure.parts:
        try:
            for decision in decided(spec_of(call, part), scope.current()):
                name = decision.backend or ""
                entry = known.get(name.casefold())
                if entry is not None and entry.stands_in and name not in decision.asked_for:
                    return f"no backend but {name} can run its packed {decision.direction}"
                if by_policy and decision.asked_for and name not in decision.asked_for:
                    return f"{' and '.join(decision.asked_for)} can't run its packed {decision.direction}"
        except AttnregError as error:
            # Where the program asks for masks to be recognised, the call itself raises the error.
            return f"its packed call is refused: {error}" if by_policy else ""
    return ""


def _packed(call: SdpaCall, structure: Structure) -> Tensor:
    """Run the packed calls of a mask; return the output in the layout of torch's op, (B, H, S_q, D_v)."""
    query, key, value = call[:3]
    batch, heads, length, _ = query.shape
    parts, (of_queries, of_keys) = structure.parts, structure.choices
    differentiable = wants_gradient(query, key, value)
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]
    pieces = zip(*chosen(flat, (of_queries, of_keys, of_keys), differentiable), strict=True)
    results = [_run(call, part, *mine) for part, mine in zip(parts, pieces, strict=True)]
    outs = [result for part, result in zip(parts, results, strict=True) if part.rows_q is None]
    if rest := [(p.rows_q, result) for p, result in zip(parts, results, strict=True) if p.rows_q is not None]:
        rows, some = zip(*rest, strict=True)
        outs.append(joined(batch * length, rows, some, differentiable))
    out = functools.reduce(torch.add, outs)  # a query's result is 0 in calls that don't have it
    out = out.view(batch, length, heads, -1).transpose(1, 2)
    # Torch's kernels lay out their output as the query: by head or by row.
    out = out if query.stride(1) < query.stride(2) else out.contiguous()
    # Autograd refuses some writes to views that were made while gradients were off; `detach` returns none.
    return out if differentiable else out.detach()


def _run(call: SdpaCall, part: MaskPart, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    result: Any = varlen_attn(
        query, key, value, part.cu_seq_q, part.cu_seq_k, part.max_q, part.max_k, scale=call.scale,
        window_size=part.window, enable_gqa=True, dropout_p=call.dropout_p,
    )  # fmt: skip
    return result  # type: ignore[no-any-return]
