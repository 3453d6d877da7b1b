"""Locks that a fork doesn't leave closed: between threads, and between processes on a file.

Two threads that take two locks in different orders wait for each other for ever. `ORDER` has all of attnreg's
locks between threads: who has one of them takes only such as come later.
"""

from __future__ import annotations

import os
import time
from _thread import RLock
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import TypeVar

ORDER = (
    "flash_attn.activation._lock",  # an installed flash-attn is imported behind it
    "core.registry.entry._loading",  # a backend's `load` may call attention
    # Of the settings and routers as well; no code but torch's and attnreg's runs behind it.
    "core.registry.lock",
    "core.torchlib.background._waiting",
    "core.dispatch.trace._writing",
    "core.dispatch.trace._lock",
    "core.times.turns.lock",
    "core.policy.ranks._lock",  # other ranks are waited for behind it
    "core.backends.cudnn.execution_plans._building",
    "core.backends.fa4.adapter._compile_lock",
    "core.aten.bypassed._lock",
    "core.varlen.autograd._lock",
    "core.dispatch.scope._lock",
    "core.dispatch.counters._lock",
    "core.torchlib.captured._lock",
    "core.torchlib.device_code._lock",  # NVRTC compiles behind it
    "core.launching.offsets._lock",
    "masks.cache._lock",
)

AnyLock = TypeVar("AnyLock", "Lock", "RLock")

# Descriptors of locked files. A worker that is forked meanwhile must not keep them for as long as it lives.
_held: set[int] = set()


def open_after_fork(lock: AnyLock) -> AnyLock:
    """Return the lock; in a forked child it is open, as the thread that owned it isn't there to do so."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined]
    return lock


def lock_file(path: Path, wait: bool = False, like: Path | None = None) -> int | None:
    """Lock a file for this process and those that inherit it; None where another process has it.

    The system opens the lock when the last process with the returned descriptor has ended, in whatever way:
    there are no stale locks, and the file, which is made if it isn't there, stays where it is. A process
    inherits the lock if it is started with `pass_fds`, a fork doesn't. With `wait` it waits for the holder.
    The file is this user's alone, or with `like` of those who may write to that one, if it is there.
    Raises OSError if the file can't be made or opened, or its file system has no locks.
    """
    import fcntl

    mode = 0o666 if like else 0o600
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    try:
        if like:
            with suppress(FileNotFoundError, PermissionError):  # another user has made the lock, and did this
                os.fchmod(descriptor, like.stat().st_mode & mode | 0o600)
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


@contextmanager
def rewriting(path: Path, seconds: float = 10.0) -> Iterator[None]:
    """Let one thread of one process at a time read a file and write it anew, inside this block.

    Raises TimeoutError if one other process is for so many seconds, however many come before this one;
    OSError as `lock_file` does. Systems without fcntl have no such locks: there it keeps nobody out.
    """
    target = path.resolve()  # one lock for all links to a file
    # Not the file itself: it is replaced, and those who wait for its lock would have that of the old one.
    lock = target.with_name(f".{target.name}.lock")
    last, end = None, 0.0
    while os.name == "posix" and (descriptor := _lock_in_place(lock, target)) is None:
        if (process := holder(lock)) != last:
            last, end = process, time.monotonic() + seconds
        if time.monotonic() > end:
            who = f"process {process}" if process.isdigit() else "another process"
            raise TimeoutError(f"{who} has kept {lock} locked for {seconds:.2g} s")
        time.sleep(0.01)
    try:
        yield
    finally:
        if os.name == "posix" and descriptor is not None:
            lock.unlink(missing_ok=True)
            release(descriptor)


def _lock_in_place(path: Path, like: Path) -> int | None:
    """Lock a file as `lock_file` does; None as well where its last holder has just removed it."""
    if (descriptor := lock_file(path, like=like)) is None:
        return None
    with suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
    release(descriptor)
    return None


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
