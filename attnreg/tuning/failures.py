"""What becomes of what a backend raises while it is measured."""

from __future__ import annotations

from contextlib import suppress

import torch

from attnreg.errors import AttnregError
from attnreg.tuning.points import Measured

__all__ = ["DeviceLostError", "TimeIsUpError", "check_alive", "failed", "no_memory"]


class DeviceLostError(AttnregError, RuntimeError):
    """A kernel has left the GPU unusable to this process."""


class TimeIsUpError(AttnregError, RuntimeError):
    """The time was spent before all backends had had their turn."""


def no_memory(error: BaseException) -> bool:
    """Whether what was raised says that there is no memory: a CPU's allocator has no type of its own."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def failed(error: BaseException, device: torch.device) -> Measured:
    """Return the row of a backend that raised.

    Raises:
        DeviceLostError: it has left the GPU unusable.
    """
    check_alive(device, error)
    return Measured(failed=_told(error))


def check_alive(device: torch.device, error: BaseException) -> None:
    """Check that what a backend raised has left the device usable, and free what it can.

    Raises:
        DeviceLostError: it hasn't.
    """
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except Exception as lost:
        raise DeviceLostError(f"the GPU can't be used any more after {_told(error)}") from lost
    with suppress(Exception):
        torch.cuda.empty_cache()


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip().partition("\n")[0]
