"""Locks that don't outlive the thread that holds them across a fork."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from _thread import RLock
    from threading import Lock

__all__ = ["open_after_fork"]

AnyLock = TypeVar("AnyLock", "Lock", "RLock")


def open_after_fork(lock: AnyLock) -> AnyLock:
    """Return the lock; in a forked child it is open, as the thread that held it isn't there to do so."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined]
    return lock
