"""Whether a call is one of plain tensors, or torch has to see it as an op; and what autocast makes of it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack

# Asked here, once: the torch.compile of torch 2.11 can't trace the question.
_AUTOCASTS = frozenset(
    filter(torch.amp.is_autocast_available, ("cpu", "cuda", "xpu", "hpu", "mtia", "mps", "xla"))
)


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether these are tensors of a CPU or a GPU that no mode, subclass or function transform is to see."""
    if torch._C._len_torch_dispatch_stack() or is_transformed():
        return False
    if torch._C._is_tracing() or (torch._C._is_torch_function_mode_enabled() and not _is_default_device()):
        return False
    given = [x for x in tensors if x is not None]
    return all(type(x) in (Tensor, torch.nn.Parameter) and (x.is_cuda or x.is_cpu) for x in given)


def _is_default_device() -> bool:
    """Whether all function modes are of `torch.set_default_device`, which changes no call of attention."""
    from torch.utils._device import DeviceContext  # torch imports it with the first such mode

    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return all(isinstance(one, DeviceContext) for one in modes)


def is_transformed() -> bool:
    """Whether a function transform or forward-mode AD is under way."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def autocast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast as autocast does for `F.scaled_dot_product_attention`; torch's own op has no such rule."""
    device = query.device.type
    if device not in _AUTOCASTS or not torch.is_autocast_enabled(device):
        return query, key, value
    dtype = torch.get_autocast_dtype(device)
    query, key, value = (x.to(dtype) if _is_cast(x) else x for x in (query, key, value))
    return query, key, value


def _is_cast(x: Tensor) -> bool:
    return x.is_floating_point() and x.dtype != torch.float64  # which autocast leaves as it is
