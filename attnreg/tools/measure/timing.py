"""How long calls take: a timer for GPUs, a timer for CPUs, and how measurements take turns.

All times are seconds. A call on a GPU has three times:

- `Timer.device_and_host`: The kernels alone, with the host far ahead of them. A CUDA graph would take as
  long.
- `Timer.back_to_back`: Consecutive calls, as an eager program makes them. If the host is slower than the
  GPU, this is the host's time.
- `Timer.host`: Until the calls have returned, without waiting for the GPU.

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

# All measurements of a run share it: few rounds have few orders, which mustn't be the same in every case.
_order = random.Random(0)

ATTEMPTS = 3
# No GPU's clock is so many times 2 GHz.
SPARE = 1.5
# A call that takes the host longer than the longest is a first call.
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
        """Return the mean seconds of a call on the device and on the host, neither waiting for the other."""
        return Taken(per_call(run, calls), 0.0)

    def device(self, run: Run, calls: int) -> float:
        """Return the mean seconds of a call on the device, with the host ahead."""
        return self.device_and_host(run, calls).device

    def back_to_back(self, run: Run, calls: int) -> float:
        """Return the mean seconds of a call among `calls` consecutive calls."""
        return per_call(run, calls)

    def host(self, run: Run, calls: int) -> float:
        """Return the mean host seconds of a call among `calls`: too few to fill a GPU's queue."""
        return per_call(run, calls)


class CudaTimer(Timer):
    """Events for the GPU, wall time for the host.

    It times the stream that is current when it is made. Calls have to be made on that stream.
    """

    def __init__(self, device: torch.device) -> None:
        # `torch.cuda.synchronize` takes the host 7 us and more, of calls that take 40.
        self._stream = torch.cuda.current_stream(device)
        # By function: those measured in turn may differ tenfold in what they take of the host.
        self._host: WeakKeyDictionary[Run, float] = WeakKeyDictionary()

    def wait(self) -> None:
        """Wait until the stream has finished."""
        self._stream.synchronize()

    def device_and_host(self, run: Run, calls: int) -> Taken:
        """Return the mean seconds of a call on the device and on the host, both from one pass.

        The GPU is kept busy until the host has enqueued every call, so neither waits. The events then measure
        the kernels alone. How long the GPU is kept busy follows from the host time of the last measurement of
        `run`. If the host took longer this time, the measurement is repeated.
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
        """Return the mean seconds of a call among `calls`, between two events on the GPU."""
        self.wait()
        return self._between_events(run, calls).device

    def host(self, run: Run, calls: int) -> float:
        """Return the mean host seconds of a call among `calls`."""
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
    """Return the timer of a device."""
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
    return math.ceil(min(max(seconds / max(once, 1e-9), 1), most))


def shuffled(items: Iterable[T]) -> list[T]:
    """Return the items in a new order, for one round of measurements.

    What ran before counts: on an H200 a kernel took up to 8 % longer in one place of an order and its
    reverse, in which neighbours stay neighbours, than in another.
    """
    order = list(items)
    _order.shuffle(order)
    return order


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
    return statistics.median(taken / other for taken, other in zip(of, to, strict=True))


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of a product of two large square matrices: the ceiling of any kernel.

    The matrices are 8192 wide on a GPU, 1024 elsewhere.
    """
    size, calls = (8192, 10) if device.type == "cuda" else (1024, 2)
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    timer = timer_for(device)
    _warm_up, *seconds = (timer.back_to_back(lambda: left @ right, calls) for _ in range(8))
    return 2 * size**3 / statistics.median(seconds)
