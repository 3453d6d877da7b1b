"""What a call costs the host, on a GPU and at a shape so small that the host is all there is.

    python benchmarks/host_gpu.py [--quick] [--rounds N] [--json FILE]

2 sequences of 128 tokens, 8 heads of 64, bfloat16. Wall time of a few calls without waiting for the
device, too few to fill its queue. From the top down:

- `varlen_attn`: torch's, then attnreg's, in its default order and led by each backend,
- aten's flash op with its C++ autograd, without attnreg,
- each backend's kernels as attnreg calls them, without registry and autograd,
- what these call: aten's kernel, FA4's functions, cuDNN's prepared graph,
- a graph of autograd's that does nothing.

Autograd hands a backward on a GPU to a thread of its own: what it takes without that is there of some, too.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from _by_hand import ByHand, by_hand
from _here import available, need_gpu

import attnreg
from attnreg import _registry
from attnreg.bench.contexts import by_default, in_the_callers_thread, led_by, torch_alone
from attnreg.bench.inputs import Batch
from attnreg.bench.overhead_gpu import ALONE, OP, aten_op
from attnreg.bench.report import save, show, show_machine
from attnreg.bench.shapes import packed
from attnreg.bench.sides import WARM_UP, misled, served
from attnreg.bench.timing import host_per_call, interleaved
from attnreg.bench.truth import TOLERANCE, Truth

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torch import Tensor

CALLS, DEFAULT, NOTHING = 30, "attnreg, default order", "autograd, nothing"
STEPS = ("forward, no grad", "forward, grad", "forward + backward")


class Side(NamedTuple):
    """Who is called: a front that autograd goes back through, or two kernels."""

    what: Callable[..., Tensor] | ByHand
    within: Callable[[], AbstractContextManager[Any]]

    def steps(self, batch: Batch) -> dict[str, Callable[[], Any]]:
        """Return what is timed, by its name; kernels know nothing of gradients."""
        *inputs, grad = batch.sets[0]
        if self.what is nothing:
            del inputs[1:]
        plain = [x.detach() for x in inputs]
        what = self.what
        if isinstance(what, ByHand):

            def through() -> tuple[Tensor, ...]:
                return what.backward(grad, *plain, *what.forward(*plain))

            return {"forward, no grad": lambda: what.forward(*plain)[0], "forward + backward": through}
        return {
            "forward, no grad": lambda: what(*plain),
            "forward, grad": lambda: what(*inputs),
            "forward + backward": lambda: torch.autograd.grad(what(*inputs), inputs, grad),
        }


def adapter(name: str, batch: Batch) -> ByHand:
    """Return a backend's kernels as attnreg calls them."""
    kernels, call = _registry.find(name).kernels(), batch.call()
    if kernels.backward is None:
        raise ValueError(f"{name} has no backward")
    backward = kernels.backward
    return ByHand(
        lambda q, k, v: kernels.forward(q, k, v, call),
        lambda grad, q, k, v, out, lse: backward(grad, q, k, v, out, lse, call),
    )


def nothing(query: Tensor) -> Tensor:
    """Return the query as a result that autograd goes back through."""
    return query.view_as(query)


def sides(batch: Batch, backends: list[str]) -> dict[str, Side]:
    """Return all that are timed."""
    found = {
        "torch varlen_attn": Side(batch.with_torch, torch_alone),
        DEFAULT: Side(batch.with_attnreg, by_default),
        **{f"attnreg, {name}": Side(batch.with_attnreg, led_by(name)) for name in backends},
        OP: Side(aten_op(batch), torch_alone),
        NOTHING: Side(nothing, torch_alone),
        **{f"adapter, {name}": Side(adapter(name, batch), by_default) for name in backends},
    }
    for name in backends:
        try:
            hand = by_hand(name, batch.call(), batch.sets[0])
        except Exception as problem:  # noqa: BLE001 - the others are worth their figures
            print(f"left out: kernels of {name} by hand: {type(problem).__name__}: {problem}")
        else:
            found[f"kernels, {name}"] = Side(hand, by_default)
    alone = {
        f"{name}, {ALONE}": Side(one.what, functools.partial(in_the_callers_thread, one.within))
        for name, one in found.items()
        if name in ("torch varlen_attn", DEFAULT, OP, NOTHING)
    }
    return found | alone


def checked(batch: Batch, all_sides: dict[str, Side]) -> dict[str, Side]:
    """Return the sides that are right and ran what they say; prints why the others aren't."""
    truth, right = Truth(batch.shape, batch.sets[0], everything=True), {}
    for name, side in all_sides.items():
        if side.what is nothing:
            right[name] = side
            continue
        attnreg.reset_stats()
        try:
            with side.within():
                steps = side.steps(batch)
                error = truth.error((steps["forward, no grad"](), *steps["forward + backward"]()))
        except Exception as problem:  # noqa: BLE001 - as above
            print(f"left out: {name}: {type(problem).__name__}: {problem}")
            continue
        wrong = "" if error <= TOLERANCE[batch.shape.dtype] else f"WRONG, relative error {error:.2g}"
        if name == DEFAULT:
            print(f"{name}: ran {served()}")
        elif name.startswith("attnreg") and ALONE not in name:
            wrong = misled(name.removeprefix("attnreg, ")) or wrong
        if wrong:
            print(f"left out: {name}: {wrong}")
        else:
            right[name] = side
    return right


def measure(
    batch: Batch, found: dict[str, Side], step: str, rounds: int, calls: int
) -> dict[str, list[float]]:
    """Time one step of all sides that have it."""

    def timed(side: Side) -> Callable[[], float]:
        def run() -> float:
            with side.within():
                called = side.steps(batch)[step]
                for _ in range(WARM_UP):  # a registration forgets the plans: the first calls make them
                    called()
                return host_per_call(called, calls, batch.device)

        return run

    has_it = {name: timed(side) for name, side in found.items() if step in side.steps(batch)}
    return interleaved(has_it, rounds)


def main() -> None:
    """Time everything and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few rounds")
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--calls", type=int, default=CALLS, help="per measurement")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = need_gpu()
    show_machine()
    batch = Batch(packed([128, 128], 8, 8, 64, causal=False), device)
    found = checked(batch, sides(batch, available()))
    rounds = 5 if options.quick else options.rounds
    medians: dict[str, dict[str, float]] = {name: {} for name in found}
    for step in STEPS:
        for name, seconds in measure(batch, found, step, rounds, options.calls).items():
            medians[name][step] = statistics.median(seconds) * 1e6
    rows = [
        (name, *(f"{taken[step]:.1f}" if step in taken else "-" for step in STEPS))
        for name, taken in medians.items()
    ]
    show("Host time per call, µs; median", ("side", *STEPS), rows)
    save(options.json, medians)


if __name__ == "__main__":
    main()
