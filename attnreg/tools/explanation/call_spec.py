"""The spec of a call, read from its arguments without running it: for `explain`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnreg.core.aten import efficient, flash
from attnreg.core.aten.bypassed import (
    MATH,
    NOTHING_TO_DO,
    SDPA,
    Bypassed,
    SdpaCall,
    is_causal_bias,
    reasons_of_sizes,
    selected,
    selected_nested,
)
from attnreg.core.aten.nested import is_dense_inside
from attnreg.core.aten.routing import call_of as dense_call_of
from attnreg.core.aten.schemas import SdpaCpuForward
from attnreg.core.contract.lengths import bounds
from attnreg.core.contract.options import options_of, options_on
from attnreg.core.contract.spec import UNBOUNDED, AttentionSpec, Direction
from attnreg.core.dispatch.calls import to_bshd, wants_gradient
from attnreg.core.dispatch.planning import Native, device_of, spec_of
from attnreg.core.launching.elementwise import check_functions
from attnreg.core.launching.validation import check, check_scale, check_values
from attnreg.core.policy import current as policy
from attnreg.core.policy.sources import masks
from attnreg.core.registry.entry import Entry
from attnreg.core.selection.decision import Decision, Preference
from attnreg.core.settings.environment import LARGE, RECOGNISE
from attnreg.core.torchlib import versions
from attnreg.core.torchlib.modes import autocast
from attnreg.core.varlen.front import Mask
from attnreg.core.varlen.plans import Lengths, call_of, check_heads, window
from attnreg.errors import InvalidInputError
from attnreg.masks.serving import LEFT, recognised, serves
from attnreg.masks.serving import spec_of as spec_of_part
from attnreg.masks.structure import Structure

SDPA_KERNEL_IGNORED = (
    "sdpa_kernel has no effect on attnreg.varlen_attn (torch's own obeys it from torch 2.15 on): choose by "
    "backend= or use_backend"
)


class CallSpec(NamedTuple):
    """A call as selection sees it."""

    spec: AttentionSpec
    native: Native | None = None  # the backend whose kernel torch itself was about to run
    elsewhere: Bypassed | None = None  # what torch's own selector takes, if attnreg never sees the call
    notes: tuple[str, ...] = ()
    of_mask: bool = False  # whether the backward computes the gradient of the mask, too
    front: str = SDPA  # the function that makes such a call, "" if none does
    returns_lse: bool = False  # whether the program gets the LSE, so that no forward is given sinks
    inputs: str = ""  # the shapes as the call has them, as text; empty if there are no tensors


NO_MASK_TO_READ = (
    "a boolean mask with structure is recognised (with masks = 'large' only if the call is large), and the "
    "call then runs without it: attnreg.explain, given the call's own tensors, says on which backend"
)
SHARED_HEADS = (
    "with a mask and enable_gqa the selector of torch before 2.14 takes its math kernel on a GPU, so that "
    "attnreg may never see the call: repeat key and value over the query's heads (repeat_interleave), and "
    "the efficient kernel can run it"
)
BOTTOM_RIGHT = (
    "the causal mask is aligned bottom-right here: the last query sees all keys. is_causal of "
    "F.scaled_dot_product_attention is aligned top-left, which is another mask unless there are as many keys "
    "as queries: attnreg.explain, given the call's own tensors, explains that"
)
TOP_LEFT = (
    "is_causal=True of F.scaled_dot_product_attention is aligned top-left: with more queries than keys it is "
    "window_size={} for backends, whose windows are aligned bottom-right"
)
ODD_DIMS = (
    "of head dims that aren't multiples of 8 (in float32 of 4) torch's own selector takes its math kernel on "
    "a GPU, unless the call is in 16 bits, with equal head dims up to 256 and no mask: attnreg may never see "
    "this call; attnreg.flash_attn.flash_attn_func, which takes no mask, pads such head dims"
)

# The options of PyTorch's function, and further options of flash-attn's function for dense calls.
OF_SDPA, OF_FLASH = ("dropout", "attn_bias"), ("softcap", "alibi_slopes", "grad_lse")
VARLEN, FLASH = "attnreg.varlen_attn", "attnreg.flash_attn.flash_attn_func"


def shapes_as(layout: str, **shapes: tuple[int, ...]) -> str:
    """Return shapes as text, equal ones once: `query (2, 8, 9, 64), key and value (...) as (B, H, S, D)`."""
    names: dict[tuple[int, ...], list[str]] = {}
    for name, shape in shapes.items():
        names.setdefault(tuple(shape), []).append(name)
    texts = [
        f"{', '.join(named[:-1])}{' and ' if named[1:] else ''}{named[-1]} {shape}"
        for shape, named in names.items()
    ]
    return f"{', '.join(texts)} as {layout}"


def _front_of(spec: AttentionSpec) -> tuple[str, list[str]]:
    """Return the function that makes a call, "" if none does, and what has to be said of it."""
    if spec.varlen:
        if spec.bias:
            return "", [f"no function makes such a call: {VARLEN} takes no attn_bias"]
        return VARLEN, []
    options = [row for row in spec.options if row.name not in OF_SDPA]
    names = ["window_size"] * (spec.window not in (UNBOUNDED, (-1, 0)))
    named = ", ".join((*names, *(row.argument or row.label for row in options)))
    if not named:
        return SDPA, []
    if spec.bias:
        return "", [f"no function makes such a call: {SDPA} has no {named}, the others take no attn_bias"]
    only_packed = any(row.name not in OF_FLASH for row in options)
    front = VARLEN if only_packed else FLASH
    how = f"an option of {VARLEN}, which takes packed calls (--varlen, or an AttentionSpec with varlen=True)"
    how = how if only_packed else f"explained is a dense call of {FLASH}"
    return front, [f"{SDPA} has no {named}: {how}"]


def _is_left_to_math(spec: AttentionSpec) -> bool:
    """Whether torch's selector finds the head dims of a dense call wrong for each of its other kernels.

    As in torch/aten/src/ATen/native/transformers/cuda/sdp_utils.cpp. Torch pads for its flash kernel alone.
    """
    dims = spec.head_dim, spec.head_dim_v
    flash = spec.dtype in ("float16", "bfloat16") and dims[0] == dims[1] <= 256 and not spec.bias
    step = 4 if spec.dtype == "float32" else 8
    return not flash and any(dim % step for dim in dims)


def _selected_for(spec: AttentionSpec) -> Bypassed | None:
    """Return the kernel that bypasses the routers for a dense call of this spec, else None.

    Only for specs of a CPU: on a GPU the spec doesn't determine the choice of torch's selector.
    """
    if spec.varlen or spec.device.type != "cpu":
        return None
    reasons = reasons_of_sizes(spec.dropout, spec.head_dim, spec.head_dim_v)
    sizes = spec.batch, spec.heads_q, spec.heads_k, spec.max_q, spec.max_k, spec.head_dim, spec.head_dim_v
    reasons += [NOTHING_TO_DO] if 0 in sizes else []
    return Bypassed(MATH, "; ".join(reasons)) if reasons else None


def described(spec: AttentionSpec) -> CallSpec:
    """Return what selection sees of a call without its tensors."""
    front, notes = _front_of(spec)
    looks = {RECOGNISE: True, LARGE: spec.device.type == "cuda"}.get(masks(policy.sources())[0], False)
    if spec.bias and not spec.varlen and looks:
        notes.append(NO_MASK_TO_READ)
    if spec.window == (-1, 0) and not spec.varlen and spec.max_q != spec.max_k:
        notes.append(BOTTOM_RIGHT)
    is_shared = spec.device.type == "cuda" and spec.heads_q != spec.heads_k
    if spec.bias and not spec.varlen and is_shared and not versions.EFFICIENT_SHARES_HEADS:
        notes.append(SHARED_HEADS)
    if front == SDPA and not spec.varlen and spec.device.type == "cuda" and _is_left_to_math(spec):
        notes.append(ODD_DIMS)
    elsewhere = _selected_for(spec) if front == SDPA else None
    return CallSpec(spec, elsewhere=elsewhere, notes=tuple(notes), front=front)


def dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> CallSpec:
    """Return the spec of `F.scaled_dot_product_attention` with these arguments.

    Query, key and value are (B, H, S, D) or broadcast to it, of a floating-point dtype. The mask broadcasts
    to (B, H, S_q, S_k). Raises `InvalidInputError` if the arguments contradict each other.
    """
    selection = None
    have_lengths = all(x.dim() >= 2 for x in (query, key, value))
    if attn_mask is not None and have_lengths:
        _check_mask(*autocast(query, key, attn_mask), enable_gqa)
    if have_lengths and _is_left_to_broadcast(query, key, value, enable_gqa):
        # Of these the selector has to see the dims; all else is as with a batch of heads.
        query, key, value = autocast(query, key, value)
        selection = selected(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        # Torch expands what it gives to these two; other ops get one key head for all query heads.
        is_expanded = isinstance(selection, Bypassed) or selection is efficient.EFFICIENT
        tensors = query, key, value
        query, key, value = _batches(enable_gqa, *tensors) if is_expanded else _four_dims(*tensors)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise InvalidInputError(
                f"{name}: got shape {tuple(tensor.shape)}, expected (batch, heads, length, head_dim), "
                "or (tokens, heads, head_dim) with cu_seq_q"
            )
    query, key, value = autocast(query, key, value)
    arguments = SdpaCpuForward(query, key, value, dropout_p, is_causal, attn_mask, scale)
    call = dense_call_of(arguments, attn_mask)
    inputs = *to_bshd(query, key, value, call), call
    check(*inputs)
    check_scale(call.scale)
    if selection is None:
        selection = selected(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    native, elsewhere = (None, selection) if isinstance(selection, Bypassed) else (selection, None)
    # The flash op of CUDA isn't given whether a gradient is needed: see `aten.flash`.
    needs_backward = torch.is_grad_enabled() if native is flash.DENSE else wants_gradient(query, key, value)
    if elsewhere is not None and attn_mask is not None:
        if is_causal and query.numel():  # torch checks nothing of an empty batch
            raise InvalidInputError(
                f"attn_mask: got a tensor with is_causal=True, expected one of the two for {elsewhere.kernel}"
            )
        needs_backward = needs_backward or wants_gradient(query, key, attn_mask)
    of_mask = native is efficient.EFFICIENT and attn_mask is not None and attn_mask.requires_grad
    is_rewritten = is_causal and call.window[1] > 0 and elsewhere is None
    notes = (TOP_LEFT.format(call.window),) if is_rewritten else ()
    return CallSpec(spec_of(*inputs, needs_backward), native, elsewhere, notes, of_mask)


def _is_left_to_broadcast(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> bool:
    """Whether a call has other dims than (B, H, S, D), or tensors that torch's math kernel broadcasts."""
    own = _own_dims(enable_gqa)
    return query.dim() != 4 or len({x.shape[:-own] for x in (query, key, value)}) > 1


