"""What a device says of tensors, read by the host without waiting for it.

A GPU's answer is copied to pinned memory that torch never gets back. Its host allocator guards what it gets
back by an event in the stream of each copy. Where that stream is captured by then, as in a CUDA graph whose
warm-up asked, the event is one of the capture's, and whoever next pins memory or begins a capture gets
`CUDA error: invalid argument` from it (torch 2.11 on an H200).
"""

from __future__ import annotations

import ctypes
from collections import deque
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["PENDING", "AsyncReadback"]

# What the host reads before the device has answered; no answer has it among its numbers.
PENDING = 2

# How many numbers an answer has, and for how many answers memory is pinned at a time.
NUMBERS, MANY = 2, 256

# Places that nobody reads any more, the earliest first. The copy to one may still be under way.
_left: deque[Tensor] = deque()


class AsyncReadback:
    """Two small numbers on their way from a device."""

    _pinned: Tensor | None = None

    def __init__(self, said: Tensor) -> None:
        """Ask for a tensor of one or two numbers, each 0, 1 or from 3 to 255; one alone counts twice."""
        if said.is_cpu:
            self._numbers = said.expand(NUMBERS)
            return
        place = _place()
        try:
            place.copy_(said, non_blocking=True)
        except BaseException:
            _left.append(place.zero_())  # nothing is on its way there
            raise
        self._pinned = self._numbers = place

    # A default, as the module's own names may be gone where the interpreter ends.
    def __del__(self, left: deque[Tensor] = _left) -> None:
        """Leave the place to another answer."""
        if self._pinned is not None:
            left.append(self._pinned)

    def read(self) -> list[int] | None:
        """Return the numbers, or None as long as the device hasn't said them."""
        return _read(self._numbers)


def _read(place: Tensor) -> list[int] | None:
    numbers = [int(number) for number in place.tolist()]
    return None if PENDING in numbers else numbers


def _place() -> Tensor:
    """Return pinned memory that no copy is on its way to."""
    for _ in range(len(_left)):
        try:
            place = _left.popleft()
        except IndexError:
            break  # another thread took the last one
        if _read(place) is not None:
            return place.fill_(PENDING)
        _left.append(place)
    with torch.inference_mode(False):  # which the places outlast
        place, *others = _pinned().unbind()
        _left.extend(others)
        return place.fill_(PENDING)


def _pinned() -> Tensor:
    """Pin memory for as long as the process lives."""
    zeros = torch.zeros(MANY, NUMBERS, dtype=torch.uint8, device="cpu", pin_memory=True)
    # Not even where the interpreter ends, or a forked child, does torch get it back.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(zeros))
    return zeros
