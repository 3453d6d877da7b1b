"""The sides of a comparison: a function of query, key and value, its inputs, and its context.

The context decides which kernel runs: torch alone, attnreg by itself or by measurement, one backend. The
function decides which front is called: attnreg's or torch's `varlen_attn`, SDPA, or a backend's kernels
called directly.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnreg import api
from attnreg.core import aten, registry
from attnreg.core.dispatch import planning
from attnreg.core.dispatch.counters import call_counts, stats
from attnreg.core.policy import current as policy
from attnreg.core.times.tables import NamedTables, TableReport
from attnreg.errors import ConfigError
from attnreg.tools.bench.shapes import BOTH, FORWARD

Front = Callable[[Tensor, Tensor, Tensor], Tensor]
Step = Callable[[Front, "Tensors"], object]

# A registration drops all plans. The first call makes one, the second finds that it may be kept, and a
# backend may prepare a launcher in the next.
WARM_UP = 4


class Tensors(NamedTuple):
    """Query, key and value, which require a gradient, and the incoming gradient."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value."""
        return self.q, self.k, self.v

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Tensors:
        """Return new leaves, each tensor changed by `change`."""
        q, k, v, grad = (change(x.detach()) for x in self)
        return Tensors(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), grad)


class TimedRun(NamedTuple):
    """What is timed of a side: the name of a step, a function that runs it, and its calls of attention."""

    step: str
    run: Callable[[], object]
    calls: int = 1


@dataclass(frozen=True)
class Side:
    """A side of a comparison: calls to time.

    Attributes:
        front: The function of query, key and value that returns the output.
        sets: The inputs of the calls, used in turn.
        within: Returns the context of the calls.
        wanted: The backend that has to run the calls. Empty if any may.
    """

    front: Front
    sets: Sequence[Tensors]
    within: Callable[[], AbstractContextManager[Any]]
    wanted: str = ""

    def results(self, backward: bool = True) -> list[Tensor]:
        """Return output and gradients of the first set, or the output alone."""
        tensors = self.sets[0]
        with self.within():
            if not backward:
                return [forward(self.front, tensors)]
            return results(self.front, tensors)

    def runs(self, steps: Mapping[str, Step]) -> list[TimedRun]:
        """Return the steps as functions that run them with the sets of inputs in turn."""
        in_turn = cycle(self.sets)

        def run_of(step: Step) -> Callable[[], object]:
            return lambda: step(self.front, next(in_turn))

        return [TimedRun(name, run_of(step)) for name, step in steps.items()]

    def runs_of_model(self, backward: bool) -> list[TimedRun]:
        """Return a forward, and forward + backward of all sets in one graph, as a model has layers.

        Autograd's thread wakes up once and runs all of them.
        """

        def both() -> object:
            return layers_backward(layers(self.front, self.sets), self.sets)

        runs = self.runs({FORWARD: forward})
        return [*runs, TimedRun(BOTH, both, len(self.sets))] if backward else runs


def forward(front: Front, tensors: Tensors) -> Tensor:
    """Run a forward without gradients."""
    with torch.no_grad():
        return front(*tensors.inputs())


def forward_backward(front: Front, tensors: Tensors) -> tuple[Tensor, ...]:
    """Run a forward and its backward."""
    out = front(*tensors.inputs())
    # `allow_unused`: the side that does nothing, timed as the least cost of autograd, uses only the query.
    return torch.autograd.grad(out, tensors.inputs(), tensors.grad, allow_unused=True)


def results(front: Front, tensors: Tensors) -> list[Tensor]:
    """Run a forward and its backward, and return output and gradients."""
    out = front(*tensors.inputs())
    return [out.detach(), *torch.autograd.grad(out, tensors.inputs(), tensors.grad)]


def layers(front: Front, sets: Sequence[Tensors]) -> list[Tensor]:
    """Run a forward of each set, in order, as a model runs its layers."""
    return [front(*tensors.inputs()) for tensors in sets]


def layers_backward(outs: Sequence[Tensor], sets: Sequence[Tensors]) -> tuple[Tensor, ...]:
    """Run the backwards of all layers in one pass of autograd; `outs` are the outputs, any shape."""
    inputs = [x for tensors in sets for x in tensors.inputs()]
    return torch.autograd.grad(outs, inputs, [tensors.grad for tensors in sets])


