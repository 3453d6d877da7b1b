"""Watches all locks of attnreg: which of them a thread acquires while it holds others."""

import contextlib
import functools
import importlib
import sys
import threading

from attnreg.core.torchlib import locks


class Taken:
    """Which locks were acquired by a thread that held which others."""

    def __init__(self):
        self.pairs, self.by_thread = set(), {}

    def against(self, order):
        """Return the pairs that an order doesn't allow."""
        place = {name: number for number, name in enumerate(order)}
        return sorted(pair for pair in self.pairs if place[pair[0]] > place[pair[1]])


class Watched:
    """A lock that notes which others its thread holds when it acquires it."""

    def __init__(self, name, lock, taken):
        self.name, self.lock, self.taken = name, lock, taken

    def __enter__(self):
        self.acquire()

    def __exit__(self, *_):
        self.release()

    def acquire(self, *options, **more):
        held = self.taken.by_thread.setdefault(threading.get_ident(), [])
        self.taken.pairs.update((other, self.name) for other in held if other != self.name)
        got = self.lock.acquire(*options, **more)
        if got:
            held.append(self.name)
        return got

    def release(self):
        self.lock.release()
        with contextlib.suppress(KeyError, ValueError):  # another thread has acquired it
            self.taken.by_thread[threading.get_ident()].remove(self.name)


def watched(name, lock, taken):
    """Return a lock, or a block that only one thread may be in, that is watched."""
    if not callable(lock):
        return Watched(name, lock, taken)

    @contextlib.contextmanager
    def block(*arguments):
        with Watched(name, threading.RLock(), taken), lock(*arguments) as value:
            yield value

    return block


def _made(name, make, taken, lock):
    return Watched(name, make(lock), taken)


def watch(patch):
    """Watch all locks of `locks.ORDER` until `patch`, a monkeypatch, is undone; returns what is seen."""
    taken = Taken()
    for place in locks.ORDER:
        path, _, name = place.rpartition(".")
        module = importlib.import_module(f"attnreg.{path}")
        if not hasattr(module, name):  # each object of a class has one
            patch.setattr(
                module, "open_after_fork", functools.partial(_made, place, module.open_after_fork, taken)
            )
            continue
        lock = getattr(module, name)
        if isinstance(lock, threading.Condition):  # no other lock is acquired behind it
            continue
        seen = watched(place, lock, taken)
        for other in [*sys.modules.values()]:
            if (getattr(other, "__name__", None) or "").startswith("attnreg"):
                for alias in [alias for alias, value in vars(other).items() if value is lock]:
                    patch.setattr(other, alias, seen)
    return taken
