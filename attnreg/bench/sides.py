"""The sides of a comparison: a function of query, key and value, its inputs, and its context.

The context decides which kernel runs (see `contexts`), the function which front is called: attnreg's or
torch's `varlen_attn`, SDPA, or a backend's kernels called directly.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any, Literal

import torch

from attnreg.bench.shapes import BOTH, FORWARD
from attnreg.dispatch.counters import stats
from attnreg.measure.timing import calls_for, timer_for

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from attnreg.bench.batches import Tensors
    from attnreg.measure.timing import Timer

    Front = Callable[[Tensor, Tensor, Tensor], Tensor]
    Step = Callable[[Front, Tensors], object]
    Clock = Literal["device", "eager", "host"]

# A registration drops all plans. The first call makes one, the second finds that it may be kept, and a
# backend may prepare a launcher in the next.
WARM_UP = 4


def ran() -> dict[str, str]:
    """Return which backends ran in each direction since the counters were last set to zero.

    A direction in which none did was torch's own.
    """
    calls = stats().calls
    return {
        direction: "+".join(name for name, counts in calls.items() if counts[direction]) or "torch"
        for direction in ("forward", "backward")
    }


def wrong_backend(wanted: str, found: Mapping[str, str], backward: bool = True) -> str:
    """Return what ran instead of a backend, or an empty string if that did."""
    directions = ("forward", "backward") if backward else ("forward",)
    if all(found[direction] == wanted for direction in directions):
        return ""
    reasons = [f"{row.backend}: {row.reason}" for row in stats().fallbacks[:2]]
    return "; ".join((f"ran {in_words(found)}", *reasons))


def in_words(found: Mapping[str, str]) -> str:
    """Return what ran as a text."""
    return ", ".join(f"{name} ({direction})" for direction, name in found.items())


def seconds(timer: Timer, clock: Clock, run: Callable[[], object], calls: int) -> float:
    """Return what one of so many calls takes, by one of the three times that `measure.timing` explains."""
    if clock == "device":
        return timer.device_and_host(run, calls).device
    return timer.host(run, calls) if clock == "host" else timer.back_to_back(run, calls)


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

    def timed(self, step: Step, calls: int, clock: Clock = "eager") -> Callable[[], float]:
        """Return what measures the seconds of a call of `step`."""
        timer, sets = timer_for(self.sets[0].q.device), cycle(self.sets)

        def run() -> object:
            return step(self.front, next(sets))

        def measure() -> float:
            with self.within():
                for _ in range(WARM_UP):
                    run()
                return seconds(timer, clock, run, calls)

        return measure

    def calls(self, step: Step, total: float) -> int:
        """Return how many calls of `step` take so many seconds, about."""
        self.timed(step, 1)()
        # Fewer launches than a GPU's queue holds: else the host can't get ahead.
        return calls_for(total, self.timed(step, 3)(), most=50)


def forward(front: Front, tensors: Tensors) -> Tensor:
    """Run a forward without gradients."""
    with torch.no_grad():
        return front(*tensors.inputs())


def forward_backward(front: Front, tensors: Tensors) -> tuple[Tensor, ...]:
    """Run a forward and its backward."""
    out = front(*tensors.inputs())
    # What is timed as the least that autograd costs uses the query only.
    return torch.autograd.grad(out, tensors.inputs(), tensors.grad, allow_unused=True)


def layers(front: Front, sets: Sequence[Tensors]) -> list[Tensor]:
    """Run a forward of each set, as a model's layers are run one after the other."""
    return [front(*tensors.inputs()) for tensors in sets]


def layers_backward(outs: Sequence[Tensor], sets: Sequence[Tensors], **options: bool) -> tuple[Tensor, ...]:
    """Run the backwards of all of them in one pass of autograd."""
    inputs = [x for tensors in sets for x in tensors.inputs()]
    return torch.autograd.grad(outs, inputs, [tensors.grad for tensors in sets], **options)


STEPS: dict[str, Step] = {FORWARD: forward, BOTH: forward_backward}


def called_directly(
    forward: Callable[..., Any], backward: Callable[..., Any] | None, *last: object
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return attention by a backend's two functions, joined by an `autograd.Function` and nothing else.

    `forward` is given query, key, value and what comes `last`, and returns the output first; `backward` the
    gradient of that, the three, what `forward` has returned, and what comes last.
    """

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            found: Tensor = _Direct.apply(forward, backward, last, query, key, value)  # type: ignore[no-untyped-call]
            return found
        out: Tensor = forward(query, key, value, *last)[0]
        return out

    return attention


class _Direct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, forward: Any, backward: Any, last: tuple[object, ...], *inputs: Tensor) -> Any:
        results = forward(*inputs, *last)
        ctx.save_for_backward(*inputs, *results)
        ctx.kernel, ctx.last = backward, last
        return results[0]

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        return None, None, None, *ctx.kernel(grad_out, *ctx.saved_tensors, *ctx.last)
