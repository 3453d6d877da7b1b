"""Reading small results of a device on the host without waiting for the device.

A result on a GPU is copied to pinned memory, or a kernel writes it there. Torch never gets that memory back:
its host allocator guards what it gets back by an event in the stream of each copy. Where that stream is
captured by then, as in a CUDA graph whose warm-up read something back, the event is one of the capture's, and
the next call that pins memory or begins a capture gets `CUDA error: invalid argument` from it (torch 2.11 on
an H200).
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

# What the host reads while the copy is under way; no result has it among its numbers.
PENDING = 2

# How many numbers a result has, and for how many results memory is pinned at a time.
NUMBERS, MANY = 2, 256

# Pinned memory that no read-back uses any more, the earliest first. The copy to one may still be under way.
_free: deque[Tensor] = deque()


# A tensor on a device, or what writes one to the host as well: the argument of an `AsyncReadback`.
Result: TypeAlias = Tensor | Callable[[Tensor], Tensor]


class AsyncReadback:
    """Two small numbers that are being copied from a device to the host.

    `result` is the tensor on the device.
    """

    _pinned: Tensor | None = None

    def __init__(self, result: Result) -> None:
        """Begin to copy a tensor of one or two numbers, each 0, 1 or 3 to 255; one alone is read twice.

        A function is called in place of that. It has a kernel write two such numbers, in uint8, to the pinned
        memory that it is given, and returns them as a tensor on the device.
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

    # A default, as the module's own names may be gone where the interpreter ends.
    def __del__(self, free: deque[Tensor] = _free) -> None:
        """Give the pinned memory back for another read-back."""
        if self._pinned is not None:
            free.append(self._pinned)

    def read(self) -> list[int] | None:
        """Return the numbers, or None as long as the copy is under way."""
        return _read(self._numbers)


def _read(place: Tensor) -> list[int] | None:
    numbers = [int(number) for number in place.tolist()]
    return None if PENDING in numbers else numbers


def _free_place() -> Tensor:
    """Return pinned memory that no copy is under way to."""
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
    """Return pinned memory for so many results, which stays for as long as the process lives."""
    zeros = torch.zeros(count, NUMBERS, dtype=torch.uint8, device="cpu", pin_memory=True)
    # Not even where the interpreter ends, or a forked child, does torch get it back.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(zeros))
    return zeros
