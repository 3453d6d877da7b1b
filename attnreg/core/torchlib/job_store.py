"""The store of the default process group, by which the ranks of a job exchange small values.

The store needs no collective: a rank that never uses it blocks no other rank. Two rules for its users:

- A store may be stalled or gone, so every access has a time limit (`within`).
- Nobody keeps a reference to it. A `TCPStore` that is still referenced after `destroy_process_group` is
  reused by the next group, which then reads the addresses of the previous group.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

_inherited: weakref.ref[Any] | None = None


def group_of_several() -> Any:
    """Return `torch.distributed` if the default process group has several ranks, else None."""
    # Not imported means not initialised.
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed if distributed.get_world_size() > 1 else None


def default() -> Any:
    """Return the store; None without a group of several ranks, and in a forked child.

    A child would use its parent's connection.
    """
    distributed = group_of_several()
    if distributed is None:
        return None
    store = distributed.distributed_c10d._get_default_store()
    return None if _inherited is not None and store is _inherited() else store


def within(seconds: float, run: Callable[[], object]) -> None:
    """Run a function in a thread, and stop waiting for it after some seconds.

    Raises RuntimeError after that time, and if the function raised. The function's own error isn't chained,
    because its frames keep the store alive.
    """
    errors: list[str] = []

    def catch() -> None:
        try:
            run()
        except Exception as error:  # noqa: BLE001 - raised below
            errors.append(str(error))

    thread = threading.Thread(target=catch, name="attnreg", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise RuntimeError(f"the process group's store doesn't respond within {seconds:g} s")
    if errors:
        raise RuntimeError(errors[0])


def _leave_the_parents() -> None:
    global _inherited
    distributed = sys.modules.get("torch.distributed")
    with contextlib.suppress(Exception):
        if distributed is not None and distributed.is_initialized():
            _inherited = weakref.ref(distributed.distributed_c10d._get_default_store())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_the_parents)