STEPS: dict[str, Step] = {FORWARD: forward, BOTH: forward_backward}


def called_directly(
    forward: Callable[..., Any], backward: Callable[..., Any] | None, *last: object
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return attention by a backend's two functions, joined by an `autograd.Function` and nothing else.

    `forward` is called with query, key, value and `last`, and returns the output first. `backward` is called
    with the output's gradient, query, key, value, all that `forward` returned, and `last`.
    """

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            differentiable: Tensor = _Direct.apply(forward, backward, last, query, key, value)  # type: ignore[no-untyped-call]
            return differentiable
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


def ran() -> dict[str, str]:
    """Return which backends ran in each direction since the counters were last reset.

    If no backend is counted, torch's own kernel ran.
    """
    calls = call_counts()
    return {
        direction: "+".join(name for name, counts in calls.items() if counts[direction]) or "torch"
        for direction in ("forward", "backward")
    }


def who_ran(step: str, backends: Mapping[str, str]) -> str:
    """Return what ran in a step, the backward apart where that was another."""
    directions = ("forward",) if step == FORWARD else ("forward", "backward")
    return ", ".join(dict.fromkeys(backends[direction] for direction in directions))


def wrong_backend(wanted: str, backends: Mapping[str, str]) -> str:
    """Return what ran instead of the wanted backend, or "" if the wanted backend ran."""
    if set(backends.values()) == {wanted}:
        return ""
    reasons = [f"{row.backend}: {row.reason}" for row in stats().fallbacks[:2]]
    return "; ".join((f"ran {in_words(backends)}", *reasons))


def in_words(backends: Mapping[str, str]) -> str:
    """Return what ran as a text."""
    return ", ".join(f"{name} ({direction})" for direction, name in backends.items())


# Contexts


@contextlib.contextmanager
def untouched() -> Iterator[None]:
    """Disable the settings of environment variables and files, and restore all of them afterwards."""
    routers, active = aten.installed(), policy.activate(False)
    put_back = policy.set_aside()
    try:
        yield
    finally:
        put_back()
        policy.activate(active)
        (aten.ensure if routers else aten.restore)()


@contextlib.contextmanager
def torch_alone() -> Iterator[None]:
    """Uninstall attnreg's routers."""
    api.uninstall()
    yield


@contextlib.contextmanager
def in_the_callers_thread(within: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Run backwards in the thread that calls them, inside another context."""
    with within(), torch.autograd.set_multithreading_enabled(False):
        yield


@contextlib.contextmanager
def by_default() -> Iterator[None]:
    """Install attnreg's routers, with no backend registered."""
    aten.ensure()
    yield


@contextlib.contextmanager
def settings(chosen_by: str, table: Path | None = None, among: Iterable[str] = ()) -> Iterator[None]:
    """Configure the policy `chosen_by`: "measured", "order" or "adaptive".

    With `among`, no other backends are chosen, except `math`, to which all calls fall back.
    """
    wanted = {"math", *map(str.casefold, among)}
    others = [entry.name for name, entry in registry.entries().items() if name not in wanted]
    before = policy.sources()
    named = {} if table is None else {"tuned": table}
    api.configure({"policy": chosen_by, "disabled": others if among else []} | named)
    try:
        yield
    finally:
        policy.apply(before)


def table_in_force(device: torch.device, table: Path | None = None) -> str:
    """Return the name of the measured table that decides on a device, or why none does.

    Raises `ConfigError` if a table was named that was measured on another machine.
    """
    with settings("measured", table):
        tables = policy.current().tables
        report = (
            tables.report(planning.device_of(device)) if isinstance(tables, NamedTables) else TableReport()
        )
    named = report.in_force is not None and bool(report.in_force.source)
    if table is not None and not named:
        reason = "; ".join(report.refused) or f"it is of another kind of device than {device.type}"
        raise ConfigError(f"--table: {table}: {reason}")
    if report.in_force is None:
        return "; ".join(("the default order, as no table is in force", *report.refused))
    return str(report.in_force)
