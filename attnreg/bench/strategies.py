"""Who decides, for `selection`: each strategy served through the front, and each kernel called by hand."""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from attnreg import _registry, planning
from attnreg.bench.contexts import by_default, led_by, settings, torch_alone
from attnreg.bench.shapes import BACKWARD, BOTH, FORWARD
from attnreg.bench.sides import WARM_UP, Side, forward, layers, layers_backward
from attnreg.bench.summary import CHOSEN, FIXED, ORDER, TORCH
from attnreg.bench.timing import back_to_back, calls_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor

    from attnreg.bench.inputs import Batch
    from attnreg.bench.report import Job
    from attnreg.discovery import Entry

__all__ = ["Runner", "by_direction", "hands", "strategies"]

# As long as a measurement takes, but for calls that take longer.
SECONDS = 0.005


def strategies(batch: Batch, job: Job) -> dict[str, Side]:
    """Return every way to decide: by measurement, by order, always one backend first, torch alone."""
    sets = batch.front_sets
    return {
        CHOSEN: Side(batch.with_attnreg, sets, settings("measured", job.table, job.backends)),
        ORDER: Side(batch.with_attnreg, sets, settings("order", among=job.backends)),
        **{FIXED + name: Side(batch.with_attnreg, sets, led_by(name)) for name in job.backends},
        TORCH: Side(batch.with_torch, sets, torch_alone),
    }


class Timed(NamedTuple):
    """A function to be timed, its direction, and how many calls of attention are in it."""

    direction: str
    run: Callable[[], object]
    calls: int = 1


class Runner(NamedTuple):
    """What is timed in its turn: functions by direction, made inside a context.

    Attributes:
        within: the context.
        steps: makes the functions; a backward needs a forward first, which isn't timed.
        times: how often each is run in a measurement, by direction; filled by the first turn.
    """

    within: Callable[[], AbstractContextManager[Any]]
    steps: Callable[[], Iterator[Timed]]
    times: dict[str, int]

    def turn(self, device: torch.device) -> dict[str, float]:
        """Return the seconds of a call in each direction; the first turn is a warm-up, too."""
        taken = {}
        with self.within():
            for direction, run, calls in self.steps():
                for _ in range(WARM_UP):
                    run()
                if direction not in self.times:
                    once = back_to_back(run, 2, device)
                    self.times[direction] = calls_for(SECONDS, once, most=100)
                taken[direction] = back_to_back(run, self.times[direction], device) / calls
        return taken

    @classmethod
    def through(cls, side: Side, backward: bool) -> Runner:
        """Return what times a strategy.

        One graph has a call for each set, as a model has layers: autograd's thread, once awake, goes
        through them all.
        """
        sets = side.sets

        def steps() -> Iterator[Timed]:
            turn = cycle(sets)
            yield Timed(FORWARD, lambda: forward(side.front, next(turn)))
            if not backward:
                return
            yield Timed(BOTH, lambda: layers_backward(layers(side.front, sets), sets), len(sets))
            outs = layers(side.front, sets)
            yield Timed(BACKWARD, lambda: layers_backward(outs, sets, retain_graph=True), len(sets))

        return cls(side.within, steps, {})


def hands(batch: Batch, job: Job) -> dict[str, tuple[Runner, Callable[[], list[Tensor]]]]:
    """Return each backend's kernels without any registry or autograd: what times them, and their results."""
    spec = batch.shape.spec(planning.device_of(job.device))
    found = {}
    for name in job.backends:
        entry = _registry.find(name)
        if not entry.reasons(spec, "forward"):
            backward = batch.shape.backward and not entry.reasons(spec, "backward")
            found[name] = _hand(batch, entry, backward)
    return found


def _hand(batch: Batch, entry: Entry, backward: bool) -> tuple[Runner, Callable[[], list[Tensor]]]:
    sets, call = [one.plain() for one in batch.sets], batch.call()
    first, second = entry.kernel("forward"), entry.kernel("backward") if backward else None

    def steps() -> Iterator[Timed]:
        inputs = cycle(sets)
        yield Timed(FORWARD, _undifferentiated(lambda: first(*next(inputs).inputs(), call)))
        if second is not None:
            given = cycle([(one.grad, *one.inputs(), *first(*one.inputs(), call), call) for one in sets])
            yield Timed(BACKWARD, _undifferentiated(lambda: second(*next(given))))

    def results() -> list[Tensor]:
        q, k, v, grad = sets[0]
        with torch.no_grad(), by_default():
            out, lse = first(q, k, v, call)
            return [out, *(second(grad, q, k, v, out, lse, call) if second is not None else ())]

    return Runner(by_default, steps, {}), results


def _undifferentiated(run: Callable[[], object]) -> Callable[[], object]:
    def without() -> object:
        with torch.no_grad():
            return run()

    return without


def by_direction(turns: Mapping[str, list[dict[str, float]]]) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each round by direction and name."""
    found: dict[str, dict[str, list[float]]] = {}
    for name, rounds in turns.items():
        for taken in rounds:
            for direction, seconds in taken.items():
                found.setdefault(direction, {}).setdefault(name, []).append(seconds)
    return found
