"""Reads small results of a device on the host without waiting for the device.

A result on a GPU is copied to pinned memory, or a kernel writes it there. That memory is never returned to
torch's host allocator, which guards returned memory by an event in the stream of each copy. If the stream is
being captured by then, as in a CUDA graph whose warm-up read something back, the event belongs to the
capture. The next call that pins memory or begins a capture then fails with `CUDA error: invalid argument`
(torch 2.11 on an H200).
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

# The value of pinned memory until the copy has arrived; no result contains it.
PENDING = 2

# Numbers of a result, and how many results' memory is pinned at a time.
NUMBERS, MANY = 2, 256

# Pinned memory that no read-back uses any more, the oldest first. A copy to it may still be in progress.
_free: deque[Tensor] = deque()


# A tensor on a device, or a function that has a kernel write to the given pinned memory.
Result: TypeAlias = Tensor | Callable[[Tensor], object]


class AsyncReadback:
    """A copy of two small numbers from a device to the host, in progress or complete.

    It keeps no tensor of the device, because the call may be the warm-up of a CUDA graph. PyTorch's graph
    trees raise an error if anything but outputs stays in the graph's memory then.
    """

    _pinned: Tensor | None = None

    def __init__(self, result: Result) -> None:
        """Begin to copy the numbers of a result; waits for nothing.

        Args:
            result: a tensor (), (1,) or (2,) of numbers 0, 1 or 3 to 255, any dtype; a single number is read
                twice. Or a function of pinned memory, (2,) uint8: it launches a kernel that writes two such
                numbers there.
        """
        if isinstance(result, Tensor) and result.is_cpu:
            self._numbers = result.expand(NUMBERS)
            return
        place = _reserve_place()
        try:
            if isinstance(result, Tensor):
                place.copy_(result, non_blocking=True)
            else:
                result(place)
        except BaseException:
            _free.append(place.zero_())  # no copy to it is in progress
            raise
        self._pinned = self._numbers = place

    # `free` is a default because the module's names may be gone when the interpreter ends.
    def __del__(self, free: deque[Tensor] = _free) -> None:
        """Release the pinned memory to another read-back."""
        if self._pinned is not None:
            free.append(self._pinned)

    def read(self) -> list[int] | None:
        """Return the two numbers, or None while the copy is in progress."""
        return _read_numbers(self._numbers)


def _read_numbers(place: Tensor) -> list[int] | None:
    numbers = [int(number) for number in place.tolist()]
    return None if PENDING in numbers else numbers


def _reserve_place() -> Tensor:
    """Return pinned memory, (2,) uint8, to which no copy is in progress."""
    for _ in range(len(_free)):
        try:
            place = _free.popleft()
        except IndexError:
            break  # another thread was faster
        if _read_numbers(place) is not None:
            return place.fill_(PENDING)
        _free.append(place)
    with torch.inference_mode(False):  # the memory is used after inference mode has ended
        place, *more = pinned(MANY).unbind()
        _free.extend(more)
        return place.fill_(PENDING)


def pinned(count: int) -> Tensor:
    """Return pinned zeros for `count` results, (count, 2) uint8, which are never freed."""
    zeros = torch.zeros(count, NUMBERS, dtype=torch.uint8, device="cpu", pin_memory=True)
    # A reference that nobody drops: not when the interpreter ends, nor in a forked child.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(zeros))
    return zeros
