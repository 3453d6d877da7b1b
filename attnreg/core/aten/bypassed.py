"""Calls of PyTorch's functions that bypass every router: detected, counted and explained.

Torch decides inside `F.scaled_dot_product_attention` which op a call runs. Some of these ops have no router,
nor has the fast path of encoder layers on a CPU. `observers` counts the calls that come to these ops. A call
has to be inspected before torch decides where `strict` may refuse it, where nothing is computed, and where
nothing asks for a backend. For that (`attnreg run --stats`, a recording, `strict`) the functions are replaced
by wrappers.

Masks must be recognised in these wrappers, too: an op below receives none of the program's own tensors.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.overrides import handle_torch_function

from attnreg.core.aten import cpu, cudnn, efficient, flash, nested
from attnreg.core.contract.spec import Device
from attnreg.core.dispatch import call_cache, scope, trace
from attnreg.core.dispatch.planning import NOTHING_ASKS, Native, device_of
from attnreg.core.dispatch.state import state
from attnreg.core.policy import current as policy
from attnreg.core.policy.lockfile import VARIABLE as LOCK
from attnreg.core.policy.sources import masks, strict
from attnreg.core.selection.decision import Preference
from attnreg.core.settings.environment import AS_GIVEN, LARGE
from attnreg.core.torchlib import captured, versions
from attnreg.core.torchlib.frames import leave_module_uncompiled
from attnreg.core.torchlib.locks import open_after_fork
from attnreg.core.torchlib.modes import autocast, is_plain
from attnreg.core.torchlib.replacing import Replacement
from attnreg.errors import UnsupportedInputError

# The choices of torch's selector that lead to a router, and the backend of torch's own kernel there.
ROUTED = {
    ("cpu", SDPBackend.FLASH_ATTENTION): cpu.CPU,
    ("cuda", SDPBackend.FLASH_ATTENTION): flash.DENSE,
    ("cuda", SDPBackend.CUDNN_ATTENTION): cudnn.CUDNN,
    ("cuda", SDPBackend.EFFICIENT_ATTENTION): efficient.EFFICIENT,
}
SDPA_NAME = "scaled_dot_product_attention"
SDPA = nested.SDPA
MATH = "torch's math kernel"
FAST_PATH = "torch's fast path of encoder layers and MultiheadAttention"
OF_FAST_PATH = (
    "it has kernels of its own on a CPU; torch.backends.mha.set_fastpath_enabled(False) switches it off"
)
SELECTED = "torch's selector chose it"
NOTHING_TO_DO = "there must be queries and keys"


class Bypassed(NamedTuple):
    """A kernel without a router that a function of torch's runs for a call, and the reason."""

    kernel: str
    reason: str
    function: str = SDPA


class SdpaCall(NamedTuple):
    """The arguments of `F.scaled_dot_product_attention`.

    `query` is (B, H_q, S_q, D), `key` (B, H_k, S_k, D) and `value` (B, H_k, S_k, D_v). `attn_mask` broadcasts
    to (B, H_q, S_q, S_k), boolean or in the query's dtype.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


def is_causal_bias(mask: object) -> bool:
    """Whether a mask is a `torch.nn.attention.bias.CausalBias`, whose class turns the call into another one.

    Its module isn't imported here, because it imports torch's compiler. Without it there is no such mask.
    """
    module = sys.modules.get("torch.nn.attention.bias")
    return module is not None and isinstance(mask, module.CausalBias)


def selected(*arguments: Any) -> Native | Bypassed:
    """Return the kernel that torch's selector chooses for a call of `F.scaled_dot_product_attention`.

    The arguments are the fields of `SdpaCall`.
    """
    call = SdpaCall(*arguments)
    query, key, value = call[:3]
    has_lengths = query.shape[-2] > 0 and key.shape[-2] > 0
    if not has_lengths or (versions.SDPA_SKIPS_EMPTY and not all(x.numel() for x in (query, key, value))):
        return Bypassed(MATH, NOTHING_TO_DO)  # torch returns zeros, or 2.11 selects math
    # SDPA makes a batch above the op, too. Made within the op, a mask wouldn't say that it needs a gradient.
    q, k, v, mask = _with_batch(*call[:4])
    q, k, v = _not_negated(q), _not_negated(k), _not_negated(v)
    batched = q, k, v, None if mask is None else _not_negated(mask), call.dropout_p, call.is_causal
    choice = SDPBackend(torch._fused_sdp_choice(*batched, scale=call.scale, enable_gqa=call.enable_gqa))
    native = ROUTED.get((query.device.type, choice))
    if native is not None:
        return native
    kernel = f"torch's {choice.name.lower()} kernel"
    return Bypassed(kernel, why_unrouted(call))


def _not_negated(x: Tensor) -> Tensor:
    """Return the same memory without the mark that its numbers are lazily negated.

    SDPA asks the selector past torch's dispatcher, which would copy a negated tensor before: the selector
    sees its strides.
    """
    return torch._neg_view(x) if x.is_neg() else x


def why_unrouted(call: SdpaCall) -> str:
    """Return why torch's selector has chosen a kernel without a router, as far as the arguments say it."""
    return (call.query.is_cpu and "; ".join(_against_flash_on_cpu(call))) or SELECTED


