"""How long calls take, on a CPU by the wall, on a GPU by events; the sides of a comparison take turns.

A timer is a function of what to run, how many calls to make and the device; it returns the seconds
of one call.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = [
    "ahead",
    "back_to_back",
    "calls_for",
    "host_per_call",
    "interleaved",
    "matmul_rate",
    "median_ratio",
    "peak_memory",
    "per_call",
]

K = TypeVar("K")
T = TypeVar("T")

# One for all measurements of a run: few rounds come in few orders, which mustn't be the same for all cases.
_order = random.Random(0)

# Clock cycles per call that the GPU is kept waiting, so that the host gets ahead: 0.4 ms or so.
AHEAD = 800_000


def per_call(run: Callable[[], object], calls: int) -> float:
    """Return the seconds by the wall that one of `calls` calls takes."""
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls


def back_to_back(run: Callable[[], object], calls: int, device: torch.device, sleep: int = 0) -> float:
    """Return the seconds of one of `calls` calls, one right after the other.

    Where the host takes longer than a GPU it is the host's time: what an eager program waits for.
    """
    if device.type != "cuda":
        return per_call(run, calls)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)
    if sleep:
        torch.cuda._sleep(sleep)  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / calls


def ahead(run: Callable[[], object], calls: int, device: torch.device) -> float:
    """Return the seconds of one of `calls` calls on the device alone: the host gets ahead of a GPU."""
    return back_to_back(run, calls, device, AHEAD * calls)


def host_per_call(run: Callable[[], object], calls: int, device: torch.device) -> float:
    """Return the seconds that the host takes for one of `calls` calls; few enough not to fill the queue."""
    if device.type != "cuda":
        return per_call(run, calls)
    torch.cuda.synchronize(device)
    taken = per_call(run, calls)
    torch.cuda.synchronize(device)
    return taken


def calls_for(seconds: float, once: float, most: int = 200) -> int:
    """Return how many calls of `once` seconds fill `seconds`, at least one."""
    return min(max(round(seconds / max(once, 1e-9)), 1), most)


def matmul_rate(device: torch.device, dtype: torch.dtype, rounds: int = 7) -> float:
    """Return the FLOP/s of a product of two large square matrices: the ceiling of any kernel.

    The side is 8192 on a GPU, 1024 elsewhere.
    """
    size, calls = (8192, 10) if device.type == "cuda" else (1024, 2)
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))

    def product() -> object:
        return left @ right

    back_to_back(product, calls, device)
    return 2 * size**3 / statistics.median(back_to_back(product, calls, device) for _ in range(rounds))


def peak_memory(run: Callable[[], object]) -> int:
    """Return the bytes on the GPU that a call takes at its peak, its results included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = run()
    torch.cuda.synchronize()
    del kept
    return torch.cuda.max_memory_allocated() - before


def interleaved(measures: Mapping[K, Callable[[], T]], rounds: int) -> dict[K, list[T]]:
    """Take each measure once per round, in an order that changes, so that a machine's moods meet them alike.

    What ran before counts, too: on an H200 a kernel took up to 8 % longer in one place of an order and its
    reverse, in which neighbours stay neighbours, than in another.
    """
    for measure in measures.values():
        measure()  # a warm-up that doesn't count
    taken: dict[K, list[T]] = {name: [] for name in measures}
    names = list(measures)
    for _ in range(rounds):
        _order.shuffle(names)
        for name in names:
            taken[name].append(measures[name]())
    return taken


def median_ratio(of: Sequence[float], to: Sequence[float]) -> float:
    """Return the median of the ratios round by round."""
    return statistics.median(one / other for one, other in zip(of, to, strict=True))
