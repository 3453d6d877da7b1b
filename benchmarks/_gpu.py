"""Timing and memory on a CUDA GPU."""

from __future__ import annotations

import statistics
import sys
from typing import TYPE_CHECKING

import torch
from _report import per_call

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["gpu_per_call", "host_per_call", "matmul_rate", "need_gpu", "peak_memory"]

# Clock cycles per call that the device is kept waiting, so that the host gets ahead: 0.4 ms or so.
AHEAD = 800_000


def need_gpu() -> None:
    """End the program with one sentence where there is no GPU."""
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA GPU, and torch finds none here")


def gpu_per_call(run: Callable[[], object], calls: int, ahead: bool = False) -> float:
    """Return the seconds on the device of one of `calls` calls, one right after the other.

    Where the host takes longer than the device it is the host's time, unless the host gets `ahead`.
    """
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    if ahead:
        torch.cuda._sleep(AHEAD * calls)
    start.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / calls


def host_per_call(run: Callable[[], object], calls: int) -> float:
    """Return the seconds that the host takes for one of `calls` calls; few enough not to fill the queue."""
    torch.cuda.synchronize()
    taken = per_call(run, calls)
    torch.cuda.synchronize()
    return taken


def matmul_rate(size: int = 8192, rounds: int = 7) -> float:
    """Return the FLOP/s of a product of two square matrices in bfloat16."""
    left, right = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    gpu_per_call(lambda: left @ right, 10)
    seconds = statistics.median(gpu_per_call(lambda: left @ right, 10) for _ in range(rounds))
    return 2 * size**3 / seconds


def peak_memory(run: Callable[[], object]) -> int:
    """Return the bytes that a call takes at its peak, its results included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = run()
    torch.cuda.synchronize()
    del kept
    return torch.cuda.max_memory_allocated() - before
