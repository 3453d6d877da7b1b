"""The turns that backends take at calls of a kind: whose turn is next, the times, when turns are over.

Unlike `attnreg.tools.measure`, nothing here waits for the device: a turn records two events around the
kernel, and a later call reads them. The device is kept busy while the host launches, so that the time between
the events is the kernel's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple, TypeVar

from attnreg.core.contract.spec import AttentionSpec
from attnreg.core.times.index import MOST_FLOOR_US
from attnreg.core.times.kinds import Kind, Size, coordinates, size_of, work
from attnreg.core.times.points import Measured, Point
from attnreg.core.torchlib.locks import open_after_fork

T = TypeVar("T")

# The most turns of a kind of call, for all backends and for each backend. A backend's first turn may compile,
# so it isn't timed.
MOST_TURNS, MOST_EACH = 20, 6
# The calls of a kind after which turns are over, even if some backends lack turns.
MOST_CALLS = 3 * MOST_TURNS
# A backend gets no more turns if its best time is above so many times another backend's worst time.
BEHIND = 1.5
# The device is kept busy for `SPARE` times the host time of the backend's last turn, which is clamped to
# `SHORTEST_S` and `LONGEST_S`.
SPARE, SHORTEST_S, LONGEST_S = 2.5, 50e-6, 1e-3

# A lock, because backwards run on autograd's threads.
lock = open_after_fork(threading.RLock())

Cell = tuple[Kind, tuple[int, ...]]


def cell_of(kind: Kind, size: Size) -> Cell:
    """Return the key of calls that share turns: the kind, and sizes rounded to powers of two."""
    window = (max(bound, 0).bit_length() for bound in size.window)
    return kind, (*map(round, coordinates(kind, size)), *window)


class Seen(NamedTuple):
    """The times of a turn, in microseconds, scaled to the size of the first call; `host_us` is 0 on a CPU."""

    gpu_us: float
    host_us: float


@dataclass(slots=True)
class Turns:
    """The turns of a kind of call.

    Attributes:
        kind, size: of the first call.
        name: the name that the ranks of a job share.
        role: "measures" or "follows" in a job of several ranks, else empty.
        since: when these turns began, in seconds of the monotonic clock; a rank that follows waits from then
            on.
        looked: when a rank that follows last checked for the result.
        backends: the backends that take turns, with the times of each.
        counts: the number of turns of each backend.
        out: for backends that get no more turns, the reason.
        failed: the backends among `out` that failed or refused.
        lacks_builders: whether backends got no further turns because they build something for each shape.
        calls: the number of calls that could have been a turn.
        pending: turns that the device hasn't finished: backend, both events, host time, factor.
        point: the result; None before the end.
        closed: whether nothing more is measured.
    """

    kind: Kind
    size: Size
    name: str
    role: str = ""
    since: float = 0.0
    looked: float = 0.0
    backends: dict[str, list[Seen]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    out: dict[str, str] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    lacks_builders: bool = False
    calls: int = 0
    pending: list[tuple[str, Any, Any, float, float]] = field(default_factory=list)
    point: Point | None = None
    closed: bool = False

    @property
    def each(self) -> int:
        """The number of turns of each backend."""
        return min(MOST_EACH, MOST_TURNS // max(len(self.backends), 1))

    def next(self, able: Collection[str]) -> str:
        """Return whose turn a call is, among the backends that can run it; empty if nobody's."""
        self.calls += 1
        for name in able:
            self.backends.setdefault(name, [])
            self.counts.setdefault(name, 0)
        waiting = [name for name in self._waiting() if name in able]
        if not waiting:
            return ""
        name = min(waiting, key=self.counts.__getitem__)
        self.counts[name] += 1
        return name

    def _waiting(self) -> list[str]:
        if sum(self.counts.values()) >= MOST_TURNS:
            return []
        return [name for name, count in self.counts.items() if name not in self.out and count < self.each]

    def collect(self) -> None:
        """Read the times of turns that the device has finished."""
        pending, self.pending = self.pending, []
        for name, before, after, host, factor in pending:
            try:
                if not after.query():
                    self.pending.append((name, before, after, host, factor))
                    continue
                taken = before.elapsed_time(after) * 1e3
            except RuntimeError as error:  # not raised: the call that reads the events may be any other call
                self.leave(name, str(error))
                continue
            self.add(name, Seen(_scaled(taken, factor), host * 1e6))

    def add(self, name: str, times: Seen) -> None:
        """Add the times of a turn; exclude backends that are far behind."""
        if name in self.out:
            return
        self.backends[name].append(times)
        remaining = {
            other: taken for other, taken in self.backends.items() if taken and other not in self.out
        }
        worst = min(max(turn.gpu_us for turn in taken) for taken in remaining.values())
        for other, taken in remaining.items():
            if len(taken) > 1 and min(turn.gpu_us for turn in taken) > BEHIND * worst:
                self.out[other] = "far behind"

    def leave_out(self, names: Collection[str]) -> None:
        """Give backends no further turns: they build something for each shape, and shapes don't repeat."""
        for name in names:
            if name not in self.out and self.counts.get(name, 0) < self.each:
                self.out[name], self.lacks_builders = "it builds something for each new shape", True

    def leave(self, name: str, reason: str) -> None:
        """Exclude a backend that refuses or fails, and forget its times."""
        self.out[name] = reason or "it has failed"
        self.failed.add(name)
        self.backends.get(name, []).clear()

    def result(self) -> Point | None:
        """Return the median times; None before all turns are over.

        Turns are over after `MOST_CALLS`, too, because a backend may be able to run only a few calls of the
        kind.
        """
        if not self.backends or self.pending or (self._waiting() and self.calls < MOST_CALLS):
            return None
        results = {name: Measured(failed=self.out[name]) for name in self.failed}
        for name, turns in self.backends.items():
            if turns:
                gpu, host = (median(times) for times in zip(*turns, strict=True))
                results[name] = Measured(gpu_us=max(gpu, 1e-3), host_us=host)
        return Point(self.kind, self.size, results)


