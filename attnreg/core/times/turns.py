"""The turns that backends take at calls of one kind: whose is next, what each took, when they are over.

Nothing waits for the device, as `attnreg.tools.measure` does: a turn records two events around the kernel,
and a later call reads them. The device is kept busy for as long as the host takes to launch, so that
the time between them is the kernel's.
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

# Turns of one kind of call, for all backends; and of one backend, of which the first may compile and isn't
# timed.
MOST_TURNS, MOST_EACH = 20, 6
# Calls of a kind after which its turns are over, whoever lacks some.
MOST_CALLS = 3 * MOST_TURNS
# A backend whose best time is above so many times the worst of another's gets no more turns.
BEHIND = 1.5
# The device is busy for `SPARE` times what the backend's last call took of the host, where less than the
# shortest counts as that, and more than the longest as that.
SPARE, SHORTEST_S, LONGEST_S = 2.5, 50e-6, 1e-3

# Backward calls come on autograd's threads.
lock = open_after_fork(threading.RLock())

Cell = tuple[Kind, tuple[int, ...]]


def cell_of(kind: Kind, size: Size) -> Cell:
    """Return what calls have in common that take turns together: the kind, and sizes to a power of two."""
    window = (max(bound, 0).bit_length() for bound in size.window)
    return kind, (*map(round, coordinates(kind, size)), *window)


class Seen(NamedTuple):
    """What one turn took, in microseconds, scaled to the size of the first call; `host_us` is 0 on a CPU."""

    gpu_us: float
    host_us: float


@dataclass(slots=True)
class Turns:
    """The turns of one kind of call.

    Attributes:
        kind, size: those of its first call.
        name: what the ranks of a job call it.
        role: "measures" or "follows" in a job of several ranks, else empty. One that follows has waited
            `since` then, in seconds of the monotonic clock, and `looked` for the result.
        backends: those that take turns, with what was seen of each.
        given: how many turns each has had. out: why a backend gets no more. failed: which of these were
            errors or refusals. calls: how many could have been a turn.
        pending: turns whose events haven't been reached yet: backend, both events, host time, factor.
        point: the result; None before the end. closed: whether nothing more is measured.
    """

    kind: Kind
    size: Size
    name: str
    role: str = ""
    since: float = 0.0
    looked: float = 0.0
    backends: dict[str, list[Seen]] = field(default_factory=dict)
    given: dict[str, int] = field(default_factory=dict)
    out: dict[str, str] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    calls: int = 0
    pending: list[tuple[str, Any, Any, float, float]] = field(default_factory=list)
    point: Point | None = None
    closed: bool = False

    @property
    def each(self) -> int:
        """How many turns each backend gets."""
        return min(MOST_EACH, MOST_TURNS // max(len(self.backends), 1))

    def next(self, able: Collection[str]) -> str:
        """Return whose turn a call is, of the backends that can run it; empty if nobody's."""
        self.calls += 1
        for name in able:
            self.backends.setdefault(name, [])
            self.given.setdefault(name, 0)
        waiting = [name for name in self._waiting() if name in able]
        if not waiting:
            return ""
        name = min(waiting, key=self.given.__getitem__)
        self.given[name] += 1
        return name

    def _waiting(self) -> list[str]:
        if sum(self.given.values()) >= MOST_TURNS:
            return []
        return [name for name, given in self.given.items() if name not in self.out and given < self.each]

    def collect(self) -> None:
        """Take the times of turns that the device has finished."""
        pending, self.pending = self.pending, []
        for name, before, after, host, factor in pending:
            try:
                if not after.query():
                    self.pending.append((name, before, after, host, factor))
                    continue
                taken = before.elapsed_time(after) * 1e3
            except RuntimeError as error:  # no error of attention: the call that finds it may be any
                self.leave(name, str(error))
                continue
            self.add(name, Seen(_scaled(taken, factor), host * 1e6))

    def add(self, name: str, seen: Seen) -> None:
        """Add what a turn took; backends that are far behind leave."""
        if name in self.out:
            return
        self.backends[name].append(seen)
        found = {other: taken for other, taken in self.backends.items() if taken and other not in self.out}
        worst = min(max(one.gpu_us for one in taken) for taken in found.values())
        for other, taken in found.items():
            if len(taken) > 1 and min(one.gpu_us for one in taken) > BEHIND * worst:
                self.out[other] = "far behind"

    def leave(self, name: str, reason: str) -> None:
        """Give a backend that refuses or fails no more turns, and forget what was seen of it."""
        self.out[name] = reason or "it has failed"
        self.failed.add(name)
        self.backends.get(name, []).clear()

    def result(self) -> Point | None:
        """Return the medians of what was seen; None before all turns are over.

        They are over after `MOST_CALLS`, too: a backend may be able to run a few calls of the kind only.
        """
        if not self.backends or self.pending or (self._waiting() and self.calls < MOST_CALLS):
            return None
        found = {name: Measured(failed=self.out[name]) for name in self.failed}
        for name, seen in self.backends.items():
            if seen:
                gpu, host = (median(times) for times in zip(*seen, strict=True))
                found[name] = Measured(gpu_us=max(gpu, 1e-3), host_us=host)
        return Point(self.kind, self.size, found)


class Turn:
    """One call that a backend runs in its turn; or, without a backend, one that is nobody's."""

    def __init__(self, turns: Turns, backend: str, spec: AttentionSpec) -> None:
        self._turns, self.backend, number = turns, backend, turns.given.get(backend, 0)
        self._factor = work(turns.kind, turns.size) / work(turns.kind, size_of(spec))
        self._is_timed = number > 1
        seen = turns.backends.get(backend)
        self._busy_s = SPARE * min(max(seen[-1].host_us * 1e-6 if seen else LONGEST_S, SHORTEST_S), LONGEST_S)
        self.source = f'policy = "adaptive", turn {number} of {turns.each} for {backend}'

    def timed(self, run: Callable[[], T], tensor: Any) -> T:
        """Return what `run` returns, which launches the kernel for this tensor and others; takes its time.

        A backend that refuses the call, or fails in it, gets no more turns.
        """
        if not self.backend:
            return run()
        try:
            return self._on_gpu(run, tensor.device) if tensor.is_cuda else self._on_cpu(run)
        except Exception as error:
            self.give_up(f"{type(error).__name__}: {error}")
            raise

    def give_up(self, reason: str) -> None:
        """Have the backend get no more turns; this one is nobody's then."""
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
        import torch

        with torch.cuda.device(device):
            if self._is_timed:
                # At 2 GHz two thousand cycles are a microsecond.
                torch.cuda._sleep(int(2e9 * self._busy_s))  # type: ignore[no-untyped-call]
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
            events[0].record()
            before = time.perf_counter()
            result = run()
            taken = time.perf_counter() - before
            events[1].record()
        if self._is_timed:
            with lock:
                # It compiled, or the host was slow: then the events are further apart than the kernel takes.
                if taken > self._busy_s:
                    self._turns.given[self.backend] -= 1
                else:
                    self._turns.pending.append((self.backend, events[0], events[1], taken, self._factor))
        return result


def _scaled(taken_us: float, factor: float) -> float:
    """Return what a call of so many times the work would take; a part of its time doesn't depend on it."""
    floor = min(0.9 * taken_us, MOST_FLOOR_US)
    return floor + (taken_us - floor) * factor
