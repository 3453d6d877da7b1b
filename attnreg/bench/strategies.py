"""What `selection` times: each strategy through the front, and each kernel called directly."""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING, Any, NamedTuple

from attnreg import _registry
from attnreg.bench.contexts import by_default, led_by, settings, torch_alone
from attnreg.bench.shapes import BACKWARD, BOTH, FORWARD
from attnreg.bench.sides import WARM_UP, Side, called_directly, forward, layers, layers_backward
from attnreg.bench.summary import CHOSEN, FIXED, ORDER, TORCH
from attnreg.dispatch import planning
from attnreg.measure.timing import calls_for, timer_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

    import torch

    from attnreg.bench.batches import Batch
    from attnreg.bench.report import Job

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
    """What is timed in a round: functions by direction, made inside a context.

    Attributes:
        within: the context.
        steps: makes the functions; a backward needs a forward first, which isn't timed.
        times: how often each is run in a measurement, by direction; filled in the first round.
    """

    within: Callable[[], AbstractContextManager[Any]]
    steps: Callable[[], Iterator[Timed]]
    times: dict[str, int]

    def measure(self, device: torch.device) -> dict[str, float]:
        """Return the seconds of a call in each direction; the first round is a warm-up as well."""
        taken, timer = {}, timer_for(device)
        with self.within():
            for direction, run, calls in self.steps():
                for _ in range(WARM_UP):
                    run()
                if direction not in self.times:
                    once = timer.back_to_back(run, 2)
                    self.times[direction] = calls_for(SECONDS, once, most=100)
                taken[direction] = timer.back_to_back(run, self.times[direction]) / calls
        return taken

    @classmethod
    def through(cls, side: Side, backward: bool) -> Runner:
        """Return what times a strategy.

        One graph has a call for each set, as a model has layers: autograd's thread, once awake, goes
        through them all.
        """
        sets = side.sets

        def steps() -> Iterator[Timed]:
            in_turn = cycle(sets)
            yield Timed(FORWARD, lambda: forward(side.front, next(in_turn)))
            if not backward:
                return
            yield Timed(BOTH, lambda: layers_backward(layers(side.front, sets), sets), len(sets))
            outs = layers(side.front, sets)
            yield Timed(BACKWARD, lambda: layers_backward(outs, sets, retain_graph=True), len(sets))

        return cls(side.within, steps, {})


def direct(batch: Batch, job: Job) -> dict[str, tuple[Runner, Side, bool]]:
    """Return each backend's kernels called directly: the runner, the side, whether there is a backward."""
    spec, call = batch.shape.spec(planning.device_of(job.device)), batch.call
    found = {}
    for name in job.backends:
        entry = _registry.find(name)
        if entry.reasons(spec, "forward"):
            continue
        backward = batch.shape.backward and not entry.reasons(spec, "backward")
        kernels = entry.kernel("forward"), entry.kernel("backward") if backward else None
        side = Side(called_directly(*kernels, call), batch.sets, by_default)
        found[name] = Runner.through(side, backward), side, backward
    return found


def by_direction(measured: Mapping[str, list[dict[str, float]]]) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each round by direction and name."""
    found: dict[str, dict[str, list[float]]] = {}
    for name, rounds in measured.items():
        for taken in rounds:
            for direction, seconds in taken.items():
                found.setdefault(direction, {}).setdefault(name, []).append(seconds)
    return found
