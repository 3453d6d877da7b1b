"""Measuring one call on every backend that can run it: right first, then how fast, all of them in turn."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from attnreg.errors import AttnregError
from attnreg.tuning.kinds import kind_of, size_of
from attnreg.tuning.points import Measured, Point
from attnreg.tuning.samples import astray
from attnreg.tuning.timing import Taken, repeats
from attnreg.tuning.workload import copies

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from attnreg.discovery import Direction, Entry
    from attnreg.spec import AttentionSpec
    from attnreg.tuning.checks import Checks
    from attnreg.tuning.timing import Timer
    from attnreg.tuning.workload import Copy

__all__ = ["DeviceLostError", "TimeIsUpError", "check_alive", "measured"]

ROUNDS = 7

# So many calls come between the first and those that count, unless they take long: a backend may watch its
# second to do the third faster (FA4 does), which takes the host a millisecond.
SETTLING, LONG_S = 3, 0.05

# A backend that takes so many times as long as the best is timed once and no more.
HOPELESS = 8.0


class DeviceLostError(AttnregError, RuntimeError):
    """A kernel has left the GPU unusable to this process."""


class TimeIsUpError(AttnregError, RuntimeError):
    """The time was spent before all backends had had their turn."""


@dataclass(slots=True)
class _Runner:
    """One direction of one backend, ready to be timed."""

    entry: Entry
    run: Callable[[int], Any]
    error: float
    first_s: float = 0.0
    calls: int = 1
    taken: list[Taken] = field(default_factory=list)

    def result(self) -> Measured:
        return Measured(
            gpu_us=median(one.gpu_us for one in self.taken),
            host_us=median(one.host_us for one in self.taken),
            first_call_s=self.first_s,
            error=self.error,
        )


def measured(
    spec: AttentionSpec,
    entries: Sequence[Entry],
    directions: Iterable[Direction],
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
    for direction in directions:
        results: dict[str, Measured] = {}
        runners = list(_ready(spec, direction, entries, inputs, checks, timer, device, deadline, results))
        _take_turns(runners, timer, device, deadline, results)
        if results:
            yield Point(kind_of(spec, direction), size_of(spec), results)


def _ready(
    spec: AttentionSpec,
    direction: Direction,
    entries: Sequence[Entry],
    inputs: list[Copy],
    checks: Checks,
    timer: Timer,
    device: torch.device,
    deadline: float,
    results: dict[str, Measured],
) -> Iterator[_Runner]:
    """Yield the backends that are right, after their first call; puts the others into the results."""
    forwards: list[Any] = []
    for entry in entries:
        if entry.reasons(spec, direction):
            continue
        if timer.now() > deadline:
            raise TimeIsUpError(f"{spec}: the time was spent before {entry.name} had its turn")
        try:
            verdict = checks.of(entry, spec, direction)
            if verdict.wrong:
                results[entry.name] = Measured(wrong=verdict.wrong)
                continue
            if direction == "backward" and not forwards:
                forwards = _forwards(spec, entries, inputs, checks)
            runner = _Runner(entry, _call(entry, direction, inputs, forwards), verdict.error)
            if wrong := _first(runner, direction, inputs[0], forwards[0] if forwards else (), timer):
                results[entry.name] = Measured(wrong=wrong)
                continue
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the others have to get their turn
            results[entry.name] = _failed(error, device)
        else:
            yield runner


def _first(runner: _Runner, direction: Direction, copy: Copy, forward: Any, timer: Timer) -> str:
    """Time a backend's first call; return in what it is wrong, or an empty string."""
    timer.wait()
    started = timer.now()
    returned = _once(runner.run)
    timer.wait()
    runner.first_s = timer.now() - started
    wrong = _looked_at(direction, copy, returned, forward)
    del returned
    if not wrong:
        _settle(runner, timer)
    return wrong


def _settle(runner: _Runner, timer: Timer) -> None:
    for _ in range(SETTLING):
        started = timer.now()
        _once(runner.run)
        timer.wait()
        if timer.now() - started > LONG_S:
            break


def _looked_at(direction: Direction, copy: Copy, returned: Any, forward: Any = ()) -> str:
    try:
        return astray(direction, copy, returned, forward)
    except torch.cuda.OutOfMemoryError:  # that of the look, not of the kernel
        return ""


def _call(
    entry: Entry, direction: Direction, inputs: list[Copy], forwards: list[Any]
) -> Callable[[int], Any]:
    kernel, count = entry.kernel(direction), len(inputs)

    def forward(number: int) -> Any:
        q, k, v, _, call = inputs[number % count]
        return kernel(q, k, v, call)

    def backward(number: int) -> Any:
        q, k, v, grad_out, call = inputs[number % count]
        out, lse = forwards[number % count]
        return kernel(grad_out, q, k, v, out, lse, call)

    return forward if direction == "forward" else backward


def _forwards(spec: AttentionSpec, entries: Sequence[Entry], inputs: list[Copy], checks: Checks) -> list[Any]:
    """Return output and LSE of each copy, from the first backend whose forward is right."""
    problem: BaseException = AttnregError("no backend has a right forward to go with it")
    for entry in entries:
        if entry.reasons(spec, "forward"):
            continue
        try:
            if checks.of(entry, spec, "forward").wrong:
                continue
            with torch.no_grad():
                found = [entry.kernels().forward(*one[:3], one.call) for one in inputs]
            if not _looked_at("forward", inputs[0], found[0]):
                return found
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the next one may do
            problem = error
    raise problem


def _once(run: Callable[[int], Any]) -> Any:
    with torch.no_grad():
        return run(0)


def _take_turns(
    runners: list[_Runner], timer: Timer, device: torch.device, deadline: float, results: dict[str, Measured]
) -> None:
    """Time the backends in turn, so that a machine's moods meet them alike."""
    in_turn = list(runners)
    for number in range(ROUNDS + 1):
        for runner in in_turn[:: 1 if number % 2 else -1]:
            try:
                with torch.no_grad():
                    taken = timer.each(runner.run, runner.calls)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - as above
                results[runner.entry.name] = _failed(error, device)
                in_turn.remove(runner)
                continue
            runner.taken.append(taken)
        if number == 0:
            in_turn = _worth_it(in_turn)
        if number and timer.now() > deadline:
            break
    found = {one.entry.name: one.result() for one in runners if one.taken}
    results.update({name: one for name, one in found.items() if name not in results})


def _worth_it(runners: list[_Runner]) -> list[_Runner]:
    """Return those to go on with: the first time was a warm-up, and is all that the others get."""
    best = min((one.taken[0].gpu_us for one in runners), default=0.0)
    going_on = [one for one in runners if one.taken[0].gpu_us <= HOPELESS * best]
    for one in going_on:
        one.calls = repeats(one.taken.pop())
    return going_on


def _failed(error: BaseException, device: torch.device) -> Measured:
    """Return the row of a backend that raised.

    Raises:
        DeviceLostError: it has left the GPU unusable.
    """
    check_alive(device, error)
    return Measured(failed=_told(error))


def check_alive(device: torch.device, error: BaseException) -> None:
    """Check that what a backend raised has left the device usable, and free what it can.

    Raises:
        DeviceLostError: it hasn't.
    """
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except Exception as lost:
        raise DeviceLostError(f"the GPU can't be used any more after {_told(error)}") from lost
    with suppress(Exception):
        torch.cuda.empty_cache()


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip().partition("\n")[0]
