"""Reading small results of a device on the host without waiting for the device.

A result on a GPU is copied to pinned memory, or a kernel writes it there. That memory is never freed: when
torch's host allocator frees pinned memory, it records an event in the stream of each copy. If a CUDA graph
captures that stream by then, as after a warm-up with a read-back, the event belongs to the capture. The next
call that pins memory or begins a capture then fails with `CUDA error: invalid argument` (torch 2.11 on an
H200).
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

# The number that the host reads while the copy is under way; no result has it among its numbers.
PENDING = 2

# The numbers of a result, and the results for which memory is pinned at a time.
NUMBERS, MANY = 2, 256

# Pinned memory that no read-back uses any more, the earliest first. The copy to one may still be under way.
_free: deque[Tensor] = deque()


# The argument of an `AsyncReadback`: a tensor on a device, or a function that returns such a tensor and makes
# the device write it to the host as well.
Result: TypeAlias = Tensor | Callable[[Tensor], Tensor]


class AsyncReadback:
    """Two small numbers that are being copied from a device to the host.

    `result` is the tensor on the device: (1,) or (2,), or a scalar.
    """

    _pinned: Tensor | None = None

    def __init__(self, result: Result) -> None:
        """Begin to copy a tensor of one or two numbers, each 0, 1 or 3 to 255.

        The tensor has shape (), (1,) or (2,) and any integer or bool dtype. A single number is read twice.
        In place of a tensor, a function may be passed. Its argument is pinned memory, (2,) in uint8. It
        launches a kernel that writes two such numbers there, and returns them as a tensor on the device.
        """
        if isinstance(result, Tensor) and result.is_cpu:
            self.result, self._numbers = result, result.expand(NUMBERS)
            return
        place = _free_place()
        try:
            if isinstance(result, Tensor):
                self.result = result
                place.copy_(result, non_blocking=True)
            else:
                self.result = result(place)
        except BaseException:
            _free.append(place.zero_())  # no copy to it is under way
            raise
        self._pinned = self._numbers = place

    # `free` is a default argument, as the module's names may be gone when the interpreter ends.
    def __del__(self, free: deque[Tensor] = _free) -> None:
        """Release the pinned memory for another read-back."""
        if self._pinned is not None:
            free.append(self._pinned)

    def read(self) -> list[int] | None:
        """Return the numbers, or None as long as the copy is under way."""
        return _read(self._numbers)


def _read(place: Tensor) -> list[int] | None:
    numbers = [int(number) for number in place.tolist()]
    return None if PENDING in numbers else numbers


def _free_place() -> Tensor:
    """Return pinned memory, (2,) in uint8, to which no copy is under way."""
    for _ in range(len(_free)):
        try:
            place = _free.popleft()
        except IndexError:
            break  # another thread took the last one
        if _read(place) is not None:
            return place.fill_(PENDING)
        _free.append(place)
    with torch.inference_mode(False):  # the places are used after it has ended
        place, *others = pinned(MANY).unbind()
        _free.extend(others)
        return place.fill_(PENDING)


def pinned(count: int) -> Tensor:
    """Return pinned memory, (count, 2) in uint8, which stays for as long as the process lives."""
    zeros = torch.zeros(count, NUMBERS, dtype=torch.uint8, device="cpu", pin_memory=True)
    # The reference is never dropped, so torch frees the memory neither at exit nor in a forked child.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(zeros))
    return zeros
