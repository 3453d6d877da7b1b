"""PyTorch's own kernels, captured before any router covers them, and overrides above the routers.

A router that called an op by its name would call itself. `kernel` returns the C++ kernel that was registered
for an (op, dispatch key) at the first `capture` of the pair. `aten` captures all of them before it registers
the first router.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

import torch

from attnreg.core.torchlib.locks import open_after_fork
from attnreg.errors import RegistrationError


def _make_version_error(what: str = "") -> RegistrationError:
    return RegistrationError(f"{what}attnreg needs torch 2.11 or newer, found {torch.__version__}")


try:
    from torch.nn.attention import _registry
except ImportError as error:
    raise _make_version_error() from error

torch_registry = _registry  # of the implementations that `torch.nn.attention` can activate
log = logging.getLogger("attnreg")

# Whether the routers over these kernels use the compiled call cache; None while no routers are installed.
call_cache_in_use: bool | None = None

_lock = open_after_fork(threading.Lock())
_captured: dict[tuple[str, str], Callable[..., Any] | None] = {}
_warned_of = ""  # the implementation above the routers that the last warning named


# The oldest version that attnreg supports, and the newest that its tests were run with (docs/versions.md).
OLDEST, NEWEST = (2, 11), (2, 15)


def check_version() -> None:
    """Raise RegistrationError if torch is too old; log a warning, once, if it is newer than was tested."""
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    if version < OLDEST:
        raise _make_version_error()
    if version > NEWEST:
        _warn_of_newer()


@functools.cache
def _warn_of_newer() -> None:
    log.warning(
        "torch %s is newer than 2.15, the newest version that attnreg was tested with; `attnreg verify` "
        "compares its backends with float64 here",
        torch.__version__,
    )


def capture(op: str, key: str) -> Callable[..., Any] | None:
    """Return torch's kernel of `aten::op` for a dispatch key, or None where torch has none.

    The first call for a pair captures the kernel. Later calls return the same kernel, also after a router has
    been registered over it. Raises RegistrationError if this torch can't return kernels, or other Python code
    overrides the op.
    """
    with _lock:
        if (op, key) not in _captured:
            _captured[op, key] = _get_kernel(op, key)
        return _captured[op, key]


def kernel(op: str, key: str) -> Callable[..., Any]:
    """Return torch's kernel as `capture` does, but raise RegistrationError if torch has none."""
    captured = capture(op, key)
    if captured is None:
        raise RegistrationError(f"torch {torch.__version__} has no {key} kernel for aten::{op}")
    return captured


def check_not_overridden(op: str, key: str) -> None:
    """Raise RegistrationError if Python code has overridden `aten::op`; called before routers are registered.

    The override would be captured instead of torch's kernel, and would vanish as soon as that code removes
    it.
    """
    for line in torch._C._dispatch_dump(f"aten::{op}").splitlines():
        # What Python registers has no C++ signature.
        if line.startswith(f"{key}: ") and line.endswith(" :: (none) [ boxed ]"):
            where = line.removeprefix(f"{key}: ").partition(" :: ")[0]
            raise RegistrationError(
                f"aten::{op} is overridden for {key} by other Python code, {where}; "
                "remove that, or let attnreg register its routers first"
            )


def _get_kernel(op: str, key: str) -> Callable[..., Any] | None:
    check_not_overridden(op, key)
    get_kernel = getattr(torch.library, "get_kernel", None)
    if get_kernel is None or not hasattr(torch._C._SafeKernelFunction, "call_boxed"):
        raise _make_version_error("torch.library.get_kernel or call_boxed is missing: ")
    try:
        kernel = get_kernel(f"aten::{op}", key)
    except RuntimeError:  # torch has no kernel for this key, as on a CPU build
        return None
    # A fixed key set is enough: these are backend kernels, and no functionality key above them may run twice.
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    return functools.partial(kernel.call_boxed, keys)


def shadowed_by() -> str:
    """Return the implementation of `torch.nn.attention` that overrides ops above the routers, or ''."""
    name = torch_registry.current_flash_attention_impl()
    return "" if name in (None, "attnreg") else str(name)


def shadow_note() -> str:
    """Return a sentence for users about the implementation that `shadowed_by` returns, or ''."""
    name = shadowed_by()
    return name and (
        f"torch.nn.attention has {name!r} active above attnreg's routers: the flash ops "
        "on CUDA go there; restore_flash_attention_impl() gives them back"
    )


def warn_if_shadowed() -> None:
    """Warn once about an implementation that was activated after the routers were installed."""
    global _warned_of
    name = shadowed_by() if call_cache_in_use is not None else ""
    if name != _warned_of:
        _warned_of = name
        if name:
            log.warning("%s", shadow_note())