class TimedTurn:
    """A call that a backend runs in its turn; without a backend the turn is nobody's."""

    def __init__(self, turns: Turns, backend: str, spec: AttentionSpec) -> None:
        self._turns, self.backend, number = turns, backend, turns.counts.get(backend, 0)
        self._factor = work(turns.kind, turns.size) / work(turns.kind, size_of(spec))
        self._is_timed = number > 1
        earlier = turns.backends.get(backend)
        self._busy_s = SPARE * min(
            max(earlier[-1].host_us * 1e-6 if earlier else LONGEST_S, SHORTEST_S), LONGEST_S
        )
        self.source = f'policy = "adaptive", turn {number} of {turns.each} for {backend}'

    def timed(self, run: Callable[[], T], tensor: Any) -> T:
        """Call `run`, which launches the kernel, and time it; return its result.

        A backend that refuses the call, or fails in it, gets no more turns. `tensor` is any of the call's
        tensors, whose device counts.
        """
        if not self.backend:
            return run()
        try:
            return self._on_gpu(run, tensor.device) if tensor.is_cuda else self._on_cpu(run)
        except Exception as error:
            self.give_up(f"{type(error).__name__}: {error}")
            raise

    def give_up(self, reason: str) -> None:
        """Exclude the backend from turns; this turn becomes nobody's."""
        with lock:
            self._turns.leave(self.backend, reason.partition("\n")[0])
        self.backend = ""

    def _on_cpu(self, run: Callable[[], T]) -> T:
        before = time.perf_counter()
        result = run()
        taken = time.perf_counter() - before
        if self._is_timed:
            with lock:
                self._turns.add(self.backend, Seen(_scaled(taken * 1e6, self._factor), 0.0))
        return result

    def _on_gpu(self, run: Callable[[], T], device: Any) -> T:
        result, events, taken = between_events(run, device, self._busy_s if self._is_timed else 0.0)
        if self._is_timed:
            with lock:
                # If the kernel was compiled, or the host was slow, the events are further apart than the
                # kernel takes.
                if taken > self._busy_s:
                    self._turns.counts[self.backend] -= 1
                else:
                    self._turns.pending.append((self.backend, *events, taken, self._factor))
        return result


def between_events(run: Callable[[], T], device: Any, busy_s: float) -> tuple[T, tuple[Any, Any], float]:
    """Call `run`, which launches kernels on a GPU, between two events.

    The device is kept busy for `busy_s` seconds before. If the host takes no longer, the time between the
    events is the kernels' time.

    Returns:
        The result of `run`, both events, and the seconds that the host took.
    """
    import torch

    with torch.cuda.device(device):
        if busy_s:
            # At 2 GHz two thousand cycles are a microsecond.
            torch.cuda._sleep(int(2e9 * busy_s))  # type: ignore[no-untyped-call]
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        before.record()
        began = time.perf_counter()
        result = run()
        taken_s = time.perf_counter() - began
        after.record()
    return result, (before, after), taken_s


def _scaled(taken_us: float, factor: float) -> float:
    """Return the time of a call with `factor` times the work; a fixed part of the time doesn't grow."""
    floor = min(0.9 * taken_us, MOST_FLOOR_US)
    return floor + (taken_us - floor) * factor
