"""The sides of a comparison: a function of query, key and value, its inputs, and its context."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any

import torch

from attnreg.bench.shapes import BOTH, FORWARD
from attnreg.bench.timing import back_to_back, calls_for
from attnreg.dispatch.counters import stats

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from attnreg.bench.inputs import Tensors

    Front = Callable[[Tensor, Tensor, Tensor], Tensor]
    Step = Callable[[Front, Tensors], object]
    Timer = Callable[[Callable[[], object], int, torch.device], float]

# A registration forgets the plans. The first call makes one, the second finds that it may be kept, and a
# backend may want to watch one, too.
WARM_UP = 4

__all__ = [
    "STEPS",
    "WARM_UP",
    "Side",
    "forward",
    "forward_backward",
    "layers",
    "layers_backward",
    "misled",
    "ran",
    "served",
]


def ran() -> dict[str, str]:
    """Return which backends ran in each direction since the counters were last set to zero.

    A direction in which none did was torch's own.
    """
    calls = stats().calls
    return {
        way: "+".join(name for name, counts in calls.items() if counts[way]) or "torch"
        for way in ("forward", "backward")
    }


def served() -> str:
    """Return the same in words, and why not others."""
    found = stats()
    told = ", ".join(f"{name} ({' and '.join(d for d in n if n[d])})" for name, n in found.calls.items())
    return "; ".join((told or "none", *(f"{row.backend}: {row.reason}" for row in found.fallbacks[:2])))


def misled(backend: str) -> str:
    """Return what ran, if that isn't both directions of the backend that was to run; else nothing."""
    told = served()
    return "" if told == f"{backend} (forward and backward)" else f"ran {told}"


@dataclass(frozen=True)
class Side:
    """What is timed.

    Attributes:
        front: what is called with query, key and value, and returns the output.
        sets: its inputs, taken in turn.
        within: the context in which it is called.
    """

    front: Front
    sets: Sequence[Tensors]
    within: Callable[[], AbstractContextManager[Any]]

    def results(self, backward: bool = True) -> list[Tensor]:
        """Return output and gradients of the first set, or the output alone."""
        tensors = self.sets[0]
        with self.within():
            if not backward:
                with torch.no_grad():
                    return [self.front(*tensors.inputs())]
            out = self.front(*tensors.inputs())
            return [out.detach(), *torch.autograd.grad(out, tensors.inputs(), tensors.grad)]

    def timed(self, step: Step, calls: int, timer: Timer = back_to_back) -> Callable[[], float]:
        """Return what measures the seconds of a call of `step`."""
        device = self.sets[0].q.device

        def measure() -> float:
            sets = cycle(self.sets)
            with self.within():
                for _ in range(WARM_UP):
                    step(self.front, next(sets))
                return timer(lambda: step(self.front, next(sets)), calls, device)

        return measure

    def calls(self, step: Step, seconds: float) -> int:
        """Return how many calls of `step` take so long, about."""
        self.timed(step, 1)()
        # Fewer launches than a GPU's queue holds: else the host can't get ahead.
        return calls_for(seconds, self.timed(step, 3)(), most=50)


def forward(front: Front, tensors: Tensors) -> Tensor:
    """Run a forward of which no gradient will be asked."""
    with torch.no_grad():
        return front(*tensors.inputs())


def forward_backward(front: Front, tensors: Tensors) -> tuple[Tensor, ...]:
    """Run a forward and its backward."""
    return torch.autograd.grad(front(*tensors.inputs()), tensors.inputs(), tensors.grad)


def layers(front: Front, sets: Sequence[Tensors]) -> list[Tensor]:
    """Run a forward of each set, as a model's layers are run one after the other."""
    return [front(*tensors.inputs()) for tensors in sets]


def layers_backward(outs: Sequence[Tensor], sets: Sequence[Tensors], **options: bool) -> tuple[Tensor, ...]:
    """Run the backwards of all of them in one pass of autograd."""
    inputs = [x for tensors in sets for x in tensors.inputs()]
    return torch.autograd.grad(outs, inputs, [tensors.grad for tensors in sets], **options)


STEPS: dict[str, Step] = {FORWARD: forward, BOTH: forward_backward}