def selected_nested(call: SdpaCall, leading: Preference | None = None) -> Bypassed | None:
    """Return torch's kernels for nested tensors on a CPU, with the reason, if these run the call; else None.

    `leading` is the choice for this call alone.
    """
    why = nested.why_torchs(call.query, call.key, call.value, call.is_causal, leading)
    return Bypassed(nested.KERNELS, why) if why else None


def reasons_of_sizes(dropout_p: float, head_dim: int, head_dim_v: int) -> list[str]:
    """Return why torch chooses its math kernel on a CPU, as far as these numbers say it."""
    reasons = [f"dropout_p must be 0 on a CPU, got {dropout_p}"] if dropout_p > 0.0 else []
    if head_dim != head_dim_v:
        reasons.append(f"head_dim of the value must be that of the query, {head_dim}, got {head_dim_v}")
    return reasons


def _with_batch(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Add a batch of size 1 to tensors (H, S, D) and their mask where torch's selector adds it."""
    if not (versions.SELECTOR_BROADCASTS and query.dim() == key.dim() == value.dim() == 3):
        return query, key, value, mask
    mask = None if mask is None else mask[(None,) * (4 - mask.dim())]
    return query[None], key[None], value[None], mask


def _against_flash_on_cpu(call: SdpaCall) -> Iterator[str]:
    """Yield why torch doesn't choose the flash kernel: conditions of its `use_flash_attention_cpp`."""
    query, key, value, attn_mask = _with_batch(*call[:4])
    named = {"query": query, "key": key, "value": value}
    if not torch.backends.cuda.flash_sdp_enabled():  # type: ignore[no-untyped-call]
        yield "the flash kernel is disabled (torch.nn.attention.sdpa_kernel)"
    if dims := [x.dim() for x in named.values() if x.dim() != 4]:
        yield f"tensors must have 4 dimensions, got {dims[0]}"
    else:
        batches, heads = ([x.shape[dim] for x in named.values()] for dim in (0, 1))
        if len(set(batches)) > 1:
            yield f"query, key and value must have one batch size, got {batches}"
        shares_one = versions.SELECTOR_BROADCASTS and heads[1:] == [1, 1]
        if len(set(heads)) > 1 and not (call.enable_gqa or shares_one):
            yield f"without enable_gqa query, key and value must have as many heads, got {heads}"
    if attn_mask is not None and attn_mask.dim() not in (2, 4):
        yield f"attn_mask must have 2 or 4 dimensions, got {attn_mask.dim()}"
    yield from reasons_of_sizes(call.dropout_p, query.shape[-1], value.shape[-1])
    for name, x in named.items():
        if x.stride(-1) != 1:
            yield f"the last stride of {name} must be 1, got {x.stride(-1)}"
    if attn_mask is not None and attn_mask.requires_grad:
        yield "attn_mask must need no gradient"


_lock = open_after_fork(threading.RLock())
_observers = 0
_observes = False
ops_are_observed = False  # whether `observers` counts what comes to the ops without a router
# Reasons of calls that no observed op shows.
_UNOBSERVED = frozenset({NOTHING_TO_DO, NOTHING_ASKS})

# A function that runs calls whose mask it recognises, and returns None for all other calls; see the room
# `masks`. It is given the arguments by place and by name, as they come.
run_recognised: Callable[[tuple[Any, ...], dict[str, Any]], Tensor | None] | None = None
_recognises = False
# How masks are handled; a value of the setting `masks`.
mask_mode = AS_GIVEN


def observe(more: int) -> None:
    """Add an observer of bypassed calls (1), or remove one (-1)."""
    global _observers
    with _lock:
        _observers += more
    follow()


def counts() -> bool:
    """Whether to count calls that pass attnreg by: something asks for a backend, or somebody observes."""
    return _observes or state().active or scope.current() is not None


def is_observed() -> bool:
    """Whether somebody observes: `attnreg run --stats`, a recording, a file for stats, `strict`."""
    if _observers > 0 or not policy.are_read():
        return _observers > 0
    now = policy.sources()
    variables = now.environment
    return bool(strict(now) or variables.record or variables.stats or variables.report)


def looks_at_masks() -> bool:
    """Whether settings in force have boolean masks looked at, to recognise them or to report them."""
    return _mask_mode() != AS_GIVEN or (policy.are_read() and policy.sources().environment.report is not None)


def _mask_mode() -> str:
    """Return how settings in force have masks handled; large calls are those of a GPU.

    Without routers masks are torch's, too.
    """
    has_routers = captured.call_cache_in_use is not None
    mode = masks(policy.sources())[0] if has_routers and policy.are_read() else AS_GIVEN
    return AS_GIVEN if mode == LARGE and torch.version.cuda is None else mode


def follow() -> None:
    """Install or remove the wrappers, as the observers and the settings now require."""
    global _observes, _recognises, mask_mode
    _observes = nested.is_looked_at = is_observed()
    mask_mode = _mask_mode()
    _recognises = run_recognised is not None and looks_at_masks()
    for place, name, torchs, looking in _FUNCTIONS:
        wanted = _observes or (_recognises and name == SDPA_NAME)
        current = getattr(place, name)
        if current is torchs or current is looking:  # a wrapper of other code stays
            setattr(place, name, looking if wanted else torchs)
        if wanted and name == SDPA_NAME and (compiled := call_cache.active) is not None:
            compiled.pass_unmasked(type(looking), torchs, globals())  # Dynamo traces `__call__`


def _first_looks(
    look: Callable[..., tuple[Tensor, Bypassed] | None], torchs: Callable[..., Any], place: str
) -> Replacement:
    """Return a replacement of a function of torch's: `look` inspects the arguments before each call."""
    takes_masks = torchs is torch._C._nn.scaled_dot_product_attention

    def looking(self: Replacement, *arguments: Any, **options: Any) -> Any:
        bypass = None
        mask: Any = arguments[3] if len(arguments) > 3 else options.get("attn_mask")
        if takes_masks and is_causal_bias(mask):
            # Its class knows torch's function by its name in F, where this one is. With torch's own it would
            # read the memory of the mask, which nobody has written.
            return mask.__torch_function__(getattr(F, SDPA_NAME), (type(mask),), arguments, options)
        if takes_masks and not torch.compiler.is_compiling() and torch._C._is_torch_function_mode_enabled():
            # So do modes, such as one of diffusers that skips scores. They call it again, out of themselves.
            return handle_torch_function(self, (*arguments, *options.values()), *arguments, **options)
        if mask is None and not _observes:
            return torchs(*arguments, **options)
        if not torch.compiler.is_compiling():
            if takes_masks and mask is not None and _recognises and run_recognised is not None:
                result = run_recognised(arguments, options)
                if result is not None:
                    return result
            if _observes:
                with contextlib.suppress(Exception):  # wrong arguments are an error of the call itself
                    if not (takes_masks and _is_left_to_ops(arguments)):
                        bypass = look(*arguments, **options)
        if bypass is not None:
            _refuse_if_strict(*bypass)
        result = torchs(*arguments, **options)
        if bypass is not None and _is_counted_here(bypass[1]):
            tensors = SdpaCall(*arguments, **options)[:3] if takes_masks else bypass[:1]
            trace.count_bypassed(bypass[1].function, *bypass[1][:2], tensors)
        return result

    # A class of its own, so that a call enters a single function of Python's.
    replacement: Replacement = type("Looking", (Replacement,), {"__call__": looking})(torchs, place, torchs)
    with contextlib.suppress(Exception):  # private; TorchScript then treats it as torch's function
        builtins: Any = torch.jit._builtins
        builtins._register_builtin(replacement, builtins._find_builtin(torchs))
    return replacement


def _is_left_to_ops(arguments: tuple[Any, ...]) -> bool:
    """Whether a call of SDPA needs no look: a router or an observed op counts it, and nothing refuses it.

    A look asks torch's selector, and takes 55 calls of Python: as long as a small call itself.
    """
    now, choice = state(), scope.current()
    preferences = now.policy.preferences if choice is None else (choice.preference, *now.policy.preferences)
    if not (now.active or choice is not None) or not ops_are_observed or len(arguments) < 3:
        return False
    may_refuse = now.policy.strict or any(
        preference is not None and preference.exclusive for preference in preferences
    )
    return not (may_refuse or torch.is_inference_mode_enabled()) and all(
        isinstance(x, Tensor) and x.device.type in ("cpu", "cuda") and not x.is_nested and x.numel()
        for x in arguments[:3]
    )


def _is_counted_here(bypassed: Bypassed) -> bool:
    """Whether no observed op counts such a call; in inference mode calls pass by what is above autograd."""
    is_unobserved = bypassed.reason in _UNOBSERVED or bypassed.kernel == nested.KERNELS
    in_inference = torch.is_inference_mode_enabled() and bypassed.kernel != FAST_PATH
    return is_unobserved or in_inference or not ops_are_observed


def _look_at_sdpa(*arguments: Any, **options: Any) -> tuple[Tensor, Bypassed] | None:
    call = SdpaCall(*arguments, **options)
    if call.query.is_nested:
        is_routed = not call.query.is_cpu or nested.is_dense_inside(call.query)
        bypassed = None if is_routed else selected_nested(call)
        return None if bypassed is None else (call.query, bypassed)
    if not is_plain(*call[:4]):
        return None
    # Torch applies autocast before it selects: tensors of different dtypes then have the same.
    query, key, value = autocast(*call[:3])
    native = selected(*call._replace(query=query, key=key, value=value))
    if isinstance(native, Bypassed):
        return call.query, native
    if state().active or scope.current() is not None:
        return None  # a router counts it
    return call.query, Bypassed(native.kernel, NOTHING_ASKS)


def _look_at_fast_path(source: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Bypassed] | None:
    bypassed = Bypassed(FAST_PATH, OF_FAST_PATH, "nn.MultiheadAttention or nn.TransformerEncoderLayer")
    return (source, bypassed) if source.is_cpu else None  # on a GPU it calls an op that is routed


def _refuse_if_strict(tensor: Tensor, bypassed: Bypassed) -> None:
    choice = scope.current()
    scoped = choice.preference if choice is not None else None
    if refusal := why_refused(device_of(tensor.device), bypassed, scoped):
        raise UnsupportedInputError(refusal)


def why_refused(device: Device, bypassed: Bypassed, scoped: Preference | None) -> str:
    """Return why a bypassed call is an error, by strict or by `backend=`; else an empty string.

    Strict refuses calls of devices for which a backend is asked for, and with a lockfile all calls.
    A call without queries or keys is no error, because nothing is computed.
    """
    policy_now = state().policy
    preferences = [
        preference
        for preference in (scoped, *policy_now.preferences)
        if preference is not None and preference.applies_to(device)
    ]
    is_exclusive = bool(preferences) and preferences[0].exclusive
    by_strict = policy_now.strict and (preferences or policy_now.lock is not None)
    if not (by_strict or is_exclusive) or NOTHING_TO_DO in bypassed.reason:
        return ""
    sent = f"{bypassed.function} sends this call to {bypassed.kernel}"
    if is_exclusive:
        return f"{sent}, and {preferences[0].source} allows no other than that backend: {bypassed.reason}"
    unseen = (
        f"no backend of {preferences[0].source} sees it" if preferences else f"{LOCK} doesn't hold for it"
    )
    return (
        f"{sent}, so that {unseen}, and strict ({policy_now.strict}) makes that an error: {bypassed.reason}"
    )


_FUNCTIONS = [
    (place, name, torchs, _first_looks(look, torchs, f"{place.__name__}:{name}"))
    for place, name, look in (
        (F, SDPA_NAME, _look_at_sdpa),
        (torch, "_transformer_encoder_layer_fwd", _look_at_fast_path),
        (torch, "_native_multi_head_attention", _look_at_fast_path),
    )
    for torchs in (getattr(place, name),)
]


leave_module_uncompiled(__name__)
