"""What really ran: calls per backend and direction, and fallbacks with their reasons.

The hot path holds its counters and adds to them under one lock; names are looked up only when a
decision is made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass

from attnreg.contract.spec import Direction
from attnreg.torchlib.locks import open_after_fork

__all__ = ["Fallback", "Stats", "reset_stats", "stats"]

# Reasons may hold numbers that change with every call; a long run mustn't grow a row for each.
MOST_FALLBACKS = 1000
FURTHER = ("*", "(further reasons)")

_lock = open_after_fork(threading.Lock())
_calls: dict[tuple[str, Direction], Counter] = {}
_fallbacks: dict[tuple[str, str], Counter] = {}
_elsewhere: list[Callable[[], list[tuple[Counter, int]]]] = []


class Counter:
    """A number that only `count` and `reset_stats` change.

    Attributes:
        level: the level of the log line about what is counted; 0 before there is one.
    """

    __slots__ = ("level", "value")

    def __init__(self) -> None:
        self.value = 0
        self.level = 0


@dataclass(frozen=True, slots=True)
class Fallback:
    """A backend that was passed over, why, and how often."""

    backend: str
    reason: str
    count: int


@dataclass(frozen=True)
class Stats:
    """A copy of the counters.

    Attributes:
        calls: backend name to `{"forward": n, "backward": n}`, kernels that really ran.
        fallbacks: backends that would have come first but couldn't run a call, with the reason; what
            goes beyond a thousand rows is counted in one more, of the backend "*".
    """

    calls: dict[str, dict[str, int]]
    fallbacks: tuple[Fallback, ...]

    def to_dict(self) -> dict[str, object]:
        """Return the same as plain data, for JSON."""
        return {"calls": self.calls, "fallbacks": [asdict(row) for row in self.fallbacks]}


def call_counter(backend: str, direction: Direction) -> Counter:
    """Return the counter of a backend's calls in one direction."""
    with _lock:
        return _calls.setdefault((backend, direction), Counter())


def fallback_counter(backend: str, reason: str) -> Counter:
    """Return the counter of one fallback."""
    with _lock:
        full = len(_fallbacks) >= MOST_FALLBACKS and (backend, reason) not in _fallbacks
        return _fallbacks.setdefault(FURTHER if full else (backend, reason), Counter())


def not_yet_logged(counter: Counter, level: int) -> bool:
    """Whether to log a fallback: once, and again if it gets more severe. It counts as logged then."""
    with _lock:
        before, counter.level = counter.level, max(counter.level, level)
        return level > before


def count(counters: tuple[Counter, ...]) -> None:
    """Add one to each."""
    with _lock:
        for counter in counters:
            counter.value += 1


def count_also(drain: Callable[[], list[tuple[Counter, int]]]) -> None:
    """Count calls that don't come to `count` as well: `drain` returns those since it was last called."""
    _elsewhere.append(drain)


def collect() -> None:
    """Add what was counted elsewhere, before counters are read."""
    found = [row for drain in _elsewhere for row in drain()]
    with _lock:
        for counter, times in found:
            counter.value += times


def stats() -> Stats:
    """Return what ran since the start or the last `reset_stats`."""
    collect()
    with _lock:
        calls: dict[str, dict[str, int]] = {}
        for (backend, direction), counter in _calls.items():
            if counter.value:
                calls.setdefault(backend, {"forward": 0, "backward": 0})[direction] = counter.value
        rows = (Fallback(backend, reason, c.value) for (backend, reason), c in _fallbacks.items() if c.value)
        return Stats(calls, tuple(rows))


def reset_stats() -> None:
    """Set every counter to zero."""
    collect()
    with _lock:
        for counter in (*_calls.values(), *_fallbacks.values()):
            counter.value = 0
