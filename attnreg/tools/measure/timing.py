"""How long calls take: the one timer of a GPU, the one of a CPU, and how measurements take turns.

All times are seconds. A GPU has three, and which one is meant matters:

- `Timer.device_and_host`: the kernels alone, the host far ahead of them; what a CUDA graph would take.
- `Timer.back_to_back`: one call right after the other, as an eager program makes them; where the host is
  slower than the GPU this is the host's time.
- `Timer.host`: until the calls have returned, without waiting for the GPU.

On a CPU a call is done when it returns, and all three are the same.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch

Run = Callable[[], object]

K = TypeVar("K")
T = TypeVar("T")

# One for all measurements of a run: few rounds come in few orders, which mustn't be the same for all cases.
_order = random.Random(0)

ATTEMPTS = 3
# No GPU's clock is so many times 2 GHz.
SPARE = 1.5
# What takes the host longer than the longest is a first call.
USUAL_HOST_S, SHORTEST_HOST_S, LONGEST_HOST_S = 200e-6, 20e-6, 0.1


class Taken(NamedTuple):
    """Seconds of one call: on the device, and until it returned. On a CPU the second is 0."""

    device: float
    host: float


class Timer:
    """The timer of a CPU, where a call is done when it returns; `run` is one call."""

    def now(self) -> float:
        """Return seconds since some moment."""
        return time.perf_counter()

    def wait(self) -> None:
        """Wait until the device has finished; here it is the host."""

    def device_and_host(self, run: Run, calls: int) -> Taken:
        """Return what one of so many calls takes of the device and of the host, neither waiting."""
        return Taken(per_call(run, calls), 0.0)

    def back_to_back(self, run: Run, calls: int) -> float:
        """Return the seconds of one of so many calls, one right after the other."""
        return per_call(run, calls)

    def host(self, run: Run, calls: int) -> float:
        """Return the seconds that the host takes for one of so many calls; few enough to fill no queue."""
        return per_call(run, calls)


class CudaTimer(Timer):
    """Events for the GPU, wall time for the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # By function: those measured in turn may differ tenfold in what they take of the host.
        self._host: WeakKeyDictionary[Run, float] = WeakKeyDictionary()

    def wait(self) -> None:
        """Wait for the GPU."""
        torch.cuda.synchronize(self._device)

    def device_and_host(self, run: Run, calls: int) -> Taken:
        """Return what one of so many calls takes, both in one pass.

        The GPU is kept busy until the host has enqueued every call: so neither waits for the other, and the
        time between the events is that of the kernels alone. For how long depends on what the same function
        took of the host the last time; where the host took longer than that, it is measured again.
        """
        for _ in range(ATTEMPTS):
            busy = (SPARE + 1) * self._host.get(run, USUAL_HOST_S) * calls + 100e-6
            self.wait()
            # At 2 GHz two thousand cycles are a microsecond; a faster clock takes it from what is to spare.
            torch.cuda._sleep(int(2e9 * busy))  # type: ignore[no-untyped-call]
            taken = self._between_events(run, calls)
            self._host[run] = min(max(taken.host, SHORTEST_HOST_S), LONGEST_HOST_S)
            if SPARE * taken.host * calls <= busy:
                break
        return taken

    def back_to_back(self, run: Run, calls: int) -> float:
        """Return the seconds of one of so many calls, between two events on the GPU."""
        self.wait()
        return self._between_events(run, calls).device

    def host(self, run: Run, calls: int) -> float:
        """Return the seconds that the host takes for one of so many calls."""
        self.wait()
        taken = per_call(run, calls)
        self.wait()
        return taken

    def _between_events(self, run: Run, calls: int) -> Taken:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        before.record()
        host = per_call(run, calls)
        after.record()
        self.wait()
        return Taken(float(before.elapsed_time(after)) / 1e3 / calls, host)


def timer_for(device: torch.device) -> Timer:
    """Return what takes times on a device."""
    return CudaTimer(device) if device.type == "cuda" else Timer()


def per_call(run: Run, calls: int, clock: Callable[[], float] | None = None) -> float:
    """Return the seconds that one of `calls` calls takes, of wall time unless it is another clock."""
    now = clock or time.perf_counter
    started = now()
    for _ in range(calls):
        run()
    return (now() - started) / calls


def calls_for(seconds: float, once: float, most: int = 200) -> int:
    """Return how many calls of `once` seconds fill `seconds`, at least one."""
    return min(max(math.ceil(seconds / max(once, 1e-9)), 1), most)


def shuffled(items: Iterable[T]) -> list[T]:
    """Return the items in a new order, for one round of measurements.

    What ran before counts: on an H200 a kernel took up to 8 % longer in one place of an order and its
    reverse, in which neighbours stay neighbours, than in another.
    """
    found = list(items)
    _order.shuffle(found)
    return found


def interleaved(measures: Mapping[K, Callable[[], T]], rounds: int) -> dict[K, list[T]]:
    """Take each measurement once per round, so that a change of the machine's speed affects all alike."""
    for measure in measures.values():
        measure()  # a warm-up that doesn't count
    taken: dict[K, list[T]] = {name: [] for name in measures}
    for _ in range(rounds):
        for name in shuffled(measures):
            taken[name].append(measures[name]())
    return taken


def median_ratio(of: Sequence[float], to: Sequence[float]) -> float:
    """Return the median of the ratios round by round."""
    return statistics.median(one / other for one, other in zip(of, to, strict=True))


def matmul_rate(device: torch.device, dtype: torch.dtype, rounds: int = 7) -> float:
    """Return the FLOP/s of a product of two large square matrices: the ceiling of any kernel.

    The matrices are 8192 wide on a GPU, 1024 elsewhere.
    """
    size, calls = (8192, 10) if device.type == "cuda" else (1024, 2)
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    timer = timer_for(device)
    _warm_up, *seconds = (timer.back_to_back(lambda: left @ right, calls) for _ in range(rounds + 1))
    return 2 * size**3 / statistics.median(seconds)