def _own_dims(enable_gqa: bool) -> int:
    """Return how many last dims of a tensor are its own; torch broadcasts the others."""
    return 3 if enable_gqa else 2


def _batches(enable_gqa: bool, *tensors: Tensor) -> list[Tensor]:
    """Return query, key and value broadcast to (B, H, S, D)."""
    own = _own_dims(enable_gqa)
    for name, tensor in zip(("query", "key", "value"), tensors, strict=True):
        if tensor.dim() < own:
            raise InvalidInputError(
                f"{name}: got shape {tuple(tensor.shape)} with enable_gqa=True, expected heads: "
                "(..., heads, length, head_dim)"
            )
    batch = _broadcast("query, key and value", *(x.shape[:-own] for x in tensors))
    return _four_dims(*(x.expand(*batch, *x.shape[-own:]) for x in tensors))


def _four_dims(*tensors: Tensor) -> list[Tensor]:
    """Return tensors as (B, H, S, D), whatever dims they have before S."""
    return [x[(None,) * (4 - x.dim())] if x.dim() < 4 else x.flatten(0, -4) for x in tensors]


def _check_mask(query: Tensor, key: Tensor, mask: Tensor, enable_gqa: bool) -> None:
    """Raise an `InvalidInputError` for a mask that torch's function refuses on any of its kernels."""
    if mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise InvalidInputError(
            f"attn_mask: got {mask.dtype}, expected torch.bool, torch.float32 or {query.dtype}, as of query"
        )
    batches = (query,) if enable_gqa else (query, key)
    batch = _broadcast("query and key", *(x.shape[:-2] for x in batches))
    scores = torch.Size((*batch, query.shape[-2], key.shape[-2]))
    if _broadcast("attn_mask and scores", mask.shape, scores) != scores:
        raise InvalidInputError(f"attn_mask: got {tuple(mask.shape)}, expected at most {tuple(scores)}")


