"""How long a call takes: by the wall on a CPU, by events and by the wall on a GPU."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Cuda", "Taken", "Timer", "Wall", "repeats", "timer_for"]

# Long enough for the clock and short enough for many rounds; and fewer launches than a queue holds.
ROUND_US = 2000.0
MOST_REPEATS = 50
ATTEMPTS = 3
# No GPU's clock is so many times 2 GHz.
SPARE = 1.5
# What takes the host longer than the longest is a first call.
USUAL_HOST_US, LONGEST_HOST_US = 200.0, 1e5


class Taken(NamedTuple):
    """Microseconds of one call: on the device, and until it returned; a CPU has the first only."""

    gpu_us: float
    host_us: float


class Timer(Protocol):
    """What a session measures with."""

    def now(self) -> float:
        """Return seconds since some moment."""

    def wait(self) -> None:
        """Wait until the device has done what it was given."""

    def each(self, run: Callable[[int], object], calls: int) -> Taken:
        """Return what one of so many calls takes; each gets its number."""


class Wall:
    """The clock on the wall: on a CPU a call is done when it returns."""

    def now(self) -> float:
        """Return seconds since some moment."""
        return time.perf_counter()

    def wait(self) -> None:
        """Do nothing: nothing is under way."""

    def each(self, run: Callable[[int], object], calls: int) -> Taken:
        """Return what one of so many calls takes."""
        started = self.now()
        for number in range(calls):
            run(number)
        return Taken((self.now() - started) / calls * 1e6, 0.0)


class Cuda(Wall):
    """Events for the GPU, the wall for the host, both in one pass.

    The GPU is kept busy until the host has enqueued every call: so neither waits for the other, and
    the time between the events is that of the kernels alone. For how long that is, the last time of the
    same function says; where the host took longer than was foreseen, it is measured again.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # By what was run: backends take turns, and one takes the host a tenth of what another does.
        self._host_us: WeakKeyDictionary[Callable[[int], object], float] = WeakKeyDictionary()

    def wait(self) -> None:
        """Wait for the GPU."""
        torch.cuda.synchronize(self._device)

    def each(self, run: Callable[[int], object], calls: int) -> Taken:
        """Return what one of so many calls takes."""
        for _ in range(ATTEMPTS - 1):
            taken, busy_us = self._behind(run, calls)
            if SPARE * taken.host_us * calls <= busy_us:
                return taken
        return self._behind(run, calls)[0]

    def _behind(self, run: Callable[[int], object], calls: int) -> tuple[Taken, float]:
        """Return what one of so many calls takes, and for how long the GPU was kept busy before them."""
        busy_us = (SPARE + 1) * self._host_us.get(run, USUAL_HOST_US) * calls + 100
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self.wait()
        # At 2 GHz two thousand cycles are a microsecond; a faster clock takes it from what is to spare.
        torch.cuda._sleep(int(2000 * busy_us))  # type: ignore[no-untyped-call]
        before.record()
        started = self.now()
        for number in range(calls):
            run(number)
        host = (self.now() - started) / calls * 1e6
        after.record()
        self.wait()
        self._host_us[run] = min(max(host, 20.0), LONGEST_HOST_US)
        return Taken(before.elapsed_time(after) / calls * 1e3, host), busy_us


def timer_for(device: torch.device) -> Timer:
    """Return what measures on a device."""
    return Cuda(device) if device.type == "cuda" else Wall()


def repeats(taken: Taken) -> int:
    """Return how many calls make a round that is long enough to tell its time."""
    longer = max(taken.gpu_us, taken.host_us, 1.0)
    return min(max(math.ceil(ROUND_US / longer), 1), MOST_REPEATS)
