"""Compiles kernels in several processes before they are measured.

FA4 compiles each kind of call for seconds, on one core, and keeps the kernels on disk. In one process that is
most of the time of `attnreg tune`, so that two minutes were enough for 18 of 60 calls on an H100.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from math import inf
from multiprocessing.process import BaseProcess

import torch

from attnreg.core import registry
from attnreg.core.contract.spec import AttentionSpec, directions_of
from attnreg.core.registry.entry import Entry
from attnreg.core.times.kinds import kind_of
from attnreg.tools.measure.timing import timer_for
from attnreg.tools.tuning.checks import Checks
from attnreg.tools.tuning.measure import Measurement

# Starting a process takes as long as compiling a few kinds.
FEWEST, MOST_PROCESSES = 4, 8
# The share of a budget that compiling may take; and seconds, where there is no budget.
SHARE, LONGEST_S = 0.4, 600.0

Group = list[AttentionSpec]


def compile_ahead(
    specs: Iterable[AttentionSpec],
    entries: Iterable[Entry],
    seconds: float,
    meanwhile: Callable[[Callable[[], bool]], None] | None = None,
) -> int:
    """Call each backend that compiles once for each of these calls, in processes; return how many were used.

    Returns 0 at once where it isn't worth it: no such backend, few kinds of calls, few cores. What isn't done
    within a share of `seconds` is compiled when it is called, as everything is without this. `meanwhile` is
    called in this process as soon as the others run, with what tells whether they still do.
    """
    names = [entry.name for entry in entries if entry.backend is not None and entry.backend.compiles]
    groups: dict[object, Group] = {}
    for spec in specs:
        groups.setdefault(kind_of(spec, "forward"), []).append(spec)
    count = min(MOST_PROCESSES, (os.cpu_count() or 1) // 2, len(groups))
    if not names or len(groups) < FEWEST or count < 2:
        return 0
    context, waiting = multiprocessing.get_context("spawn"), list(groups.values())
    # Every count-th: the kinds come in the order of their value, and those after each other are alike.
    shares = [waiting[number::count] for number in range(count)]
    processes: list[BaseProcess] = [context.Process(target=_work, args=(names, share)) for share in shares]
    deadline = time.monotonic() + min(seconds * SHARE, LONGEST_S)
    try:
        for process in processes:
            process.start()
        if meanwhile is not None:
            meanwhile(
                lambda: time.monotonic() < deadline and any(process.is_alive() for process in processes)
            )
        for process in processes:
            process.join(max(deadline - time.monotonic(), 0.0))
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
                process.join()
    return count


def _work(names: Sequence[str], groups: Sequence[Group]) -> None:
    """Make the calls. Errors are ignored: the measurement has the same error again, and reports it."""
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123 - a device
        os.dup2(nowhere.fileno(), sys.stderr.fileno())
    torch.set_num_threads(1)
    known = registry.entries()
    checks: dict[torch.device, Checks] = {}
    # A backend that the program has registered itself is unknown in this process.
    entries = [known[name.casefold()] for name in names if name.casefold() in known]
    for spec in (spec for group in groups for spec in group):
        device = torch.device(spec.device.type, spec.device.index or 0)
        for entry in entries:
            with contextlib.suppress(Exception):
                _call_once(entry, spec, device, checks.setdefault(device, Checks(device)))


def _call_once(entry: Entry, spec: AttentionSpec, device: torch.device, checks: Checks) -> None:
    """Make a backend compile what a measurement of the call will run: its check, and the call itself."""
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        Measurement(spec, directions_of(spec), [entry], checks, timer_for(device), device, inf).call_once()
