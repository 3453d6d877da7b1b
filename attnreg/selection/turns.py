"""The turns that backends take at calls of one kind: whose is next, what each took, when they are over.

Nothing waits for the device: a turn records two events around the kernel, and a later call reads them. The
device is kept busy for as long as the host takes to launch, so that the time between them is the kernel's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple, TypeVar

from attnreg.contract.spec import AttentionSpec
from attnreg.torchlib.locks import open_after_fork
from attnreg.tuning.index import MOST_FLOOR_US
from attnreg.tuning.kinds import Kind, Size, coordinates, size_of, work
from attnreg.tuning.points import Measured, Point

T = TypeVar("T")

# Turns of one kind of call, for all backends; and of one backend, of which the first may compile and isn't
# timed.
MOST_TURNS, MOST_EACH = 20, 6
# A backend whose best time is above so many times the worst of another's gets no more turns.
BEHIND = 1.5
# The device is busy for so many times what the backend's last call took of the host, within these limits.
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
        name: what the ranks of a job call it. follows: whether another rank measures for this one, which has
            waited `since` then, in seconds of the monotonic clock, and `looked` for the result.
        backends: those that take turns, with what was seen of each; None before the first turn.
        given: how many turns each has had. out: why a backend gets no more.
        pending: turns whose events haven't been reached yet: backend, both events, host time, factor.
        point: the result; None before the end. closed: whether nothing more is measured.
    """

    kind: Kind
    size: Size
    name: str
    follows: bool = False
    since: float = 0.0
    looked: float = 0.0
    backends: dict[str, list[Seen]] | None = None
    given: dict[str, int] = field(default_factory=dict)
    out: dict[str, str] = field(default_factory=dict)
    pending: list[tuple[str, Any, Any, float, float]] = field(default_factory=list)
    point: Point | None = None
    closed: bool = False

    @property
    def each(self) -> int:
        """How many turns each backend gets."""
        return min(MOST_EACH, MOST_TURNS // max(len(self.backends or ()), 1))

    @property
    def still_in(self) -> list[str]:
        """The backends that get turns, or wait for the times of their last."""
        return [name for name in self.backends or () if name not in self.out]

    def next(self) -> str:
        """Return whose turn it is; empty if all have had theirs."""
        waiting = [name for name in self.still_in if self.given[name] < self.each]
        return min(waiting, key=self.given.__getitem__) if waiting else ""

    def collect(self) -> None:
        """Take the times of turns that the device has finished."""
        still = []
        for name, before, after, host, factor in self.pending:
            if after.query():
                self.add(name, Seen(_scaled(before.elapsed_time(after) * 1e3, factor), host * 1e6))
            else:
                still.append((name, before, after, host, factor))
        self.pending = still

    def add(self, name: str, seen: Seen) -> None:
        """Add what a turn took; backends that are far behind leave."""
        found = self.backends or {}
        found[name].append(seen)
        worst = min(max(one.gpu_us for one in found[other]) for other in self.still_in if found[other])
        for other in self.still_in:
            if len(found[other]) > 1 and min(one.gpu_us for one in found[other]) > BEHIND * worst:
                self.out[other] = "far behind"

    def leave(self, name: str, reason: str) -> None:
        """Give a backend no more turns, and forget what was seen of it."""
        if self.backends is not None and name in self.backends:
            self.out[name] = reason
            self.backends[name].clear()
            self.pending = [one for one in self.pending if one[0] != name]

    def result(self) -> Point | None:
        """Return the medians of what was seen; None before all turns are over."""
        if self.backends is None or self.next() or self.pending:
            return None
        found = {
            name: Measured(
                gpu_us=max(median(one.gpu_us for one in seen), 1e-3),
                host_us=median(one.host_us for one in seen),
            )
            for name, seen in self.backends.items()
            if seen
        }
        return Point(self.kind, self.size, found)


class Turn:
    """One call that a backend runs in its turn; or, without a backend, one that is nobody's."""

    def __init__(self, turns: Turns, backend: str, number: int, spec: AttentionSpec) -> None:
        self._turns, self.backend, self._number = turns, backend, number
        self._factor = work(turns.kind, turns.size) / work(turns.kind, size_of(spec))
        self.source = f'policy = "adaptive", turn {number} of {turns.each} for {backend}'

    def timed(self, run: Callable[[], T], tensor: Any) -> T:
        """Return what `run` returns, which launches the kernel for this tensor and others; takes its time.

        A backend that declines the call, or fails in it, gets no more turns.
        """
        try:
            if not self.backend:
                return run()
            return self._on_gpu(run, tensor.device) if tensor.is_cuda else self._on_cpu(run)
        except Exception as error:
            with lock:
                self._turns.leave(self.backend, f"{type(error).__name__}: {error}".partition("\n")[0])
            raise

    def _on_cpu(self, run: Callable[[], T]) -> T:
        before = time.perf_counter()
        result = run()
        taken = time.perf_counter() - before
        with lock:
            if self._number > 1 and self.backend in self._turns.still_in:
                self._turns.add(self.backend, Seen(_scaled(taken * 1e6, self._factor), 0.0))
        return result

    def _on_gpu(self, run: Callable[[], T], device: Any) -> T:
        import torch

        with torch.cuda.device(device):
            if self._number > 1:
                seen = (self._turns.backends or {})[self.backend]
                host = seen[-1].host_us * 1e-6 if seen else LONGEST_S
                # At 2 GHz two thousand cycles are a microsecond.
                torch.cuda._sleep(int(2e9 * SPARE * min(max(host, SHORTEST_S), LONGEST_S)))  # type: ignore[no-untyped-call]
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
            events[0].record()
            before = time.perf_counter()
            result = run()
            taken = time.perf_counter() - before
            events[1].record()
        if self._number > 1:
            with lock:
                if self.backend in self._turns.still_in:
                    self._turns.pending.append((self.backend, events[0], events[1], taken, self._factor))
        return result


def _scaled(taken_us: float, factor: float) -> float:
    """Return what a call of so many times the work would take; a part of its time doesn't depend on it."""
    floor = min(0.9 * taken_us, MOST_FLOOR_US)
    return floor + (taken_us - floor) * factor
