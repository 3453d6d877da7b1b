"""The backends that can run a call, each checked and called for the first time, ready to be timed."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from attnreg.errors import AttnregError
from attnreg.tuning.failures import TimeIsUpError, failed
from attnreg.tuning.points import Measured
from attnreg.tuning.samples import astray

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from attnreg.contract.discovery import Entry
    from attnreg.contract.spec import AttentionSpec, Direction
    from attnreg.tuning.checks import Checks
    from attnreg.tuning.timing import Taken, Timer
    from attnreg.tuning.workload import Copy

__all__ = ["Runner", "ready"]

# So many calls come between the first and those that count, unless they take long: a backend may watch its
# second to do the third faster (FA4 does), which takes the host a millisecond.
SETTLING, LONG_S = 3, 0.05


@dataclass(slots=True)
class Runner:
    """One direction of one backend, ready to be timed.

    Attributes:
        entry: the backend.
        run: makes the call of that number; the numbers go round the copies of its tensors.
        error: over that of plain PyTorch, as its check found.
        first_s: seconds of the first call.
        calls: how many make a round.
        taken: what one of them took, by round.
    """

    entry: Entry
    run: Callable[[int], Any]
    error: float
    first_s: float = 0.0
    calls: int = 1
    taken: list[Taken] = field(default_factory=list)

    def result(self) -> Measured:
        """Return the medians of what was taken."""
        return Measured(
            gpu_us=median(one.gpu_us for one in self.taken),
            host_us=median(one.host_us for one in self.taken),
            first_call_s=self.first_s,
            error=self.error,
        )


def ready(
    spec: AttentionSpec,
    direction: Direction,
    entries: Sequence[Entry],
    inputs: list[Copy],
    checks: Checks,
    timer: Timer,
    device: torch.device,
    deadline: float,
    results: dict[str, Measured],
) -> Iterator[Runner]:
    """Yield the backends that are right, after their first call; puts the others into the results.

    Raises:
        DeviceLostError: one has left the GPU unusable.
        TimeIsUpError: the deadline came before each had been checked and called once.
    """
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
            runner = Runner(entry, _call(entry, direction, inputs, forwards), verdict.error)
            if wrong := _first(runner, direction, inputs[0], forwards[0] if forwards else (), timer):
                results[entry.name] = Measured(wrong=wrong)
                continue
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the others have to get their turn
            results[entry.name] = failed(error, device)
        else:
            yield runner


def _first(runner: Runner, direction: Direction, copy: Copy, forward: Any, timer: Timer) -> str:
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


def _settle(runner: Runner, timer: Timer) -> None:
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
