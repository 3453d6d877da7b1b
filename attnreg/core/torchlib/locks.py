"""Locks that are open again after a fork: between threads, and between processes on a file.

Two threads that acquire two locks in different orders may wait for each other for ever. `ORDER` lists all of
attnreg's locks between threads. A thread that owns a lock acquires only later locks of the list.
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
    # Protects the settings and routers as well; only torch's and attnreg's code runs behind it.
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

# Descriptors of locked files. A forked worker closes its copies, or it would keep the locks while it lives.
_held: set[int] = set()


def open_after_fork(lock: AnyLock) -> AnyLock:
    """Return the lock; in a forked child it is open, as the thread that may own it doesn't exist there."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined]
    return lock


def lock_file(path: Path, wait: bool = False, like: Path | None = None) -> int | None:
    """Lock a file, and return its descriptor; None if another process owns the lock.

    The system opens the lock when the last process with the descriptor has ended, in whatever way. So there
    are no stale locks. A missing file is made, and never removed here. A process that is started with
    `pass_fds` inherits the lock, a forked child doesn't. With `wait` this waits for the lock's owner.
    Only this user may write to the file. With `like`, if that file exists, its writers may, too.
    Raises OSError if the file can't be made or opened, or its file system has no locks.
    """
    import fcntl

    mode = 0o666 if like else 0o600
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    try:
        if like:
            with suppress(
                FileNotFoundError, PermissionError
            ):  # another user has made the lock, with this mode
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
    """Let only one thread of all processes read a file and write it anew, inside this block.

    Raises TimeoutError if one process owns the lock for so many seconds; each new owner restarts the time.
    Raises OSError as `lock_file` does. Systems without fcntl have no such locks: the block runs unprotected.
    """
    target = path.resolve()  # one lock for all links to a file
    # A file of its own is locked: the target is replaced, and waiting processes would lock the old file.
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
    """Lock a file as `lock_file` does; None also if the lock's last owner has just removed the file."""
    if (descriptor := lock_file(path, like=like)) is None:
        return None
    with suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
    release(descriptor)
    return None


def release(descriptor: int) -> None:
    """Open the lock of a file, unless other processes have inherited it."""
    _held.discard(descriptor)
    os.close(descriptor)


def holder(path: Path) -> str:
    """Return the process id that the owner of a file's lock has written to it; empty if the lock is open."""
    try:
        import fcntl

        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read(100).decode("ascii", "replace") or "unknown"
    except (OSError, ImportError):
        pass  # the file is missing, or can't be read, or this system has no such locks
    return ""


def _forget_held() -> None:
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_held)