def _broadcast(what: str, *shapes: torch.Size) -> torch.Size:
    try:
        return torch.broadcast_shapes(*shapes)  # type: ignore[no-any-return,no-untyped-call]
    except RuntimeError:
        got = " and ".join(str(tuple(shape)) for shape in dict.fromkeys(shapes))
        raise InvalidInputError(f"{what}: got {got}, expected shapes that broadcast") from None


def masked(call: SdpaCall) -> CallSpec:
    """Return the spec of a call of `F.scaled_dot_product_attention`, whose mask may be recognised.

    Of several packed calls that take its place the first is explained.
    """
    layout = "(B, H, S, D)" if call.query.dim() == 4 else "(..., S, D)"
    inputs = shapes_as(layout, query=call.query.shape, key=call.key.shape, value=call.value.shape)
    described = _causal_bias(call) if is_causal_bias(call.attn_mask) else _masked(call)
    native = flash.dense_native() if described.native is flash.DENSE else described.native
    return described._replace(native=native, inputs=inputs)


def _causal_bias(call: SdpaCall) -> CallSpec:
    """Return the spec of the call that `torch.nn.attention.bias.CausalBias` makes of one with it as mask."""
    mask: Any = call.attn_mask
    if call.is_causal:
        raise InvalidInputError("attn_mask: got a CausalBias with is_causal=True, expected one of the two")
    if mask.variant.name == "UPPER_LEFT" or mask.seq_len_q == mask.seq_len_kv:
        described = _masked(call._replace(attn_mask=None, is_causal=True))
        return _with_note(described, "torch runs a call with this CausalBias as one with is_causal=True")
    native = _of_lower_right(call)
    if native is None:
        described = _masked(call._replace(attn_mask=mask._materialize(call.query.device)))
        return _with_note(described, "torch makes a boolean attn_mask of this CausalBias")
    described = dense(*call._replace(attn_mask=None))
    spec = described.spec
    spec = replace(spec, window=bounds(spec.window, True, spec.max_q, spec.max_k))
    if native is flash.DENSE:
        added = -spec.head_dim % 8
        spec = replace(
            spec,
            head_dim=spec.head_dim + added,
            head_dim_v=spec.head_dim_v + added,
            needs_backward=torch.is_grad_enabled(),
        )
    described = described._replace(spec=spec, native=native, elsewhere=None)
    return _with_note(described, f"torch gives a call with this CausalBias to the op of {native.name}")


