"""What "auto" chooses by where the program doesn't say it: the ranks' memory, and how fast they are.

All ranks have to choose alike. So on GPUs they measure once for a group, before its first choice, and each
goes by the slowest and by the least memory of all. It takes some milliseconds. Before that, and on a CPU,
they go by the defaults of `Rates`.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from attnreg.parallel.estimates import Rates
from attnreg.torchlib.modes import is_plain


class Machine(NamedTuple):
    """What a call may take on each rank in bytes, None for any number, and how fast the ranks are."""

    memory: int | None
    rates: Rates


class Exchanges(NamedTuple):
    """What was measured: bytes that a rank received per second while all did, and the least time of one."""

    bytes_per_second: float
    latency: float


_learned: weakref.WeakKeyDictionary[Any, Machine] = weakref.WeakKeyDictionary()

# A forward and backward of an attention kernel do so much of what a matrix product does per second: an H200
# 630 of 790 TFLOP/s.
SHARE_OF_PRODUCT = 0.8
PRODUCT, EXCHANGED = 8192, 2**26  # rows and columns; bytes


def machine_of(group: Any, device: torch.device) -> Machine:
    """Return what is known of a group on this rank: the same on all ranks once they have learned it."""
    memory = memory_of(device)
    return Machine(None, Rates()) if memory is None else _learned.get(group, Machine(memory, Rates()))


def memory_of(device: torch.device) -> int | None:
    """Return how much memory a call may take on a device; None for any."""
    is_gpu = device.type == "cuda"
    return torch.cuda.get_device_properties(device).total_memory // 8 if is_gpu else None


def can_learn(group: Any, device: torch.device) -> bool:
    """Whether ranks, which all call this before the same call, should `learn` now."""
    if memory_of(device) is None or group in _learned or dist.get_world_size(group) == 1 or not is_plain():
        return False
    return not (device.type == "cuda" and torch.cuda.is_current_stream_capturing())


def learn(group: Any, device: torch.device, share: Callable[[Any], Sequence[Any]]) -> None:
    """Measure, which all ranks of a group do at once, and keep the least of all; `share` gathers from all."""
    with torch.no_grad():
        mine = memory_of(device), exchanges(group, device), products(device)
    memories, links, flops = zip(*share(mine), strict=True)
    rates = Rates(
        flops=SHARE_OF_PRODUCT * min(flops),
        link=min(one.bytes_per_second for one in links),
        latency=max(one.latency for one in links),
    )
    _learned[group] = Machine(min(memories), rates)


def exchanges(group: Any, device: torch.device) -> Exchanges:
    """Measure the exchange that all methods use; all ranks of the group call this."""
    ranks, seconds = dist.get_world_size(group), []
    for count, calls in ((8 * ranks, 20), (EXCHANGED // ranks * ranks, 5)):
        sent, received = (torch.zeros(count, dtype=torch.uint8, device=device) for _ in range(2))
        seconds.append(
            _seconds(lambda: dist.all_to_all_single(received, sent, group=group), calls, device)  # noqa: B023
        )
    return Exchanges(EXCHANGED * (ranks - 1) / ranks / seconds[1], seconds[0])


def products(device: torch.device) -> float:
    """Measure the operations per second of a matrix product in bfloat16."""
    generator = torch.Generator(device)  # of its own: the program's random numbers stay what they are
    given = torch.empty((PRODUCT, PRODUCT), dtype=torch.bfloat16, device=device).normal_(generator=generator)
    made = torch.empty_like(given)
    return 2 * PRODUCT**3 / _seconds(lambda: torch.mm(given, given, out=made), 2, device)


def _seconds(run: Callable[[], object], calls: int, device: torch.device) -> float:
    """Return what one of so many calls takes, in the fastest of three rounds after a first call."""
    wait: Callable[[], object] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    run()
    found = []
    for _ in range(3):
        wait()
        started = time.perf_counter()
        for _ in range(calls):
            run()
        wait()
        found.append((time.perf_counter() - started) / calls)
    return min(found)
