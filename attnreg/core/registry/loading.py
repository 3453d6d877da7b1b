"""One thread at a time checks or loads a backend; a wait that would never end is an error instead.

A thread waits only for the backend that it needs: another backend's slow `load` doesn't stop it. Threads that
load backends may wait for each other, and also for modules that the others are importing. Python finds
circles of modules alone; `_describe_circle` finds circles that a backend is part of.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from importlib import _bootstrap
from threading import get_ident
from typing import Protocol

from attnreg.core.torchlib.locks import open_after_fork
from attnreg.errors import RegistrationError

# How often a waiting thread looks for a circle, in seconds: another thread may close it later.
PAUSE = 0.05


class Loadable(Protocol):
    """What is loaded: an entry of the registry."""

    name: str


_changed = open_after_fork(threading.Condition(threading.RLock()))
_loaders: dict[Loadable, int] = {}  # which thread loads an entry
_awaited: dict[int, Loadable] = {}  # which entry a thread waits for
_retrying: set[int] = set()  # threads in `wait_for_module`


@contextlib.contextmanager
def alone(entry: Loadable) -> Iterator[bool]:
    """Wait until no other thread is in such a block for the entry, and keep others out.

    Yields whether this thread is in such a block for the entry already.

    Raises RegistrationError where that thread waits for this one, so that neither would ever go on.
    """
    me = get_ident()
    with _changed:
        is_inner = _loaders.get(entry) == me
        _awaited[me] = entry
        try:
            while _loaders.get(entry, me) != me:
                if circle := _describe_circle(me):
                    raise RegistrationError(
                        f"{entry.name} is needed here, and would never be loaded: {circle}; expected that a "
                        "module calls no attention while it is imported, nor load() on a backend that "
                        "another thread loads"
                    )
                _changed.wait(PAUSE)
        finally:
            del _awaited[me]
        _loaders[entry] = me
    try:
        yield is_inner
    finally:
        if not is_inner:
            with _changed:
                _loaders.pop(entry, None)
                _changed.notify_all()


def wait_for_module(name: str) -> bool:
    """Wait until a module that another thread's load imports is whole; False if no other thread loads.

    Ends as well where such a thread waits for this one.
    """
    me = get_ident()
    with _changed:
        if not (others := set(_loaders.values()) - {me}):
            return False
        _retrying.add(me)
        try:
            while _is_half(name) and others and not any(_follow(other)[-1][1] == me for other in others):
                _changed.wait(PAUSE)
                others = set(_loaders.values()) - _retrying
        finally:
            _retrying.discard(me)
    return True


def _is_half(name: str) -> bool:
    """Whether a module is being imported; Python's own mark, which is private."""
    return bool(getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False))


def _describe_circle(me: int) -> str:
    """Return who waits for whom, if this thread waits for itself in the end; else an empty string."""
    steps = _follow(me)
    if steps[-1][1] != me:
        return ""
    waits = [
        f"{'that' if number else 'this'} thread waits for {name}" for number, (name, _) in enumerate(steps)
    ]
    return ", which another thread loads; ".join(waits) + ", which this thread loads"


def _follow(thread: int) -> list[tuple[str, int | None]]:
    """Return what a thread waits for and who loads it, what that thread waits for, and so on.

    The last thread is None if somebody waits for nothing, else the first that is met again.
    """
    steps: list[tuple[str, int | None]] = []
    visited: set[int | None] = {None}
    at: int | None = thread
    while at is not None and at not in visited:
        visited.add(at)
        awaited = _awaited.get(at)
        name, at = (awaited.name, _loaders.get(awaited)) if awaited else _awaited_module(at)
        steps.append((name, at))
    return steps


def _awaited_module(thread: int) -> tuple[str, int | None]:
    """Return the name of the module whose import a thread waits for, and who imports the module."""
    with contextlib.suppress(Exception):  # private to Python, and another thread may change it meanwhile
        locks = _bootstrap._blocking_on[thread]  # type: ignore[attr-defined]
        for lock in locks if isinstance(locks, list) else [locks]:  # a list from Python 3.12 on
            if lock.owner is not None:
                return f"the module {lock.name}", lock.owner
    return "", None


def _forget_other_threads() -> None:
    """Forget what threads load that don't exist in a forked child."""
    me = get_ident()
    for entry in [entry for entry, thread in _loaders.items() if thread != me]:
        del _loaders[entry]
    _awaited.clear()
    _retrying.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_other_threads)