def _of_lower_right(call: SdpaCall) -> Native | None:
    """Return whose op `CausalBias` calls for an oblong mask that is aligned bottom-right, if any."""
    cuda = torch.backends.cuda
    parameters = cuda.SDPAParams(*call[:3], None, call.dropout_p, False, call.enable_gqa)
    if cuda.can_use_flash_attention(parameters):
        return flash.DENSE
    return efficient.EFFICIENT if cuda.can_use_efficient_attention(parameters) else None


def _with_note(described: CallSpec, note: str) -> CallSpec:
    return described._replace(notes=(note, *described.notes))


def _masked(call: SdpaCall) -> CallSpec:
    structure = recognised(call) if serves(call.query, call.key, runs=False) else None
    if not isinstance(structure, Structure):
        described = dense(*call)
        if structure is None:
            return described
        return _with_note(described, f"attn_mask is passed on {LEFT}{structure}")
    note = f"attn_mask is recognised as {structure.seen}: "
    if structure.is_causal is not None:
        described = dense(*call._replace(attn_mask=None, is_causal=structure.is_causal))
        return _with_note(described, f"{note}the call runs as one without a mask")
    of_queries, of_keys = structure.shares
    note += f"{of_queries:.0%} of the queries and {of_keys:.0%} of the keys count"
    specs = [spec_of_part(call, part) for part in structure.parts]
    notes = (note, *(f"this packed call runs as well: {other}" for other in specs[1:]))
    return CallSpec(specs[0], notes=notes)


