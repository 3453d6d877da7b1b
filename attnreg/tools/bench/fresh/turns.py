"""A row of the benchmark: its sides take turns, and no two calls of a row have the same lengths.

So no earlier call, of this side or another, has prepared anything for the lengths of a call. A time is the
time of a single call, with a wait for the device before and after. On a CPU it is the thread's CPU time.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnreg.core.dispatch.counters import reset_stats
from attnreg.tools.bench.compare import short
from attnreg.tools.bench.report import Job
from attnreg.tools.bench.shapes import FORWARD
from attnreg.tools.bench.sides import ran, who_ran, wrong_backend
from attnreg.tools.measure.sample import Verdict
from attnreg.tools.measure.timing import interleaved, timer_for

Run = Callable[[], list[Tensor]]

SAME, NEW = "same", "new"
# The number of a side's first calls, which are timed apart. The last `CHECKED` of them are compared with
# float64. So is one more call, of a batch that has run so often.
FIRST, CHECKED = 8, 3
# A turn has `WARM_UP` calls that don't count, because another side may have changed the settings, and `EACH`
# calls that count. A side's first turn doesn't count at all.
WARM_UP, EACH = 30, 20
# A turn of slow calls ends after so many seconds, once some count. They count from half of that time on.
TURN_SECONDS, FEWEST = 4.0, 5


class Stream(NamedTuple):
    """The source of a turn's batches: each call gets a new batch, or all calls repeat the same.

    A stream that repeats draws a batch before each call as well, and drops it. Drawing leaves the processor's
    caches cold, as the rest of a program does. Without it the same small call takes half to two thirds of the
    time, so that even torch's own function would seem slower with new lengths.
    """

    draw: Callable[[], Any]
    repeats: bool = False


@dataclass(frozen=True)
class Way:
    """One side.

    Attributes:
        prepared: returns the call for a batch; it returns what `FreshRow.verdict` takes.
        within: the context of a turn.
        wanted: the backend that has to run every call, if only one may.
        is_control: whether it computes no attention.
    """

    prepared: Callable[[Any], Run]
    within: Callable[[], AbstractContextManager[Any]]
    wanted: str = ""
    is_control: bool = False


@dataclass(frozen=True)
class FreshRow:
    """One kind of call, made by several sides.

    Attributes:
        part: The part of the command.
        case: A description of the calls.
        step: forward, or forward + backward.
        sides: The sides by name.
        streams: The streams by name. The first stream repeats a batch.
        verdict: Returns how wrong the results of a batch are.
        touch: Reads what a prepared call of a batch reads. Otherwise new tensors, which were just written,
            would lie in a cache of the device, and tensors of a batch that repeats would not.
        yardstick: The name of the side to compare with. No side may have it.
    """

    part: str
    case: str
    step: str
    sides: Mapping[str, Way]
    streams: Mapping[str, Stream]
    verdict: Callable[[Any, list[Tensor]], Verdict]
    touch: Callable[[Any], object]
    yardstick: str = ""

    def __str__(self) -> str:
        return f"{self.case}, {self.step}"


class _WrongError(Exception):
    """A side's results break the accuracy rule, or another backend ran."""


