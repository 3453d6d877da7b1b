"""The backends that can run a call, each checked and called for the first time, ready to be timed."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import cycle
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from attnreg.errors import AttnregError
from attnreg.measure import Sample
from attnreg.tuning.failures import TimeIsUpError, failed
from attnreg.tuning.points import Measured

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from attnreg.contract.discovery import Entry
    from attnreg.contract.spec import AttentionSpec, Direction
    from attnreg.measure import Case, Inputs
    from attnreg.measure.timing import Taken, Timer
    from attnreg.tuning.checks import Checks

__all__ = ["AtSize", "Runner", "ready"]

# So many calls come between the first and those that count, unless they take long: a backend may prepare a
# launcher in its second call (FA4 does), which takes the host a millisecond.
SETTLING, LONG_S = 3, 0.05


@dataclass(slots=True)
class Runner:
    """One direction of one backend, ready to be timed.

    Attributes:
        entry: the backend.
        run: makes one call, on each copy of its tensors in turn.
        error: over that of plain PyTorch, as its check found.
        first_s: seconds of the first call.
        calls: how many make a round.
        taken: what one of them took, by round.
    """

    entry: Entry
    run: Callable[[], Any]
    error: float
    first_s: float = 0.0
    calls: int = 1
    taken: list[Taken] = field(default_factory=list)

    def result(self) -> Measured:
        """Return the medians of what was taken."""
        return Measured(
            gpu_us=median(one.device for one in self.taken) * 1e6,
            host_us=median(one.host for one in self.taken) * 1e6,
            first_call_s=self.first_s,
            error=self.error,
        )


class AtSize:
    """The accuracy rule at the call's own size; what should come out is computed when first needed."""

    def __init__(self, case: Case, given: Inputs, backward: bool) -> None:
        self._case, self._given, self._backward = case, given, backward
        self._sample: Sample | None = None

    def wrong(self, direction: Direction, results: Any) -> str:
        """Return in what the results of a call on the first copy are wrong; empty if nothing is."""
        names = ("out", "lse") if direction == "forward" else ("dq", "dk", "dv")
        try:
            if self._sample is None:
                self._sample = Sample(self._case, self._given, backward=self._backward)
            return self._sample.wrong(dict(zip(names, results, strict=True)))
        except torch.cuda.OutOfMemoryError:  # that of the check, not of the kernel
            return ""


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
                forwards = _forwards(spec, entries, inputs, checks, at_size)
            runner = Runner(entry, _call(entry, direction, inputs, forwards), verdict.error)
            if wrong := _first(runner, direction, at_size, timer):
                results[entry.name] = Measured(wrong=wrong)
                continue
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the others have to get their turn
            results[entry.name] = failed(error, device)
        else:
            yield runner


def _first(runner: Runner, direction: Direction, at_size: AtSize, timer: Timer) -> str:
    """Time a backend's first call; return in what it is wrong, or an empty string."""
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
            if not at_size.wrong("forward", found[0]):
                return found
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the next one may do
            problem = error
    raise problem


def _once(run: Callable[[], Any]) -> Any:
    with torch.no_grad():
        return run()
