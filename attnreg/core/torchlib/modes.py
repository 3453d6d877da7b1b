"""Whether a call has plain tensors or torch must see it as an op, and what autocast changes in it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from attnreg.core.torchlib.batches import TWICE, each_of_batch, is_batch
from attnreg.core.torchlib.frames import leave_module_uncompiled

# At import, because torch.compile of torch 2.11 can't trace `is_autocast_available`.
_AUTOCASTS = frozenset(
    filter(torch.amp.is_autocast_available, ("cpu", "cuda", "xpu", "hpu", "mtia", "mps", "xla"))
)


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether these are tensors of a CPU or a GPU that no mode, subclass or function transform handles.

    Tensors have any shape and dtype; None is ignored. A lazily negated tensor isn't plain, because its
    numbers in memory have the opposite sign. Zeros without memory aren't plain either.
    """
    if torch._C._len_torch_dispatch_stack() or is_transformed():
        return False
    if torch._C._is_tracing() or (torch._C._is_torch_function_mode_enabled() and not _are_modes_harmless()):
        return False
    present = [x for x in tensors if x is not None]
    return all(
        type(x) in (Tensor, torch.nn.Parameter)
        and (x.is_cuda or x.is_cpu)
        and not (x.is_neg() or x._is_zerotensor())
        for x in present
    )


def is_for_others() -> bool:
    """Whether the running code also serves other inputs: under torch.jit.trace, `vmap` or `functionalize`.

    A number that is read back from a tensor would hold for one of these inputs only, or can't be read. False
    in compiled code, and for make_fx: see `is_readable` of the room `integrations`.
    """
    if torch.compiler.is_compiling():
        return False
    return torch._C._is_tracing() or any(
        interpreter.key() in _OF_OTHERS for interpreter in torch._C._functorch.get_interpreter_stack() or ()
    )


_OF_OTHERS = (torch._C._functorch.TransformType.Vmap, torch._C._functorch.TransformType.Functionalize)


class OwnMode(TorchFunctionMode):
    """A function mode of attnreg's own, which leaves the tensors of a call as they are."""


def _are_modes_harmless() -> bool:
    """Whether all function modes are attnreg's own or come from `torch.set_default_device`."""
    from torch.utils._device import DeviceContext  # torch imports it with the first such mode

    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return all(isinstance(mode, DeviceContext | OwnMode) for mode in modes)


def is_transformed() -> bool:
    """Whether a function transform or forward-mode AD is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def autocasts(device: str) -> bool:
    """Whether autocast is on for a type of device."""
    return device in _AUTOCASTS and torch.is_autocast_enabled(device)


def is_differentiated() -> bool:
    """Whether a function transform that differentiates is active: `grad`, `jvp`, or one made of these."""
    interpreters = torch._C._functorch.get_interpreter_stack() or ()
    return any(interpreter.key() in _OF_GRADIENTS for interpreter in interpreters)


_OF_GRADIENTS = (torch._C._functorch.TransformType.Grad, torch._C._functorch.TransformType.Jvp)
# As by `torch.compiler.assume_constant_result`, which imports Dynamo. Dynamo guards transforms by itself.
is_differentiated._dynamo_marked_constant = True  # type: ignore[attr-defined]


# What an op's body leaves out, and a dispatch mode's.
_LEFT_OUT = (
    *("AutogradOther", "AutogradCPU", "ADInplaceOrView"),  # the second stands for all devices
    "PythonTLSSnapshot",
    *("FuncTorchBatched", "FuncTorchVmapMode", "FuncTorchGradWrapper"),
    *("FuncTorchDynamicLayerFrontMode", "FuncTorchDynamicLayerBackMode"),
)


@contextlib.contextmanager
def outside_of_ops() -> Iterator[None]:
    """Let autograd and function transforms work as they do outside, in code that runs inside of an op."""
    core: Any = torch._C
    excluded = core._dispatch_tls_local_exclude_set()
    for name in _LEFT_OUT:
        excluded = excluded.remove(getattr(core.DispatchKey, name))
    with core._ForceDispatchKeyGuard(core._dispatch_tls_local_include_set(), excluded):
        yield


def in_memory(x: Tensor) -> Tensor | None:
    """Return a tensor, of any shape and dtype, as memory that kernels can read; None if that is impossible.

    Zeros may have no memory, and a lazily negated tensor has the opposite sign in memory. Subclasses with
    `__torch_dispatch__` and tensors of vmap are wrappers. Some wrappers unwrap when an op is called, such as
    the result of a collective that nobody has waited for yet.
    """
    if _is_wrapper(x) and _is_wrapper(x := x.clone()):
        return None
    return resolved(x)


def resolved(x: Tensor) -> Tensor:
    """Return a tensor of any shape and dtype, but no wrapper, as memory with its numbers: see `in_memory`."""
    return x.clone() if x._is_zerotensor() else x.resolve_neg()


def _is_wrapper(x: Tensor) -> bool:
    functorch = torch._C._functorch
    if functorch.is_legacy_batchedtensor(x) or functorch.is_batchedtensor(x):
        return True
    return type(x) is not Tensor and torch._C._dispatch_keys(x).has(torch._C.DispatchKey.Python)


def autocast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast query, key and value as autocast does for `F.scaled_dot_product_attention`.

    Tensors of any shape, in any dtype but float64, are cast to autocast's dtype of the query's device.
    Torch's own varlen op has no such rule.
    """
    device = query.device.type
    if not autocasts(device):
        return query, key, value
    dtype = torch.get_autocast_dtype(device)
    query, key, value = (x.to(dtype) if _is_cast(x) else x for x in (query, key, value))
    return query, key, value


def _is_cast(x: Tensor) -> bool:
    return x.is_floating_point() and x.dtype != torch.float64  # autocast never casts float64


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make a second derivative of an `autograd.Function` an error, as torch's `once_differentiable` does.

    `backward` gets the gradients of a batch in turn.
    Torch's function raises no error where no incoming gradient requires a gradient, as with a loss that is
    linear in the output. A penalty on such a gradient would then silently contribute nothing.
    """

    @functools.wraps(backward)
    def once(ctx: Any, *grads: Any) -> Any:
        if is_batch(*grads):
            saved = ctx.saved_tensors  # once, because a checkpoint computes them once
            read = SimpleNamespace(**vars(ctx), saved_tensors=saved, needs_input_grad=ctx.needs_input_grad)
            return each_of_batch(functools.partial(backward, read), grads, saved)
        with torch.no_grad():
            results = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return results
        # The inputs as well: without them a derivative by the inputs alone wouldn't reach this error.
        inputs = [x for x in ctx.saved_tensors if x is not None and x.requires_grad]
        leaves = [x.detach().requires_grad_() if isinstance(x, Tensor) else x for x in results]
        delayed = torch._C._functions.DelayedError(TWICE.encode(), len(leaves) + len(inputs))(
            *leaves, *inputs
        )
        return tuple(delayed[: len(leaves)])

    return once


leave_module_uncompiled(__name__)
