"""Whether a call is one of plain tensors, or torch has to see it as an op; and what autocast makes of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack

# Asked here, once: the torch.compile of torch 2.11 can't trace the question.
_AUTOCASTS = frozenset(
    filter(torch.amp.is_autocast_available, ("cpu", "cuda", "xpu", "hpu", "mtia", "mps", "xla"))
)


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether these are tensors of a CPU or a GPU that no mode, subclass or function transform is to see.

    One that is negated lazily isn't: in memory its numbers have the other sign. Nor are zeros without memory.
    """
    if torch._C._len_torch_dispatch_stack() or is_transformed():
        return False
    if torch._C._is_tracing() or (torch._C._is_torch_function_mode_enabled() and not _is_default_device()):
        return False
    given = [x for x in tensors if x is not None]
    return all(
        type(x) in (Tensor, torch.nn.Parameter)
        and (x.is_cuda or x.is_cpu)
        and not (x.is_neg() or x._is_zerotensor())
        for x in given
    )


def is_for_others() -> bool:
    """Whether what runs now is for other numbers as well: by torch.jit.trace, `vmap` or `functionalize`.

    What is read back from a tensor would be that of one of them, or can't be. False in compiled code, and for
    make_fx: see `is_readable` of the room `integrations`.
    """
    if torch.compiler.is_compiling():
        return False
    return torch._C._is_tracing() or any(
        one.key() in _OF_OTHERS for one in torch._C._functorch.get_interpreter_stack() or ()
    )


_OF_OTHERS = (torch._C._functorch.TransformType.Vmap, torch._C._functorch.TransformType.Functionalize)


def _is_default_device() -> bool:
    """Whether all function modes are of `torch.set_default_device`, which changes no call of attention."""
    from torch.utils._device import DeviceContext  # torch imports it with the first such mode

    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return all(isinstance(one, DeviceContext) for one in modes)


def is_transformed() -> bool:
    """Whether a function transform or forward-mode AD is under way."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def autocasts(device: str) -> bool:
    """Whether autocast is on for a type of device."""
    return device in _AUTOCASTS and torch.is_autocast_enabled(device)


def in_memory(x: Tensor) -> Tensor | None:
    """Return a tensor as memory that kernels can read, None if that isn't possible.

    Zeros may have no memory, and a lazy negative has the other sign there. A subclass with
    `__torch_dispatch__` and a tensor of vmap are wrappers, some of which unwrap when an op is called: so does
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
    """Cast as autocast does for `F.scaled_dot_product_attention`; torch's own op has no such rule."""
    device = query.device.type
    if not autocasts(device):
        return query, key, value
    dtype = torch.get_autocast_dtype(device)
    query, key, value = (x.to(dtype) if _is_cast(x) else x for x in (query, key, value))
    return query, key, value


def _is_cast(x: Tensor) -> bool:
    return x.is_floating_point() and x.dtype != torch.float64  # which autocast leaves as it is


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make a second derivative of an `autograd.Function` an error, as `once_differentiable` of torch does.

    Torch's leaves that out where no incoming gradient needs one itself, as of a loss that is linear in the
    output: a penalty on such a gradient would then add nothing, without a word.
    """

    @functools.wraps(backward)
    def once(ctx: Any, *grads: Any) -> Any:
        with torch.no_grad():
            results = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return results
        # Inputs, too, as the derivative by them alone wouldn't come by here otherwise.
        inputs = [x for x in ctx.saved_tensors if x is not None and x.requires_grad]
        leaves = [x.detach().requires_grad_() if isinstance(x, Tensor) else x for x in results]
        text = b"trying to differentiate twice what attnreg computes, which has a first derivative alone"
        found = torch._C._functions.DelayedError(text, len(leaves) + len(inputs))(*leaves, *inputs)
        return tuple(found[: len(leaves)])

    return once
