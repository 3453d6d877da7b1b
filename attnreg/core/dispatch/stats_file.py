"""`ATTNREG_STATS` and `ATTNREG_REPORT`: each process adds a line with what ran in it to a file, when it ends.

A line is JSON: `program`, `pid` and the fields of `Stats.to_dict`; for a report `report` besides, what was
timed. Processes append whole lines, so that they need no lock. A full disk may cut a line off: that spoils no
other line, and readers leave it out.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from attnreg.core.dispatch import counters, timed
from attnreg.core.torchlib.process_end import call_at_end

log = logging.getLogger("attnreg")

_NONE: tuple[Path | None, Path | None] = (None, None)
_paths = _NONE
_written: tuple[Path | None, Path | None] | None = None  # the files that have the line of this process


def follow(stats: Path | None, report: Path | None) -> None:
    """Write the line of this process to these files when it ends; with None to none."""
    global _paths
    timed.follow(report is not None)
    if (stats, report) != _written:  # settings may be read again while the process ends
        _paths = stats, report


def write() -> None:
    """Append the line of this process, if attention was called in it, once; an error is only logged."""
    global _paths, _written
    counted, (stats, report) = counters.stats(), _paths
    if not any(_paths) or counted == counters.Stats({}, ()):
        return
    _written, _paths = _paths, _NONE
    row = {"program": sys.argv[0] if sys.argv else "", "pid": os.getpid(), **counted.to_dict()}
    if stats is not None:
        _append(stats, row)
    if report is not None:
        _append(report, {**row, "report": timed.to_dict()})


def _append(path: Path, row: dict[str, Any]) -> None:
    line = f"{json.dumps(row)}\n".encode()
    try:
        if not _ends_a_line(path):
            line = b"\n" + line
        # A single write in append mode isn't torn by writes of other processes.
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            while line:  # a write that the disk has no room for is cut off, and only the next is an error
                line = line[os.write(file, line) :]
        finally:
            os.close(file)
    except OSError as error:
        log.warning("%s: the stats of this process can't be written: %s", path, error)


def _ends_a_line(path: Path) -> bool:
    """Whether a file is empty, missing, or ends with a whole line."""
    if not path.exists() or not path.stat().st_size:
        return True
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def _forget_the_parents() -> None:
    global _written
    _written = None
    if any(_paths):
        counters.reset_stats()
        timed.forget()


call_at_end(write, _forget_the_parents)
