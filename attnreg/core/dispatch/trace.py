"""Recording what calls there were: each distinct spec once, with how often it ran.

A plan's counters get one more for its spec when the plan is made, so a call pays one addition. The file is
written when recording or the program ends. A thread writes it in between: after two seconds, then in every
minute in which something ran. So a program that is killed leaves most of its calls.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from attnreg.core import registry
from attnreg.core.contract.spec import AttentionSpec, Direction
from attnreg.core.dispatch import counters as counters_of_process
from attnreg.core.dispatch.counters import Counter, collect
from attnreg.core.times.traces import merge
from attnreg.core.torchlib.call_sites import call_site
from attnreg.core.torchlib.locks import open_after_fork
from attnreg.core.torchlib.process_end import call_at_end
from attnreg.errors import AttnregError

log = logging.getLogger("attnreg")

SECONDS_BEFORE, SECONDS_BETWEEN = 2.0, 60.0
# How long the thread waits for another process that is writing, and how long the end of the program does. A
# large file takes two seconds and a half.
PATIENCE_BETWEEN, PATIENCE_AT_THE_END = 4.0, 10.0

# A program that never repeats a length mustn't grow a row for each without end.
MOST_SPECS = 100_000

_lock = open_after_fork(threading.RLock())
_writing = open_after_fork(threading.RLock())
_recordings: tuple[Recording, ...] = ()
_followed: Recording | None = None


@dataclass(eq=False)
class Recording:
    """One file and what is counted for it.

    Attributes:
        path: the file.
        counted: the counter of each direction of each spec.
        written: what of each counter is in the file.
        full: whether calls were left out, as there were too many.
        failed: whether writing has failed, which is logged once.
        over: set when it ends.
        bypassed: how many calls of PyTorch's function no router saw, by torch's kernel and the reason.
    """

    path: Path
    counted: dict[tuple[AttentionSpec, Direction], Counter] = field(default_factory=dict)
    written: dict[tuple[AttentionSpec, Direction], int] = field(default_factory=dict)
    full: bool = False
    failed: bool = False
    over: threading.Event = field(default_factory=threading.Event)
    bypassed: collections.Counter[tuple[str, str]] = field(default_factory=collections.Counter)

    def counter(self, spec: AttentionSpec, direction: Direction) -> Counter | None:
        """Return the counter of one direction of a spec; None if there are too many specs."""
        place = replace(spec, device=replace(spec.device, index=None)), direction
        if place not in self.counted and len(self.counted) >= MOST_SPECS:
            if not self.full:
                log.warning("%s: has %d distinct calls, more are not recorded", self.path, MOST_SPECS)
            self.full = True
            return None
        return self.counted.setdefault(place, Counter())

    def write(self, seconds: float = PATIENCE_AT_THE_END) -> None:
        """Add what was counted since the last time; raises `ConfigError` as `traces.merge` does.

        Waiting for another thread that is writing counts among the seconds.
        """
        end = time.monotonic() + seconds
        with _writing:
            collect()
            with _lock:  # not for as long as the file takes: calls wait for it
                now = {place: counter.value for place, counter in self.counted.items()}
            fresh = {place: n - self.written.get(place, 0) for place, n in now.items()}
            if fresh := {place: n for place, n in fresh.items() if n}:
                # Before the file has them: a signal handler may write this recording meanwhile.
                before, self.written = self.written, now
                try:
                    merge(self.path, fresh, max(end - time.monotonic(), 0.0))
                except BaseException:
                    self.written = before
                    raise

    def say_what_it_lacks(self) -> None:
        """Log what was called and can't be in the file, as no router saw it; once."""
        lacks, self.bypassed = self.bypassed, collections.Counter()
        if lacks:
            runs = (f"{n} that {kernel} ran ({reason})" for (kernel, reason), n in lacks.most_common())
            log.warning("%s lacks calls that attnreg never saw: %s", self.path, "; ".join(runs))


def count_bypassed(
    op: str, kernel: str, reason: str, tensors: Iterable[Tensor], find_site: Callable[[], str] = call_site
) -> Counter:
    """Count a call that no router saw, for `stats` and for what recordings say; return its counter.

    The arguments are as for `counters.bypassed`: `tensors` are query, key and value, of any shapes.
    """
    counter = counters_of_process.bypassed(op, kernel, reason, tensors, find_site)
    for recording in _recordings:
        recording.bypassed[kernel, reason] += 1
    return counter


def is_recording() -> bool:
    """Whether calls are counted by their specs."""
    return bool(_recordings)


def counters(spec: AttentionSpec, direction: Direction) -> tuple[Counter, ...]:
    """Return what a new plan of that spec has to count for the recordings; none if there are none."""
    if not _recordings:
        return ()
    with _lock:
        counters_or_none = (recording.counter(spec, direction) for recording in _recordings)
        return tuple(counter for counter in counters_or_none if counter is not None)


def start(path: Path) -> Recording:
    """Record into a file from now on."""
    global _recordings
    with _lock:
        recording = Recording(path)
        _recordings = (*_recordings, recording)
        registry.changed()  # plans that exist don't count for it
        with suppress(RuntimeError):  # there can be no more threads: it is written when it ends
            threading.Thread(
                target=_keep_writing, args=(recording,), name="attnreg recording", daemon=True
            ).start()
        return recording


def stop(recording: Recording) -> None:
    """Record no longer; what was counted isn't written by this."""
    global _recordings
    with _lock:
        recording.over.set()
        _recordings = tuple(other for other in _recordings if other is not recording)
        registry.changed()


def follow(path: Path | None) -> None:
    """Record for the environment, until another file or None is given."""
    global _followed
    with _lock:
        if path == (None if _followed is None else _followed.path):
            return
        before, _followed = _followed, None
        if before is not None:
            stop(before)
        if path is not None:
            _followed = start(path)
    if before is not None:
        _write(before)
        before.say_what_it_lacks()


def _keep_writing(recording: Recording) -> None:
    pause = SECONDS_BEFORE
    while not recording.over.wait(pause):
        _write(recording, PATIENCE_BETWEEN)
        pause = SECONDS_BETWEEN


def _write(recording: Recording, seconds: float = PATIENCE_AT_THE_END) -> None:
    try:
        recording.write(seconds)
    except AttnregError as error:  # not a reason to lose a training run
        log.log(logging.DEBUG if recording.failed else logging.WARNING, "%s", error)
        recording.failed = True


def _forget_the_parents() -> None:
    """Begin at zero in a forked child: what was counted before is its parent's to write."""
    collect()
    for recording in _recordings:
        recording.written = {place: counter.value for place, counter in recording.counted.items()}
        recording.bypassed.clear()


def _at_exit() -> None:
    if _followed is not None:
        _write(_followed)
        _followed.say_what_it_lacks()


call_at_end(_at_exit, _forget_the_parents)
