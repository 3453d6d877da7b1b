"""The memory and the rates by which "auto" chooses, unless a program passes them.

All ranks have to choose alike, and each rank knows only its own GPU. So before a group's first choice its
ranks exchange what they know. The least memory counts, and the slowest link and matrix product.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from attnreg.core.torchlib.modes import is_plain
from attnreg.parallel.estimates import Rates

# By group, once its ranks have exchanged them.
_least_memory: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_rates: weakref.WeakKeyDictionary[Any, Rates] = weakref.WeakKeyDictionary()

# The rate of attention as a share of a matrix product's: on an H200 630 of 790 TFLOP/s.
SHARE_OF_PRODUCT = 0.8
PRODUCT, EXCHANGED = 4096, 2**26  # rows and columns; bytes


class Machine(NamedTuple):
    """The most bytes that a call may need on each rank (None: any number), and the ranks' rates."""

    memory: int | None
    rates: Rates


class Exchanges(NamedTuple):
    """Bytes that a rank received per second while all ranks did, and the seconds of the smallest exchange."""

    bytes_per_second: float
    latency: float


def memory_of(device: torch.device) -> int | None:
    """Return the most bytes that a call may need on a device: an eighth of a GPU's memory; None for a CPU."""
    is_gpu = device.type == "cuda"
    return torch.cuda.get_device_properties(device).total_memory // 8 if is_gpu else None


def machine_of(group: Any, device: torch.device) -> Machine:
    """Return the memory and rates of all ranks, once they have exchanged them, else of this rank."""
    memory = memory_of(device)
    if memory is None:
        return Machine(None, Rates())
    return Machine(_least_memory.get(group, memory), _rates.get(group, Rates()))


def learn(group: Any, device: torch.device, measures: bool, tell: Callable[[Any], Sequence[Any]]) -> None:
    """Exchange memory and measured rates among the ranks of a group, by `tell`; all ranks call this at once.

    If any rank is in a dispatch mode or a capture, or short of memory, nothing is measured, and the group
    keeps the default rates.
    """
    memory, measures = memory_of(device), measures and group not in _rates
    if memory is None or dist.get_world_size(group) == 1 or (group in _least_memory and not measures):
        return
    probe = _Probe.made(group, device) if measures else None
    answers = tell((memory, probe is not None))
    _least_memory[group] = min(memory for memory, _ in answers)
    if measures:
        can_measure = probe is not None and all(can for _, can in answers)
        _rates[group] = _slowest(tell(probe.run())) if probe is not None and can_measure else Rates()


def _slowest(measured: Sequence[tuple[Exchanges, float]]) -> Rates:
    """Return the slowest ranks' rates, in powers of two of the defaults: noise then changes no choice."""
    usual = Rates()
    rates_of_slowest = {
        "flops": SHARE_OF_PRODUCT * min(flops for _, flops in measured),
        "link": min(exchanged.bytes_per_second for exchanged, _ in measured),
        "latency": max(exchanged.latency for exchanged, _ in measured),
    }
    steps = {name: round(math.log2(rate / getattr(usual, name))) for name, rate in rates_of_slowest.items()}
    return Rates(**{name: getattr(usual, name) * 2.0**step for name, step in steps.items()})


class _Probe:
    """Tensors to measure with: allocated before the ranks wait for each other."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group, self._device = group, device
        generator = torch.Generator(device)  # leaves the program's random numbers as they are
        empty = torch.empty((PRODUCT, PRODUCT), dtype=torch.bfloat16, device=device)
        self._factor, self._product = empty.normal_(generator=generator), torch.empty_like(empty)
        self._sent = torch.zeros(EXCHANGED, dtype=torch.uint8, device=device)
        self._received = torch.empty_like(self._sent)

    @classmethod
    def made(cls, group: Any, device: torch.device) -> _Probe | None:
        """Return a probe, or None if this rank can't measure now."""
        is_captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if is_captured or not is_plain():
            return None
        try:
            with torch.no_grad():
                return cls(group, device)
        except torch.OutOfMemoryError:
            return None

    def run(self) -> tuple[Exchanges, float]:
        """Return the rates of exchanges, and the operations per second of a matrix product."""
        with torch.no_grad():
            seconds = self._seconds(lambda: torch.mm(self._factor, self._factor, out=self._product), 5)
            return self.exchanges(), 2 * PRODUCT**3 / seconds

    def exchanges(self) -> Exchanges:
        """Measure the exchange that all methods use."""
        ranks = dist.get_world_size(self._group)
        large, small = (self._exchange(size // ranks * ranks) for size in (EXCHANGED, 8 * ranks))
        received = EXCHANGED * (ranks - 1) / ranks
        return Exchanges(received / self._seconds(large, 5), self._seconds(small, 20))

    def _exchange(self, size: int) -> Callable[[], object]:
        sent, received = self._sent[:size], self._received[:size]
        return lambda: dist.all_to_all_single(received, sent, group=self._group)

    def _seconds(self, run: Callable[[], object], calls: int) -> float:
        """Return the seconds a call in the fastest of three rounds of `calls` calls, after a first call."""
        run()
        return min(self._seconds_of_round(run, calls) for _ in range(3)) / calls

    def _seconds_of_round(self, run: Callable[[], object], calls: int) -> float:
        if self._device.type != "cuda":
            started = time.perf_counter()
            for _ in range(calls):
                run()
            return time.perf_counter() - started
        # No wait for other streams: their work may depend on this rank's next steps.
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device):
            begin.record()
            for _ in range(calls):
                run()
            end.record()
            end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def exchanges(group: Any, device: torch.device) -> Exchanges:
    """Measure the exchanges of a group, whose ranks all call this."""
    return _Probe(group, device).exchanges()