def nested(call: SdpaCall, leading: Preference | None) -> CallSpec:
    """Return the spec of a call with nested tensors, each of (B, H, length, D).

    `leading` is the choice for this call alone.
    """
    queries, keys, values = ([sequence.shape for sequence in x.unbind()] for x in call[:3])
    lengths_q, lengths_k = ([shape[-2] for shape in shapes] for shapes in (queries, keys))
    spec = AttentionSpec(
        device=device_of(call.query.device), dtype=str(call.query.dtype), batch=len(queries),
        max_q=max(lengths_q), max_k=max(lengths_k), heads_q=queries[0][0], heads_k=keys[0][0],
        head_dim=queries[0][-1], head_dim_v=values[0][-1], tokens_q=sum(lengths_q),
        tokens_k=sum(lengths_k), varlen=True, window=window(None, call.is_causal), dropout=call.dropout_p,
        needs_backward=wants_gradient(call.query, call.key, call.value),
    )  # fmt: skip
    if call.query.is_cpu:  # torch has no kernel of its own for the op that it is sent to
        elsewhere = selected_nested(call, leading)
        if elsewhere is not None and not is_dense_inside(call.query):
            shared = "" if spec.heads_q == spec.heads_k else f"{spec.heads_q} and {spec.heads_k} heads"
            if got := "is_causal=True" if call.is_causal else shared:
                why = f"which {elsewhere.kernel} refuse, to which it goes: {elsewhere.reason}"
                raise InvalidInputError(f"explain: got {got}, {why}")
        return CallSpec(spec, elsewhere=elsewhere)
    return CallSpec(spec, flash.FA2)


def packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Lengths,
    mask: Mask,
    options: Mapping[str, Any],
    returns_lse: bool,
) -> CallSpec:
    """Return the spec of `varlen_attn` with these arguments.

    Query, key and value are packed (T, H, D), of a floating-point dtype. `lengths` are the offsets (B + 1,),
    int32, and the longest lengths. Raises `InvalidInputError` if the arguments contradict each other.
    """
    inputs = shapes_as("(T, H, D)", query=query.shape, key=key.shape, value=value.shape)
    is_causal, window_size, scale, enable_gqa = mask
    if not enable_gqa:
        check_heads(query, key, value, lengths)
    query, key, value = autocast(query, key, value)
    bound = window(window_size, is_causal)
    call = call_of(query, lengths, scale, bound, **options_of(options, "explain"))
    check(query, key, value, call)
    check_scale(call.scale)
    check_functions(call, query)
    if query.is_cpu:
        check_values(query, key, call)
    spec = spec_of(query, key, value, call, wants_gradient(query, key, value))
    rescaled = {row.field: True for row in options_on(call) if row.rescales}
    spec = spec.but(**rescaled, grad_lse=returns_lse and spec.needs_backward)
    kernels = ("flash", "mem_efficient", "math", "cudnn")
    all_allowed = all(getattr(torch.backends.cuda, f"{kernel}_sdp_enabled")() for kernel in kernels)
    notes = () if all_allowed else (SDPA_KERNEL_IGNORED,)
    return CallSpec(spec, notes=notes, front=VARLEN, inputs=inputs, returns_lse=returns_lse)


def never_seen(
    bypassed: Bypassed, direction: Direction, entries: Mapping[str, Entry], refusal: str
) -> Decision:
    """Return what torch's own selector decided before attnreg could, or that strict makes that an error."""
    kernel = bypassed.kernel
    reason = f"never sees this call: {SDPA} sends it to {kernel}: {bypassed.reason}"
    names = tuple(entry.name for entry in entries.values())
    rejected: dict[str, tuple[str, ...]] = dict.fromkeys(names, (reason,))
    if refusal:
        return Decision(direction, None, "", rejected=rejected, order=names, refusal=refusal)
    return Decision(direction, kernel, "torch's own selector", rejected=rejected, order=(kernel, *names))
