"""Locks that a fork doesn't leave closed: between threads, and between processes on a file."""

from __future__ import annotations

import os
from _thread import RLock
from pathlib import Path
from threading import Lock
from typing import TypeVar

AnyLock = TypeVar("AnyLock", "Lock", "RLock")

# Descriptors of locked files. A worker that is forked meanwhile must not keep them for as long as it lives.
_held: set[int] = set()


def open_after_fork(lock: AnyLock) -> AnyLock:
    """Return the lock; in a forked child it is open, as the thread that held it isn't there to do so."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined]
    return lock


def lock_file(path: Path, wait: bool = False) -> int | None:
    """Lock a file for this process and those that inherit it; None where another process holds it.

    The system opens the lock when the last process with the returned descriptor has ended, in whatever way:
    there are no stale locks, and the file, which is made if it isn't there, stays where it is. A process
    inherits the lock if it is started with `pass_fds`, a fork doesn't. With `wait` it waits for the holder.
    Raises OSError if the file can't be made or opened, or its file system has no locks.
    """
    import fcntl

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    _held.add(descriptor)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    return descriptor


def release(descriptor: int) -> None:
    """Open the lock of a file, or leave it to the processes that have inherited it."""
    _held.discard(descriptor)
    os.close(descriptor)


def holder(path: Path) -> str:
    """Return what the holder of a file's lock has written there, its process id; empty if it is open."""
    try:
        import fcntl

        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read(100).decode("ascii", "replace") or "unknown"
    except (OSError, ImportError):
        pass  # there is none, or it can't be read, or this system has no such locks
    return ""


def _forget_held() -> None:
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_held)