class _Turns:
    """What is made of one side of a row: its first calls, its turns, and its checks."""

    def __init__(self, row: FreshRow, name: str, device: torch.device) -> None:
        self._row, self._side = row, row.sides[name]
        self._wait = timer_for(device).wait
        self._now = time.thread_time if device.type == "cpu" else timer_for(device).now
        self.first: list[float] = []  # the seconds of the first calls
        self.error = 0.0  # the largest, in units of the most that passes
        self.ran: dict[str, dict[str, None]] = {}  # what ran in the turns of each stream, in words

    def begin(self) -> None:
        """Make the first calls, all of new lengths, and compare some with float64."""
        _, new = list(self._row.streams.values())[:2]
        reset_stats()
        with self._side.within():
            for number in range(FIRST):
                batch = new.draw()
                seconds, results = self._time(self._side.prepared(batch))
                self.first.append(seconds)
                if number >= FIRST - CHECKED:
                    self._compare(batch, results)
            run = self._side.prepared(batch)
            for _ in range(CHECKED):
                _, results = self._time(run)
            self._compare(batch, results)
        backends = ran()
        if self._row.step == FORWARD:
            del backends["backward"]
        if self._side.wanted and (why := wrong_backend(self._side.wanted, backends)):
            raise _WrongError(why)

    def turn(self, name: str) -> list[float]:
        """Take a turn with a stream; returns the seconds of each call that counts."""
        stream = self._row.streams[name]
        taken: list[float] = []
        begun, run = time.monotonic(), None
        reset_stats()
        with self._side.within():
            for number in range(WARM_UP + EACH):
                newest = stream.draw()
                if run is None or not stream.repeats:
                    batch, run = newest, self._side.prepared(newest)
                self._row.touch(batch)
                seconds, _ = self._time(run)
                lasts = time.monotonic() - begun
                if number >= WARM_UP or lasts > TURN_SECONDS / 2:
                    taken.append(seconds)
                if len(taken) >= FEWEST and lasts > TURN_SECONDS:
                    break
        self.ran.setdefault(name, {})[who_ran(self._row.step, ran())] = None
        return taken

    def end(self) -> None:
        """Compare one further call of new lengths with float64."""
        batch = list(self._row.streams.values())[1].draw()
        reset_stats()
        with self._side.within():
            self._compare(batch, self._time(self._side.prepared(batch))[1])

    def _time(self, run: Run) -> tuple[float, list[Tensor]]:
        """Return the seconds of a call until the device has finished, and its results."""
        self._wait()
        started = self._now()
        results = run()
        self._wait()
        return self._now() - started, results

    def _compare(self, batch: Any, results: list[Tensor]) -> None:
        if self._side.is_control:
            return
        error, wrong = self._row.verdict(batch, results)
        if wrong:
            raise _WrongError(f"WRONG: {wrong}; ran {who_ran(self._row.step, ran())}")
        self.error = max(self.error, error)


def measured(row: FreshRow, job: Job) -> list[dict[str, Any]]:
    """Check each side, time the sides that are right, and check these once more.

    Returns a dictionary for each side and stream; times are milliseconds.
    """
    sides = {name: _Turns(row, name, job.device) for name in row.sides}
    _keep_right(row, sides, _Turns.begin, job)
    each = itertools.product(sides, row.streams)
    taken = interleaved(
        {(name, stream): functools.partial(sides[name].turn, stream) for name, stream in each}, job.rounds
    )
    _keep_right(row, sides, _Turns.end, job, "after the measurement: ")
    times = {key: list(itertools.chain(*rounds)) for key, rounds in taken.items() if key[0] in sides}
    return [
        {
            "part": row.part, "case": row.case, "step": row.step, "side": name, "stream": stream,
            **_figures(times, name, stream, next(iter(row.streams)), row.yardstick),
            "first": [seconds * 1e3 for seconds in sides[name].first], "error": sides[name].error,
            "ran": "; ".join(sides[name].ran[stream]),
        }
        for name, stream in times
    ]  # fmt: skip


def _keep_right(
    row: FreshRow, sides: dict[str, _Turns], check: Callable[[_Turns], None], job: Job, when: str = ""
) -> None:
    """Check all sides, drop those that are wrong, and record why."""
    for name, side in list(sides.items()):
        try:
            check(side)
        except Exception as problem:  # noqa: BLE001 - one side that breaks must not hide the others
            why = str(problem) if isinstance(problem, _WrongError) else short(problem)
            job.leave_out(f"{row}, {name}", f"{when}{why}")
            del sides[name]


def _figures(
    times: Mapping[tuple[str, str], list[float]], name: str, stream: str, same: str, yardstick: str
) -> dict[str, Any]:
    here = times[name, stream]
    middle = statistics.median(here)
    against = times.get((yardstick, stream))
    return {
        "milliseconds": middle * 1e3,
        "p95": statistics.quantiles(here, n=20, method="inclusive")[-1] * 1e3,
        "slowest": max(here) * 1e3,
        "calls": len(here),
        "over_same": middle / statistics.median(times[name, same]),
        "over_yardstick": middle / statistics.median(against) if against else None,
        "yardstick": yardstick,
    }
