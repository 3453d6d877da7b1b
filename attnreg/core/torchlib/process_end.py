"""What runs when a process ends: this one, and each that is forked from it."""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
from collections.abc import Callable


def call_at_end(function: Callable[[], None], in_child: Callable[[], None]) -> None:
    """Call a function of a module when this process ends, and when a process that is forked from it does.

    `in_child` is called at the start of a forked process.
    """

    def finalize(_: object) -> None:
        # A forked worker ends without what `atexit` has; Python's own way out of one are finalizers.
        multiprocessing.util.Finalize(None, function, exitpriority=0)

    atexit.register(function)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=in_child)
        multiprocessing.util.register_after_fork(function, finalize)
