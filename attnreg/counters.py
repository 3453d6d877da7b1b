"""What really ran: calls per backend and direction, and fallbacks with their reasons.

The hot path holds its counters and adds to them under one lock; names are looked up only when a
decision is made.
"""

from __future__ import annotations

import os
import threading
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnreg.discovery import Direction

__all__ = [
    "Counter",
    "Fallback",
    "Stats",
    "call_counter",
    "count",
    "fallback_counter",
    "reset_stats",
    "stats",
]

_lock = threading.Lock()
_calls: dict[tuple[str, Direction], Counter] = {}
_fallbacks: dict[tuple[str, str], Counter] = {}

if hasattr(os, "register_at_fork"):
    # A thread of the parent may be counting; in the child nobody would release the lock.
    os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]


class Counter:
    """A number that only `count` and `reset_stats` change."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0


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
        fallbacks: backends that would have come first but couldn't run a call, with the reason.
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


def fallback_counter(backend: str, reason: str) -> tuple[Counter, bool]:
    """Return the counter of one fallback, and whether it is new."""
    with _lock:
        new = (backend, reason) not in _fallbacks
        return _fallbacks.setdefault((backend, reason), Counter()), new


def count(counters: tuple[Counter, ...]) -> None:
    """Add one to each."""
    with _lock:
        for counter in counters:
            counter.value += 1


def stats() -> Stats:
    """Return what ran since the start or the last `reset_stats`."""
    with _lock:
        calls: dict[str, dict[str, int]] = {}
        for (backend, direction), counter in _calls.items():
            if counter.value:
                calls.setdefault(backend, {"forward": 0, "backward": 0})[direction] = counter.value
        rows = (Fallback(backend, reason, c.value) for (backend, reason), c in _fallbacks.items() if c.value)
        return Stats(calls, tuple(rows))


def reset_stats() -> None:
    """Set every counter to zero."""
    with _lock:
        for counter in (*_calls.values(), *_fallbacks.values()):
            counter.value = 0
