"""Measuring one call on every backend that can run it: accuracy first, then time, all of them in turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnreg.measure.timing import calls_for, shuffled
from attnreg.tuning.failures import failed
from attnreg.tuning.kinds import kind_of, size_of
from attnreg.tuning.points import Measured, Point
from attnreg.tuning.runners import AtSize, ready
from attnreg.tuning.workload import case_of, copies

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from attnreg.contract.discovery import Entry
    from attnreg.contract.spec import AttentionSpec, Direction
    from attnreg.measure.timing import Timer
    from attnreg.tuning.checks import Checks
    from attnreg.tuning.runners import Runner

__all__ = ["measured"]

ROUNDS = 7

# Long enough for the clock and short enough for many rounds; and fewer launches than a queue holds.
ROUND_S, MOST_CALLS = 2e-3, 50

# A backend that takes so many times as long as the best is timed once and no more.
HOPELESS = 8.0


def measured(
    spec: AttentionSpec,
    entries: Sequence[Entry],
    directions: Sequence[Direction],
    checks: Checks,
    timer: Timer,
    device: torch.device,
    deadline: float,
) -> Iterator[Point]:
    """Yield a point for each direction of a call; past the deadline with as few rounds as will do.

    Raises:
        DeviceLostError: a kernel broke the GPU, so that nothing can be measured any more.
        TimeIsUpError: the deadline came before each backend had been checked and called once.
    """
    inputs = copies(spec, device)
    at_size = AtSize(case_of(spec), inputs[0], backward="backward" in directions)
    for direction in directions:
        results: dict[str, Measured] = {}
        runners = list(
            ready(spec, direction, entries, inputs, at_size, checks, timer, device, deadline, results)
        )
        _take_turns(runners, timer, device, deadline, results)
        if results:
            yield Point(kind_of(spec, direction), size_of(spec), results)


def _take_turns(
    runners: list[Runner], timer: Timer, device: torch.device, deadline: float, results: dict[str, Measured]
) -> None:
    """Time the backends in turn, so that a change of the machine's speed affects all alike."""
    in_turn = list(runners)
    for number in range(ROUNDS + 1):
        for runner in shuffled(in_turn):
            try:
                with torch.no_grad():
                    taken = timer.device_and_host(runner.run, runner.calls)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - the others have to get their turn
                results[runner.entry.name] = failed(error, device)
                in_turn.remove(runner)
                continue
            runner.taken.append(taken)
        if number == 0:
            in_turn = _worth_it(in_turn)
        if number and timer.now() > deadline:
            break
    found = {one.entry.name: one.result() for one in runners if one.taken}
    results.update({name: one for name, one in found.items() if name not in results})


def _worth_it(runners: list[Runner]) -> list[Runner]:
    """Return those to go on with: the first time was a warm-up, and is all that the others get."""
    best = min((one.taken[0].device for one in runners), default=0.0)
    going_on = [one for one in runners if one.taken[0].device <= HOPELESS * best]
    for one in going_on:
        one.calls = calls_for(ROUND_S, max(*one.taken.pop(), 1e-6), MOST_CALLS)
    return going_on
