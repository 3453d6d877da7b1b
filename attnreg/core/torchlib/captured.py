"""PyTorch's own kernels, captured before any router covers them, and overrides above the routers.

A router that called an op by its name would call itself. `kernel` returns the C++ kernel that was registered
for an (op, dispatch key) at the first `capture` of the pair. `aten` captures all of them before it registers
the first router.
"""

from __future__ import annotations

import atexit
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from attnreg.core.torchlib.locks import open_after_fork
from attnreg.errors import RegistrationError, first_ten


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

_lock = open_after_fork(threading.RLock())
_captured: dict[tuple[str, str], Callable[..., Any] | None] = {}
_watched: dict[str, str] = {}  # torch's dump of each op after the routers had been installed
_warned_of: tuple[str, ...] = ()  # what lay above the routers at the last look
LONGEST_WAIT = 5.0  # seconds: a look may have taken long because the process was stopped
_next_look = 0.0  # when a block may look again, in the seconds of `time.monotonic`
PROMPT_LOOKS = 64  # how many plans of new kinds look for overrides, whatever it takes, once there are routers
_prompt_looks = 0

# Torch's own ops for packed calls, above the routers.
VARLEN_OPS = tuple(f"torch_attn::_varlen_attn{suffix}" for suffix in ("", "_out", "_backward"))
# The dispatch keys that an attention call comes to. Those for fakes, tracing and transforms are no overrides.
_KEYS = {
    *("CPU", "CUDA", "Autograd", "AutogradCPU", "AutogradCUDA"),
    *("CompositeImplicitAutograd", "CompositeExplicitAutograd"),
}


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


def watch(ops: Iterable[str]) -> None:
    """Have `overridden` find whatever is registered over these ops from now on; none ends that."""
    global _watched, _next_look, _prompt_looks
    _next_look, _prompt_looks = 0.0, PROMPT_LOOKS
    _watched = {op: torch._C._dispatch_dump(op) for op in (f"aten::{op}" for op in ops)}


@atexit.register
def _watch_nothing_at_exit() -> None:
    """Watch nothing: the end of the process removes the routers, and torch's own kernels are no overrides."""
    watch(())


def overridden() -> dict[str, list[str]]:
    """Return the ops that other code has overridden since the routers were installed, by the code's file.

    Calls of these ops go there, and reach attnreg only where that code passes them on.
    """
    ops_by_file: dict[str, list[str]] = {}
    watched = _watched
    for op in (*watched, *VARLEN_OPS) if watched else ():
        before, now = watched.get(op, ""), torch._C._dispatch_dump(op)
        if now == before:
            continue
        known = _kernels_in(before)
        for key, place in _kernels_in(now).items():
            # Torch declares its op for packed calls in Python, with kernels for all devices.
            is_declaration = op in VARLEN_OPS and "[alias]" in key and "_library/custom_ops.py:" in place
            if known.get(key) != place and not is_declaration:
                name = f"{op} ({key.removesuffix('[alias]')})"
                ops_by_file.setdefault(place.rpartition(":")[0] or place, []).append(name)
    # Another thread may have removed the routers meanwhile: without them torch's own kernels lie there.
    return ops_by_file if watched is _watched else {}


def _kernels_in(dump: str) -> dict[str, str]:
    """Return where the kernels of an op are registered, by the dispatch keys that calls come to."""
    rows = (line.partition(": registered at ") for line in dump.splitlines())
    return {
        key: place.partition(" :: ")[0]
        for key, _, place in rows
        if place and key.removesuffix("[alias]") in _KEYS
    }


def shadowed_by() -> str:
    """Return the implementation of `torch.nn.attention` that overrides ops above the routers, or ''."""
    name = torch_registry.current_flash_attention_impl()
    return "" if name in (None, "attnreg") else str(name)


def shadow_notes() -> tuple[str, ...]:
    """Return a sentence for users about each program or implementation that lies above the routers."""
    name, ops_by_file = shadowed_by(), overridden()
    if name:
        ops = [op for of_file in ops_by_file.values() for op in of_file]
        all_flash = all("_flash_attention" in op for op in ops)
        what = "the flash ops on CUDA" if all_flash else ", ".join(first_ten(ops))
        return (
            f"torch.nn.attention has {name!r} active above attnreg's routers: {what} go there; "
            "restore_flash_attention_impl() gives them back",
        )
    return tuple(
        f"{file} overrides {', '.join(first_ten(ops))} above attnreg's routers: calls go there first, and "
        "attnreg can't choose for them until that is removed"
        for file, ops in ops_by_file.items()
    )


def warn_if_shadowed() -> None:
    """Warn once about what was registered or activated after the routers were installed."""
    global _warned_of
    notes = shadow_notes() if call_cache_in_use is not None else ()
    before, _warned_of = _warned_of, notes
    for note in notes:
        if note not in before:
            log.warning("%s", note)


def warn_if_shadowed_lately() -> None:
    """Warn as `warn_if_shadowed` does, but look no more than a hundredth of the time: blocks come here.

    A look has torch print twenty ops, in 0.1 to 0.3 ms, where all else that a block does takes 5 µs.
    """
    global _next_look
    began = time.monotonic()
    if began < _next_look:
        return
    warn_if_shadowed()
    ended = time.monotonic()
    _next_look = ended + min(99 * (ended - began), LONGEST_WAIT)


def warn_if_shadowed_in_plan(is_of_new_kind: bool) -> None:
    """Warn as `warn_if_shadowed` does: the first plans of new kinds always look, others as seldom as blocks.

    A program makes a plan for each step of lengths or, while it records a growing cache, for each call.
    """
    global _prompt_looks
    if is_of_new_kind and _prompt_looks > 0:
        _prompt_looks -= 1
        warn_if_shadowed()
    else:
        warn_if_shadowed_lately()
