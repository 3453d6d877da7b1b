"""Locks that are open in a forked child: locks between threads, and file locks between processes.

Two threads that acquire two locks in different orders can deadlock. `ORDER` lists all of attnreg's locks
between threads: a thread that holds one acquires only locks that come later. All are RLocks: a signal handler
or a finalizer may call attention, or anything else of attnreg, while its thread holds a lock.
"""

from __future__ import annotations

import os
import time
from _thread import RLock
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Condition
from typing import TypeVar

from attnreg.core.torchlib import caches

ORDER = (
    "flash_attn.activation._lock",  # an installed flash-attn is imported behind it
    # Of each backend: its `load` may call attention. A circle of backends is found when it closes.
    "core.registry.loading.alone",
    # Protects the settings and routers as well; only torch's and attnreg's code runs behind it.
    "core.registry.lock",
    "core.torchlib.background._waiting",
    "core.dispatch.trace._writing",
    "core.dispatch.trace._lock",
    "core.times.turns.lock",
    "core.policy.ranks._lock",  # other ranks are waited for behind it
    "backends.cudnn.execution_plans._building",
    "backends.fa4.adapter._compile_lock",
    "backends.flex.programs._compile_lock",
    "core.aten.bypassed._lock",
    "core.varlen.plans._lock",
    "core.dispatch.scope._lock",
    "core.dispatch.counters._lock",
    "core.torchlib.captured._lock",
    "core.torchlib.device_code._lock",  # NVRTC compiles behind it
    "core.launching.offsets._lock",
    "core.dispatch.timed._lock",
    "core.registry.loading._changed",
)

FIRST_FREE = 3  # the descriptors below are stdin, stdout and stderr

AnyLock = TypeVar("AnyLock", "RLock", "Condition")

# Descriptors of files that are locked, or that a thread waits to lock. A process that is forked meanwhile
# closes them: else it would keep the lock of a killed process for life.
_open: set[int] = set()


def open_after_fork(lock: AnyLock) -> AnyLock:
    """Return the lock, which is reset in a forked child: the thread that held it doesn't exist there."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined]
    return lock


def lock_file(path: Path, wait: bool = False, like: Path | None = None) -> int | None:
    """Lock a file for this process and processes that inherit the lock; None where another process holds it.

    The system releases the lock when the last process with the returned descriptor has ended, also by a
    crash: there are no stale locks. The file is created if it is missing, and releasing the lock leaves it. A
    process inherits the lock if it is started with `pass_fds`, followed by `hand_over`; a forked process
    doesn't.

    Args:
        path: the file to lock.
        wait: whether to wait for the holder.
        like: a file whose writers may use the lock, too, if the file exists; else only this user may.

    Raises:
        OSError: the file can't be created or opened, or its file system has no locks.
    """
    import fcntl

    mode = 0o666 if like else 0o600
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    if descriptor < FIRST_FREE:  # the program has closed stdin, stdout or stderr; a child has its own there
        low, descriptor = descriptor, fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, FIRST_FREE)
        os.close(low)
    _open.add(descriptor)
    try:
        if like:
            with suppress(FileNotFoundError, PermissionError):  # another user created the lock, and its mode
                os.fchmod(descriptor, like.stat().st_mode & mode | 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        hand_over(descriptor)
        return None
    except BaseException:
        hand_over(descriptor)
        raise
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    return descriptor


@contextmanager
def rewriting(path: Path, seconds: float = 10.0) -> Iterator[None]:
    """Give one thread of one process at a time the right to read and rewrite a file, inside this block.

    Raises TimeoutError if a single other process holds the lock for `seconds`; the time restarts whenever the
    holder changes. Raises OSError as `lock_file` does. Systems without fcntl have no such locks: there the
    block excludes nobody.
    """
    target = caches.resolve(path)  # all links to a file share the lock
    # Not the file itself: it is replaced, and a waiting process would then lock the old file.
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
    """Lock a file as `lock_file` does; None also where its last holder has just removed the file."""
    if (descriptor := lock_file(path, like=like)) is None:
        return None
    with suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
    release(descriptor)
    return None


def release(descriptor: int) -> None:
    """Release the lock of a file, whichever other processes have its descriptor."""
    import fcntl

    # Closing isn't enough: a process that was forked while the file was being opened has a copy.
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    hand_over(descriptor)


def hand_over(descriptor: int) -> None:
    """Leave the lock of a file to the processes that have inherited it."""
    _open.discard(descriptor)
    os.close(descriptor)


def holder(path: Path) -> str:
    """Return the process id that the holder of a file's lock has written to it; empty if it isn't locked."""
    try:
        import fcntl

        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read(100).decode("ascii", "replace") or "unknown"
    except (OSError, ImportError):
        pass  # no such file, it can't be read, or this system has no such locks
    return ""


def _close_all() -> None:
    for descriptor in _open:
        with suppress(OSError):  # the parent was about to close it
            os.close(descriptor)
    _open.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all)
