"""Measuring one call on every backend that can run it: accuracy first, then time, all of them in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import cycle
from statistics import median
from typing import Any

import torch

from attnreg.core.contract.spec import AttentionSpec, Direction
from attnreg.core.registry.entry import Entry
from attnreg.core.times.kinds import kind_of, size_of
from attnreg.core.times.points import Measured, Point
from attnreg.errors import AttnregError
from attnreg.tools.measure import Sample
from attnreg.tools.measure.timing import Taken, Timer, calls_for, shuffled
from attnreg.tools.tuning.checks import TENSORS, Checks, TimeIsUpError, failed, kernels_for, reasons
from attnreg.tools.tuning.workload import case_of, copies

# Past the deadline the fewest rounds still run: a median of three ignores a round when the machine was slow.
ROUNDS, FEWEST_ROUNDS = 7, 3

# Long enough for the clock and short enough for many rounds; and fewer launches than a queue has room for.
ROUND_S, MOST_CALLS = 2e-3, 50

# A backend that takes this many times as long as the best is timed only once.
HOPELESS = 8.0

# Calls between the first call and the timed calls. They end early where a call takes `LONG_S`. A backend may
# prepare a launcher in its second call, which costs the host a millisecond.
SETTLING, LONG_S = 3, 0.05


@dataclass(slots=True)
class Runner:
    """One direction of a backend, ready to be timed: `run` makes a call, on each copy of its tensors in turn.

    `error` is the error of its check, `first_s` the seconds of its first call, `calls` the number of calls in
    a round, and `taken` the times of a call, by round.
    """

    name: str
    run: Callable[[], Any]
    error: float
    first_s: float = 0.0
    calls: int = 1
    taken: list[Taken] = field(default_factory=list)


class Measurement:
    """One call with its tensors, to be measured on all backends that can run it."""

    def __init__(
        self,
        spec: AttentionSpec,
        directions: Sequence[Direction],
        entries: Sequence[Entry],
        checks: Checks,
        timer: Timer,
        device: torch.device,
        deadline: float,
    ) -> None:
        self._spec, self._directions, self._entries, self._checks = spec, directions, entries, checks
        self._timer, self._device, self._deadline = timer, device, deadline
        self._case, self._inputs = case_of(spec), copies(spec, device)

    def points(self) -> Iterator[Point]:
        """Yield a point for each direction; past the deadline with the fewest rounds.

        Raises `DeviceLostError` if a kernel has left the GPU unusable, `TimeIsUpError` if the deadline came
        before each backend had been checked and called once.
        """
        for direction in self._directions:
            if results := self._results(direction):
                yield Point(kind_of(self._spec, direction), size_of(self._spec), results)

    def call_once(self) -> None:
        """Check and call every backend once, so that no measurement has to wait for it."""
        for direction in self._directions:
            for entry in self._entries:
                if not reasons(entry, self._spec, direction):
                    self._checks.of(entry, self._spec, direction)
                    self._first(Runner(entry.name, self._call(entry, direction), 0.0), direction)

    def _results(self, direction: Direction) -> dict[str, Measured]:
        results: dict[str, Measured] = {}
        runners: list[Runner] = []
        for entry in self._entries:
            if reasons(entry, self._spec, direction):
                continue
            if self._timer.now() > self._deadline:
                raise TimeIsUpError(f"{self._spec}: the time was up before {entry.name} was measured")
            try:
                verdict = self._checks.of(entry, self._spec, direction)
                wrong = verdict.wrong
                if not wrong:
                    runner = Runner(entry.name, self._call(entry, direction), verdict.error)
                    wrong = self._first(runner, direction)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - the other backends have to be measured
                results[entry.name] = failed(error, self._device)
                continue
            if wrong:
                results[entry.name] = Measured(wrong=wrong)
            else:
                runners.append(runner)
        self._take_turns(runners, results)
        for runner in runners:
            if runner.taken and runner.name not in results:
                results[runner.name] = Measured(
                    gpu_us=median(taken.device for taken in runner.taken) * 1e6,
                    host_us=median(taken.host for taken in runner.taken) * 1e6,
                    first_call_s=runner.first_s,
                    error=runner.error,
                )
        return results

    @torch.no_grad()
    def _take_turns(self, runners: list[Runner], results: dict[str, Measured]) -> None:
        """Time the backends in turn, so that a change of the machine's speed affects all alike."""
        in_turn = list(runners)
        for number in range(ROUNDS + 1):
            for runner in shuffled(in_turn):
                try:
                    runner.taken.append(self._timer.device_and_host(runner.run, runner.calls))
                except (Exception, SystemExit) as error:  # noqa: BLE001 - as above
                    results[runner.name] = failed(error, self._device)
                    in_turn.remove(runner)
            if number == 0:
                in_turn = _worth_it(in_turn)
            elif number >= FEWEST_ROUNDS and self._timer.now() > self._deadline:
                break

    @torch.no_grad()
    def _first(self, runner: Runner, direction: Direction) -> str:
        """Time a backend's first call and let it settle; return what is wrong with its results."""
        self._timer.wait()
        started = self._timer.now()
        returned = runner.run()
        self._timer.wait()
        took = self._timer.now() - started
        runner.first_s = self._checks.first_calls.setdefault((runner.name, self._spec, direction), took)
        if wrong := self._wrong(direction, returned):
            return wrong
        del returned
        for _ in range(SETTLING):
            started = self._timer.now()
            runner.run()
            self._timer.wait()
            if self._timer.now() - started > LONG_S:
                break
        return ""

    def _call(self, entry: Entry, direction: Direction) -> Callable[[], Any]:
        """Return what calls a kernel, the first time with the first copy."""
        arguments: list[tuple[Any, ...]]
        if direction == "forward":
            arguments = [(q, k, v, call._replace(grad_lse=None)) for q, k, v, _, call in self._inputs]
        else:
            both = zip(self._inputs, self._forwards, strict=True)
            arguments = [(grad, q, k, v, out, lse, call) for (q, k, v, grad, call), (out, lse) in both]
        kernel, turns = getattr(kernels_for(entry, self._spec, self._case), direction), cycle(arguments)
        return lambda: kernel(*next(turns))

    @cached_property
    def _forwards(self) -> list[Any]:
        """Output and LSE of each copy, from the first backend whose forward is correct."""
        problem: BaseException = AttnregError("no backend has a correct forward to go with it")
        for entry in self._entries:
            if reasons(entry, self._spec, "forward"):
                continue
            try:
                if self._checks.of(entry, self._spec, "forward").wrong:
                    continue
                with torch.no_grad():
                    forward = kernels_for(entry, self._spec, self._case).forward
                    results = [
                        forward(*inputs[:3], inputs.call._replace(grad_lse=None)) for inputs in self._inputs
                    ]
                if not self._wrong("forward", results[0]):
                    return results
            except (Exception, SystemExit) as error:  # noqa: BLE001 - the next backend may work
                problem = error
        raise problem

    @cached_property
    def _sample(self) -> Sample:
        return Sample(self._case, self._inputs[0], backward="backward" in self._directions)

    def _wrong(self, direction: Direction, results: Any) -> str:
        """Return what is wrong with the results of a call on the first copy; empty if nothing is."""
        names = TENSORS[direction]
        if self._case.counts_sinks:  # the gradient of sinks is one of all sequences
            results = results[: len(names)]
        try:
            return self._sample.verdict(dict(zip(names, results, strict=True))).wrong
        except torch.cuda.OutOfMemoryError:  # that of the check, not of the kernel
            return ""


def _worth_it(runners: list[Runner]) -> list[Runner]:
    """Return the backends to measure further.

    Their times of the first round are dropped as a warm-up. All others keep this single time.
    """
    best = min((runner.taken[0].device for runner in runners), default=0.0)
    kept = [runner for runner in runners if runner.taken[0].device <= HOPELESS * best]
    for runner in kept:
        runner.calls = calls_for(ROUND_S, max(*runner.taken.pop(), 1e-6), MOST_CALLS)
    return kept
