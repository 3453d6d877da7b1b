"""Whether a call's tensors are plain, or torch has to see the call as an op; and autocast's rule for it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack

# Computed at import, as the torch.compile of torch 2.11 can't trace `is_autocast_available`.
_AUTOCASTS = frozenset(
    filter(torch.amp.is_autocast_available, ("cpu", "cuda", "xpu", "hpu", "mtia", "mps", "xla"))
)


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether tensors are on a CPU or GPU, and no mode, subclass or function transform has to see the call.

    Tensors may have any shape and dtype. A lazily negated tensor isn't plain: in memory its numbers have the
    opposite sign. Nor are zeros without memory.
    """
    if torch._C._len_torch_dispatch_stack() or is_transformed():
        return False
    if torch._C._is_tracing() or (torch._C._is_torch_function_mode_enabled() and not _is_default_device()):
        return False
    return all(
        type(x) in (Tensor, torch.nn.Parameter)
        and (x.is_cuda or x.is_cpu)
        and not (x.is_neg() or x._is_zerotensor())
        for x in tensors
        if x is not None
    )


def is_for_others() -> bool:
    """Whether this run stands for other values as well: under torch.jit.trace, `vmap` or `functionalize`.

    Values that are read from a tensor then belong to only one of the runs, or can't be read. Returns False in
    compiled code, and for make_fx: see `is_readable` of the room `integrations`.
    """
    if torch.compiler.is_compiling():
        return False
    return torch._C._is_tracing() or any(
        level.key() in _OF_OTHERS for level in torch._C._functorch.get_interpreter_stack() or ()
    )


_OF_OTHERS = (torch._C._functorch.TransformType.Vmap, torch._C._functorch.TransformType.Functionalize)


def _is_default_device() -> bool:
    """Whether all function modes are of `torch.set_default_device`, which changes no call of attention."""
    from torch.utils._device import DeviceContext  # torch imports it with the first such mode

    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return all(isinstance(mode, DeviceContext) for mode in modes)


def is_transformed() -> bool:
    """Whether a function transform or forward-mode AD is under way."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def autocasts(device: str) -> bool:
    """Whether autocast is on for a type of device."""
    return device in _AUTOCASTS and torch.is_autocast_enabled(device)


def in_memory(x: Tensor) -> Tensor | None:
    """Return a tensor, of any shape and dtype, in memory that kernels can read; None if impossible.

    Zeros may have no memory, and a lazy negative has the opposite sign in memory. A subclass with
    `__torch_dispatch__` and a tensor of vmap are wrappers. Some wrappers unwrap when an op is called, such as
    the result of a collective that nobody has waited for yet.
    """
    if _is_wrapper(x) and _is_wrapper(x := x.clone()):
        return None
    return x.clone() if x._is_zerotensor() else x.resolve_neg()


def _is_wrapper(x: Tensor) -> bool:
    functorch = torch._C._functorch
    if functorch.is_legacy_batchedtensor(x) or functorch.is_batchedtensor(x):
        return True
    return type(x) is not Tensor and torch._C._dispatch_keys(x).has(torch._C.DispatchKey.Python)


def autocast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast tensors of any shape as autocast does for `F.scaled_dot_product_attention`.

    With autocast on for their device, floating-point tensors except float64 get autocast's dtype. Torch's
    own op has no such rule.
    """
    device = query.device.type
    if not autocasts(device):
        return query, key, value
    dtype = torch.get_autocast_dtype(device)
    query, key, value = (x.to(dtype) if _is_cast(x) else x for x in (query, key, value))
    return query, key, value


def _is_cast(x: Tensor) -> bool:
    return x.is_floating_point() and x.dtype != torch.float64  # which autocast leaves as it is


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make a second derivative of an `autograd.Function` an error, as torch's `once_differentiable` does.

    Torch's version raises no error if no incoming gradient needs a gradient, as with a loss that is linear in
    the output. A penalty on such a gradient would then silently add nothing.
    """

    @functools.wraps(backward)
    def once(ctx: Any, *grads: Any) -> Any:
        with torch.no_grad():
            results = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return results
        # Inputs, too, or the second derivative by the inputs alone wouldn't reach this node.
        inputs = [x for x in ctx.saved_tensors if x is not None and x.requires_grad]
        leaves = [x.detach().requires_grad_() if isinstance(x, Tensor) else x for x in results]
        text = b"trying to differentiate twice what attnreg computes, which has a first derivative alone"
        guarded = torch._C._functions.DelayedError(text, len(leaves) + len(inputs))(*leaves, *inputs)
        return tuple(guarded[: len(leaves)])

    return once
