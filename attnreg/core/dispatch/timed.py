"""`ATTNREG_REPORT`: what `attnreg report` shows of each kind of call, next to what `stats` counts.

Each plan times its calls and knows who decided. Such plans aren't handed to the call cache, so that every
call passes here. On a CPU each call is timed. On a GPU some are, between two events, as in the turns of
`policy = "adaptive"`. Without the variable nothing of this exists.
"""

from __future__ import annotations

import contextlib
import dataclasses
import platform
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from attnreg.core import registry
from attnreg.core.contract.spec import AttentionSpec, Device, Direction
from attnreg.core.times.environments import environment
from attnreg.core.times.traces import device_to, spec_to
from attnreg.core.times.turns import LONGEST_S, SHORTEST_S, SPARE, between_events
from attnreg.core.torchlib.locks import open_after_fork

T = TypeVar("T")

# Calls of plans past this many have no row.
MOST_ROWS = 2000

# On a GPU so many calls are timed, and then each call whose number is a power of two. The host keeps the
# device busy before a timed call, for some tenths of a millisecond.
TIMED_AT_FIRST = 16

is_on = False
_began = 0.0
_lock = open_after_fork(threading.RLock())
_plans: dict[tuple[AttentionSpec, Direction, str, str], TimedPlan] = {}
_masks: dict[str, list[float]] = {}


class TimedPlan:
    """The calls of a plan: how many, and the times of some; a `Turn` that lasts.

    Attributes:
        backend: the name of the backend that runs them.
        source: who decided.
        spec: of the first call.
        direction: which.
        decided_us: how long it took to decide, and to load the kernel.
        first_us: how long the host took for the first call, which may compile.
        times: the number of other calls that were timed, the sum of their times, the shortest, the longest.
    """

    def __init__(self, spec: AttentionSpec, direction: Direction, backend: str, source: str) -> None:
        self.spec, self.direction, self.backend, self.source = spec, direction, backend, source
        self.forget()

    def forget(self) -> None:
        """Forget all calls."""
        self.calls = 0
        self.decided_us = self.first_us = 0.0
        self.times = [0.0, 0.0, float("inf"), 0.0]
        self._pending: list[tuple[Any, Any]] = []
        self._busy_s = LONGEST_S

    def timed(self, run: Callable[[], T], tensor: Any) -> T:
        """Call `run`, which launches the kernel; time it if it is its turn. Return its result.

        `tensor` is any of the call's tensors, of any shape and dtype: its device counts.
        """
        with _lock:
            number = self.calls = self.calls + 1
        is_timed = number <= TIMED_AT_FIRST or number.bit_count() == 1
        try:
            if number > 1 and tensor.is_cuda and is_timed:
                return self._on_gpu(run, tensor.device)
            before = time.perf_counter()
            result = run()
            taken_us = (time.perf_counter() - before) * 1e6
        except BaseException:
            with _lock:
                self.calls -= 1
            raise
        if number == 1:
            self.first_us = taken_us
        elif not tensor.is_cuda:
            self._add(taken_us)
        return result

    def give_up(self, reason: str) -> None:
        """Do nothing: the turn is no request."""

    def _on_gpu(self, run: Callable[[], T], device: Any) -> T:
        result, events, host_s = between_events(run, device, self._busy_s)
        with _lock:
            # A device that has waited for the host took less than what lies between the events.
            if host_s <= self._busy_s:
                self._pending.append(events)
            self._busy_s = SPARE * min(max(host_s, SHORTEST_S), LONGEST_S)
            self._collect(waits=False)
        return result

    def _collect(self, waits: bool) -> None:
        pending, self._pending = self._pending, []
        for before, after in pending:
            with contextlib.suppress(RuntimeError):  # an error of some kernel, which the program sees itself
                if waits:
                    after.synchronize()
                if after.query():
                    self._add(before.elapsed_time(after) * 1e3)
                else:
                    self._pending.append((before, after))

    def _add(self, taken_us: float) -> None:
        with _lock:
            count, total, shortest, longest = self.times
            self.times = [count + 1, total + taken_us, min(shortest, taken_us), max(longest, taken_us)]

    def to_dict(self) -> dict[str, Any]:
        """Return the same as plain data."""
        self._collect(waits=True)
        count, total, shortest, longest = self.times
        return {
            "device": device_to(self.spec.device), "spec": spec_to(self.spec), "direction": self.direction,
            "backend": self.backend, "source": self.source, "calls": self.calls,
            "decided_us": self.decided_us, "first_us": self.first_us, "timed": int(count),
            "timed_us": total, "shortest_us": shortest if count else 0.0, "longest_us": longest,
        }  # fmt: skip


def follow(wanted: bool) -> None:
    """Time calls of plans that are made from now on, or don't."""
    global is_on, _began
    is_on, _began = wanted, _began or time.monotonic()


def plan_of(
    spec: AttentionSpec, direction: Direction, backend: str, source: str, decided_s: float
) -> TimedPlan | None:
    """Return what times the calls of a new plan, which took `decided_s` seconds to make.

    None without `ATTNREG_REPORT`, and in a CUDA graph, whose replays nobody sees.
    """
    if not is_on or spec.capturing:
        return None
    spec = spec.but(device=dataclasses.replace(spec.device, index=None))
    with _lock:
        place = spec, direction, backend, source
        if place not in _plans and len(_plans) >= MOST_ROWS:
            return None
        plan = _plans.setdefault(place, TimedPlan(*place))
        plan.decided_us += decided_s * 1e6
        return plan


def count_mask(structure: str, shares: tuple[float, float] | None) -> None:
    """Count a call with a boolean mask: what the mask is, and the shares of queries and keys that count.

    The shares are None for a mask that isn't recognised.
    """
    with _lock:
        row = _masks.setdefault(structure, [0, 0.0, 0.0, 0])
        for place, more in enumerate((1, *(shares or (0.0, 0.0)), shares is not None)):
            row[place] += more


def forget() -> None:
    """Forget what was timed, because it was timed in the process that this process was forked from.

    The plans stay: this process has inherited kernels that count in them.
    """
    global _began
    _began = time.monotonic()
    for plan in _plans.values():
        plan.forget()
    _masks.clear()


def to_dict() -> dict[str, Any]:
    """Return what was timed as plain data, with machine and versions."""
    with _lock:
        plans = [plan.to_dict() for plan in _plans.values() if plan.calls]
        masks = [
            {
                "seen": structure,
                "count": n,
                "queries": known and queries / known,
                "keys": known and keys / known,
            }
            for structure, (n, queries, keys, known) in _masks.items()
        ]
        devices = dict.fromkeys(plan.spec.device for plan in _plans.values()) or {Device("cpu"): None}
    return {
        "seconds": time.monotonic() - _began,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "environments": [dataclasses.asdict(environment(device, registry.entries())) for device in devices],
        "plans": plans,
        "masks": masks,
    }
