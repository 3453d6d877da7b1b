"""`ATTNREG_STATS`: each process of a program adds a line with what ran in it to a file, when it ends.

A line is JSON: `program`, `pid` and the fields of `Stats.to_dict`. Processes append whole lines, so that they
need no lock.
"""

from __future__ import annotations

import atexit
import json
import logging
import multiprocessing.util
import os
import sys
from pathlib import Path

from attnreg.core.dispatch import counters

log = logging.getLogger("attnreg")

_path: Path | None = None


def follow(path: Path | None) -> None:
    """Write the line of this process to a file when it ends; with None to none."""
    global _path
    _path = None if path is None else path.absolute()


def write() -> None:
    """Append the line of this process, if attention was called in it; an error is only logged."""
    counted = counters.stats()
    if _path is None or counted == counters.Stats({}, ()):
        return
    row = {"program": sys.argv[0] if sys.argv else "", "pid": os.getpid(), **counted.to_dict()}
    try:
        # One write of a file that is opened to append isn't torn by those of other processes.
        file = os.open(_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            os.write(file, f"{json.dumps(row)}\n".encode())
        finally:
            os.close(file)
    except OSError as error:
        log.warning("%s: the stats of this process can't be written: %s", _path, error)


def _write_at_the_end_of_a_worker(_: object) -> None:
    # A forked worker ends without what `atexit` has; Python's own way out of one are finalizers.
    multiprocessing.util.Finalize(None, write, exitpriority=0)


def _forget_the_parents() -> None:
    if _path is not None:
        counters.reset_stats()


atexit.register(write)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_the_parents)
    multiprocessing.util.register_after_fork(write, _write_at_the_end_of_a_worker)
