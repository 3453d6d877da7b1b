"""Measuring one call on every backend that can run it: accuracy first, then time, all of them in turn."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import cycle
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from attnreg.errors import AttnregError
from attnreg.measure import Sample
from attnreg.measure.timing import calls_for, shuffled
from attnreg.tuning.checks import TimeIsUpError, failed
from attnreg.tuning.kinds import kind_of, size_of
from attnreg.tuning.points import Measured, Point
from attnreg.tuning.workload import case_of, copies

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from attnreg.contract.discovery import Entry
    from attnreg.contract.spec import AttentionSpec, Direction
    from attnreg.measure import Case, Inputs
    from attnreg.measure.timing import Taken, Timer
    from attnreg.tuning.checks import Checks

ROUNDS = 7

# Long enough for the clock and short enough for many rounds; and fewer launches than a queue holds.
ROUND_S, MOST_CALLS = 2e-3, 50

# A backend that takes this many times as long as the best is timed only once.
HOPELESS = 8.0

# This many calls come between the first and those that count, unless they take long: a backend may prepare a
# launcher in its second call, which takes the host a millisecond.
SETTLING, LONG_S = 3, 0.05


@dataclass(slots=True)
class Runner:
    """One direction of one backend, ready to be timed.

    Attributes:
        entry: the backend.
        run: makes one call, on each copy of its tensors in turn.
        error: over that of plain PyTorch, as its check found.
        first_s: seconds of the first call.
        calls: how many calls make a round.
        taken: the times of one of them, by round.
    """

    entry: Entry
    run: Callable[[], Any]
    error: float
    first_s: float = 0.0
    calls: int = 1
    taken: list[Taken] = field(default_factory=list)

    def result(self) -> Measured:
        """Return the medians of the rounds."""
        return Measured(
            gpu_us=median(one.device for one in self.taken) * 1e6,
            host_us=median(one.host for one in self.taken) * 1e6,
            first_call_s=self.first_s,
            error=self.error,
        )


class AtSize:
    """The accuracy rule at the call's own size; the expected values are computed when first needed."""

    def __init__(self, case: Case, given: Inputs, backward: bool) -> None:
        self._case, self._given, self._backward = case, given, backward
        self._sample: Sample | None = None

    def wrong(self, direction: Direction, results: Any) -> str:
        """Return what is wrong with the results of a call on the first copy; empty if nothing is."""
        names = ("out", "lse") if direction == "forward" else ("dq", "dk", "dv")
        try:
            if self._sample is None:
                self._sample = Sample(self._case, self._given, backward=self._backward)
            return self._sample.verdict(dict(zip(names, results, strict=True))).wrong
        except torch.cuda.OutOfMemoryError:  # that of the check, not of the kernel
            return ""


def measured(
    spec: AttentionSpec,
    entries: Sequence[Entry],
    directions: Sequence[Direction],
    checks: Checks,
    timer: Timer,
    device: torch.device,
    deadline: float,
) -> Iterator[Point]:
    """Yield a point for each direction of a call; past the deadline with the fewest rounds.

    Raises:
        DeviceLostError: a kernel has left the GPU unusable.
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
            except (Exception, SystemExit) as error:  # noqa: BLE001 - the other backends have to be measured
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
    """Return the backends to go on with; the first round was their warm-up, and the others' only one."""
    best = min((one.taken[0].device for one in runners), default=0.0)
    kept = [one for one in runners if one.taken[0].device <= HOPELESS * best]
    for one in kept:
        one.calls = calls_for(ROUND_S, max(*one.taken.pop(), 1e-6), MOST_CALLS)
    return kept


def ready(
    spec: AttentionSpec,
    direction: Direction,
    entries: Sequence[Entry],
    inputs: list[Inputs],
    at_size: AtSize,
    checks: Checks,
    timer: Timer,
    device: torch.device,
    deadline: float,
    results: dict[str, Measured],
) -> Iterator[Runner]:
    """Yield the backends that pass the accuracy rule, after their first call; the others go into `results`.

    Raises:
        DeviceLostError: a kernel has left the GPU unusable.
        TimeIsUpError: the deadline came before each had been checked and called once.
    """
    forwards: list[Any] = []
    for entry in entries:
        if entry.reasons(spec, direction):
            continue
        if timer.now() > deadline:
            raise TimeIsUpError(f"{spec}: the time was up before {entry.name} was measured")
        try:
            verdict = checks.of(entry, spec, direction)
            if verdict.wrong:
                results[entry.name] = Measured(wrong=verdict.wrong)
                continue
            if direction == "backward" and not forwards:
                forwards = _forwards(spec, entries, inputs, checks, at_size)
            runner = Runner(entry, _call(entry, direction, inputs, forwards), verdict.error)
            if wrong := _first(runner, direction, at_size, timer):
                results[entry.name] = Measured(wrong=wrong)
                continue
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the other backends have to be measured
            results[entry.name] = failed(error, device)
        else:
            yield runner


def _first(runner: Runner, direction: Direction, at_size: AtSize, timer: Timer) -> str:
    """Time a backend's first call; return what is wrong with its results, or an empty string."""
    timer.wait()
    started = timer.now()
    returned = _once(runner.run)
    timer.wait()
    runner.first_s = timer.now() - started
    wrong = at_size.wrong(direction, returned)
    del returned
    if not wrong:
        _settle(runner, timer)
    return wrong


def _settle(runner: Runner, timer: Timer) -> None:
    for _ in range(SETTLING):
        started = timer.now()
        _once(runner.run)
        timer.wait()
        if timer.now() - started > LONG_S:
            break


def _call(entry: Entry, direction: Direction, inputs: list[Inputs], forwards: list[Any]) -> Callable[[], Any]:
    """Return what calls a kernel, the first time with the first copy."""
    kernel = entry.kernel(direction)
    copies = cycle(inputs)

    def forward() -> Any:
        q, k, v, _, call = next(copies)
        return kernel(q, k, v, call)

    both = cycle(zip(inputs, forwards, strict=True)) if direction == "backward" else cycle(())

    def backward() -> Any:
        (q, k, v, grad_out, call), (out, lse) = next(both)
        return kernel(grad_out, q, k, v, out, lse, call)

    return forward if direction == "forward" else backward


def _forwards(
    spec: AttentionSpec, entries: Sequence[Entry], inputs: list[Inputs], checks: Checks, at_size: AtSize
) -> list[Any]:
    """Return output and LSE of each copy, from the first backend whose forward is correct."""
    problem: BaseException = AttnregError("no backend has a correct forward to go with it")
    for entry in entries:
        if entry.reasons(spec, "forward"):
            continue
        try:
            if checks.of(entry, spec, "forward").wrong:
                continue
            with torch.no_grad():
                found = [entry.kernels().forward(*one[:3], one.call) for one in inputs]
            if not at_size.wrong("forward", found[0]):
                return found
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the next backend may work
            problem = error
    raise problem


def _once(run: Callable[[], Any]) -> Any:
    with torch.no_grad():
        return run()
