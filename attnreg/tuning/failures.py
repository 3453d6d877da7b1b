"""Exceptions that backends raise while they are measured: which are a result, and which end the session."""

from __future__ import annotations

from contextlib import suppress

import torch

from attnreg.errors import AttnregError
from attnreg.tuning.points import Measured

__all__ = ["DeviceLostError", "TimeIsUpError", "check_alive", "failed", "no_memory"]


class DeviceLostError(AttnregError, RuntimeError):
    """A kernel has left the GPU unusable to this process."""


class TimeIsUpError(AttnregError, RuntimeError):
    """The time was up before every backend had been measured."""


def no_memory(error: BaseException) -> bool:
    """Whether an exception means that memory ran out; the CPU allocator raises a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def failed(error: BaseException, device: torch.device) -> Measured:
    """Return the row of a backend that raised.

    Raises:
        DeviceLostError: the GPU can't be used any more.
    """
    check_alive(device, error)
    return Measured(failed=_summary(error))


def check_alive(device: torch.device, error: BaseException) -> None:
    """Check that the device is still usable after a backend has raised, and free its cached memory.

    Raises:
        DeviceLostError: it isn't.
    """
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except Exception as lost:
        raise DeviceLostError(f"the GPU can't be used any more after {_summary(error)}") from lost
    with suppress(Exception):
        torch.cuda.empty_cache()


def _summary(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip().partition("\n")[0]
