"""A row of the benchmark: its sides take turns, and no two calls of a row have the same lengths.

So no earlier call, of this side or another, has prepared anything for the lengths of a call. A time is the
time of a single call, with a wait for the device before and after. On a CPU it is the thread's CPU time.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnreg.core.dispatch.counters import call_counts, reset_stats
from attnreg.tools.bench.compare import short
from attnreg.tools.bench.report import Job
from attnreg.tools.bench.shapes import FORWARD
from attnreg.tools.bench.sides import wrong_backend
from attnreg.tools.measure.sample import Verdict
from attnreg.tools.measure.timing import interleaved, timer_for

Run = Callable[[], list[Tensor]]

SAME, NEW = "same", "new"
# The number of a side's first calls, which are timed apart. The last `CHECKED` of them are compared with
# float64. So is one more call, of a batch that has run so often.
FIRST, CHECKED = 8, 3
# A turn has `WARM_UP` calls that don't count, because another side may have changed the settings, and `EACH`
# calls that count. A side's first turn doesn't count at all.
WARM_UP, EACH = 5, 20
# A turn of slow calls ends after so many seconds, once some calls count.
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
        yardstick: The name of the side to compare with. No side may have it.
    """

    part: str
    case: str
    step: str
    sides: Mapping[str, Way]
    streams: Mapping[str, Stream]
    verdict: Callable[[Any, list[Tensor]], Verdict]
    yardstick: str = ""

    def __str__(self) -> str:
        return f"{self.case}, {self.step}"


class First(NamedTuple):
    """The seconds of a side's first calls, and its largest error in units of the most that passes."""

    seconds: list[float]
    error: float


class _WrongError(Exception):
    """A side's results break the accuracy rule, or another backend ran."""


class _Clock:
    """Times one call."""

    def __init__(self, device: torch.device) -> None:
        self._wait = timer_for(device).wait
        self._now = time.thread_time if device.type == "cpu" else timer_for(device).now

    def time(self, run: Run) -> tuple[float, list[Tensor]]:
        """Return the seconds of a call until the device has finished, and its results."""
        self._wait()
        started = self._now()
        results = run()
        self._wait()
        return self._now() - started, results


class _Turns:
    """The turns of a side with a stream, and which backends ran in them."""

    def __init__(self, side: Way, stream: Stream, clock: _Clock) -> None:
        self._side, self._stream, self._clock = side, stream, clock
        self.ran: dict[str, set[str]] = {"forward": set(), "backward": set()}

    def __call__(self) -> list[float]:
        """Take a turn; returns the seconds of each call that counts."""
        taken: list[float] = []
        end, run = time.monotonic() + TURN_SECONDS, None
        reset_stats()
        with self._side.within():
            for number in range(WARM_UP + EACH):
                batch = self._stream.draw()
                if run is None or not self._stream.repeats:
                    run = self._side.prepared(batch)
                seconds, _ = self._clock.time(run)
                if number >= WARM_UP:
                    taken.append(seconds)
                if len(taken) >= FEWEST and time.monotonic() > end:
                    break
        for direction, names in _ran().items():
            self.ran[direction] |= names
        return taken


def measured(row: FreshRow, job: Job) -> list[dict[str, Any]]:
    """Check each side, time the sides that are right, and check these once more.

    Returns a dictionary for each side and stream; times are milliseconds.
    """
    clock = _Clock(job.device)
    first = {}
    for name, side in row.sides.items():
        try:
            first[name] = _first_calls(row, side, clock)
        except Exception as problem:  # noqa: BLE001 - one side that breaks must not hide the others
            job.leave_out(f"{row}, {name}", _why(problem))
    turns = {
        (name, stream): _Turns(row.sides[name], row.streams[stream], clock)
        for name in first
        for stream in row.streams
    }
    taken = interleaved(turns, job.rounds)
    for name in list(first):
        try:
            _check(row, row.sides[name], clock)
        except Exception as problem:  # noqa: BLE001
            job.leave_out(f"{row}, {name}", f"after the measurement: {_why(problem)}")
            del first[name]
    times = {key: list(itertools.chain(*rounds)) for key, rounds in taken.items() if key[0] in first}
    return [
        {
            "part": row.part, "case": row.case, "step": row.step, "side": name, "stream": stream,
            **_figures(times, name, stream, next(iter(row.streams)), row.yardstick),
            "first": [seconds * 1e3 for seconds in first[name].seconds], "error": first[name].error,
            "ran": _in_words(turns[name, stream].ran, row.step),
        }
        for name, stream in times
    ]  # fmt: skip


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


def _first_calls(row: FreshRow, side: Way, clock: _Clock) -> First:
    """Make a side's first calls, all of new lengths, and compare some with float64."""
    _, new = list(row.streams.values())[:2]
    taken, errors = [], []
    reset_stats()
    with side.within():
        for number in range(FIRST):
            batch = new.draw()
            seconds, results = clock.time(side.prepared(batch))
            taken.append(seconds)
            if number >= FIRST - CHECKED:
                errors.append(_error(row, side, batch, results))
        run = side.prepared(batch)
        for _ in range(CHECKED):
            _, results = clock.time(run)
        errors.append(_error(row, side, batch, results))
    directions = _ran() if row.step != FORWARD else {FORWARD: _ran()[FORWARD]}
    ran = {direction: "+".join(sorted(names)) or "torch" for direction, names in directions.items()}
    if side.wanted and (why := wrong_backend(side.wanted, ran)):
        raise _WrongError(why)
    return First(taken, max(errors))


def _check(row: FreshRow, side: Way, clock: _Clock) -> None:
    """Compare one further call of new lengths with float64."""
    batch = list(row.streams.values())[1].draw()
    with side.within():
        _error(row, side, batch, clock.time(side.prepared(batch))[1])


def _error(row: FreshRow, side: Way, batch: Any, results: list[Tensor]) -> float:
    if side.is_control:
        return 0.0
    error, wrong = row.verdict(batch, results)
    if wrong:
        raise _WrongError(f"WRONG: {wrong}; ran {_in_words(_ran(), row.step)}")
    return error


def _why(problem: Exception) -> str:
    return str(problem) if isinstance(problem, _WrongError) else short(problem)


def _ran() -> dict[str, set[str]]:
    """Return which backends ran in each direction since the counters were last set to zero."""
    calls = call_counts()
    return {
        direction: {name for name, counts in calls.items() if counts[direction]}
        for direction in ("forward", "backward")
    }


def _in_words(ran: Mapping[str, set[str]], step: str) -> str:
    """Return what ran, the backward apart where that was another; where nothing is counted, torch's own."""
    forward, backward = ("+".join(sorted(ran[direction])) or "torch" for direction in ("forward", "backward"))
    return forward if step == FORWARD or forward == backward else f"{forward}, {backward}"
