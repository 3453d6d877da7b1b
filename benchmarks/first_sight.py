"""What choosing costs at first sight: calls of lengths that the program has never had, on random shapes.

    python benchmarks/first_sight.py [--seed S] [--start N] [--count N] [--seconds S] [--backends FA4,FA2]
        [--out FILE]

The shapes are those of `attnreg bench selection --random`. Each side makes calls of a shape's kind, whose
lengths are up to a quarter shorter. As long as a shape has other lengths, none repeat. A batch is drawn
before each call. The first twelve calls don't count: the kind is decided in them, and `adaptive` has its
turns. Before all of them each backend by name makes a call of the shape itself, which loads and compiles
its kernels.

A figure is the median of further calls, from an idle device to an idle device, and their mean, which counts
each decision that new lengths need. The ratio is to the backend with the least median among those that
always run. *together* is the sum of a way's times, over the sum for these backends. Dense calls never
always run on cuDNN: for each new shape it builds an execution plan, which takes 50 ms.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import statistics
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from _program import parser_of, show, show_machine

import attnreg
from attnreg.core import registry
from attnreg.core.dispatch import planning
from attnreg.core.times import adaptive
from attnreg.tools.bench import sides
from attnreg.tools.bench.ahead import compile_ahead
from attnreg.tools.bench.report import save
from attnreg.tools.bench.shapes import BOTH, FORWARD, drawn, trains
from attnreg.tools.measure import Case, inputs
from attnreg.tools.measure.timing import shuffled, timer_for

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

WARM_UP, CALLS, LEAST, NEAR = 12, 10, 0.75, 0.05
# Lengths that have come before are drawn anew so often; then all have come, and all may come again.
ATTEMPTS = 200
CHOSEN, ADAPTIVE, FIXED, CUDNN = "measured", "adaptive", "always ", "cuDNN"


def near(shape: Case, draw: random.Random) -> Case:
    """Return a call of a shape's kind, of lengths up to a quarter shorter."""
    alike = len(set(shape.lens_k)) == 1 and not shape.varlen
    factors = [draw.uniform(LEAST, 1.0) for _ in shape.lens_k]
    if alike:
        factors = factors[:1] * len(factors)
    lens_k = [max(1, round(n * x)) for n, x in zip(shape.lens_k, factors, strict=True)]
    lens_q = lens_k if trains(shape) else shape.lens_q
    return dataclasses.replace(shape, lens_q=tuple(lens_q), lens_k=tuple(lens_k))


def new_cases(shape: Case, draw: random.Random, before: set[tuple[object, ...]]) -> list[Case]:
    """Return the calls of a round, whose lengths no call `before` has; adds theirs."""
    cases: list[Case] = []
    while len(cases) < WARM_UP + CALLS:
        for _ in range(ATTEMPTS):
            case = near(shape, draw)
            if (lengths := (case.lens_q, case.lens_k)) not in before:
                break
        else:
            before.clear()
        before.add(lengths)
        cases.append(case)
    return cases


def call_of(case: Case, device: torch.device, seed: int) -> tuple[list[Tensor], Callable[..., Tensor]]:
    """Return query, key and value, and the function of them that a program calls."""
    *tensors, _, call = inputs(case, device, seed, drawn_on=device)
    shared = case.heads[0] != case.heads[1]
    if case.varlen:
        offsets = call.cu_seqlens_q, call.cu_seqlens_k, call.max_q, call.max_k
        return tensors, lambda q, k, v: attnreg.varlen_attn(
            q, k, v, *offsets, is_causal=case.is_causal, enable_gqa=shared
        )
    sdpa = functools.partial(F.scaled_dot_product_attention, is_causal=case.is_causal, enable_gqa=shared)
    return [x.transpose(1, 2) for x in tensors], sdpa


def run(tensors: list[Tensor], function: Callable[..., Tensor], grad: bool) -> Tensor:
    """Run a call and, if `grad`, its backward; return the output."""
    with torch.set_grad_enabled(grad):
        out = function(*tensors)
    if grad:
        torch.autograd.grad(out, tensors, out.detach())
    return out.detach()


def make_first_calls(shape: Case, ways: dict[str, Any], device: torch.device) -> None:
    """Have each backend load what it needs for a shape, and torch get memory for calls of its size."""
    tensors, function = call_of(shape, device, 0)
    for name in ways:
        if name.startswith(FIXED):
            with ways[name]():
                for grad in (False, True) if trains(shape) else (False,):
                    run([x.detach().requires_grad_(grad) for x in tensors], function, grad)


def turn(cases: list[Case], device: torch.device, seed: int, grad: bool) -> tuple[list[float], Tensor]:
    """Return the seconds of each call that counts, and the output of the last."""
    timer, seconds = timer_for(device), []
    for case in cases:
        # Drawn here, and not ahead: after a pause a thread wakes slowly, and this way all sides pause alike.
        tensors, function = call_of(case, device, seed)
        for x in tensors:
            x.requires_grad_(grad)
        timer.wait()
        begun = timer.now()
        out = run(tensors, function, grad)
        timer.wait()
        seconds.append(timer.now() - begun)
    return seconds[WARM_UP:], out


def measure(
    shape: Case, ways: dict[str, Any], device: torch.device, rounds: int, seed: str
) -> dict[str, Any]:
    """Return the seconds of the calls of each way, by step."""
    taken: dict[str, dict[str, list[float]]] = {}
    draw = random.Random(seed)
    make_first_calls(shape, ways, device)
    # cuDNN comes last: a plan that it has built is there for the ways behind it.
    last = [name for name in ways if name == FIXED + CUDNN]
    others = [name for name in ways if name not in last]
    for step in (FORWARD, BOTH) if trains(shape) else (FORWARD,):
        before: set[tuple[object, ...]] = set()
        for number in range(rounds):
            cases, outs = new_cases(shape, draw, before), {}
            for name in (*shuffled(others), *last):
                with ways[name]():
                    seconds, outs[name] = turn(cases, device, number, step == BOTH)
                taken.setdefault(step, {}).setdefault(name, []).extend(seconds)
            expected = next(iter(outs.values())).float()
            for name, out in outs.items():
                if float((out.float() - expected).abs().max()) > NEAR:
                    raise SystemExit(f"{shape.name}: {name} is wrong")
    return taken


class Ratios(NamedTuple):
    """What a way took on a shape, and the backend with the least median.

    Attributes:
        medians, means: the median and the mean time of a call, over that backend's.
        own, best: the sum of all times in seconds, of the way and of that backend.
    """

    medians: float
    means: float
    own: float
    best: float


def ratios(taken: dict[str, list[float]]) -> dict[str, Ratios]:
    """Return the ratios of each way, of the seconds of its calls."""
    medians = {name: statistics.median(seconds) for name, seconds in taken.items()}
    best = min((name for name in medians if name.startswith(FIXED)), key=medians.__getitem__)
    means = {name: statistics.fmean(seconds) for name, seconds in taken.items()}
    return {
        name: Ratios(medians[name] / medians[best], means[name] / means[best], sum(seconds), sum(taken[best]))
        for name, seconds in taken.items()
    }


def summary(numbers: Sequence[float]) -> str:
    """Return mean, median and maximum."""
    of_all = statistics.fmean(numbers), statistics.median(numbers), max(numbers)
    return ", ".join(f"{number:.3f}" for number in of_all)


def report(rows: list[dict[str, Any]], names: Sequence[str]) -> None:
    """Print the ratios of each way."""
    for step in (FORWARD, BOTH):
        measured = [(row["case"], ratios(row["seconds"][step])) for row in rows if step in row["seconds"]]
        cells = []
        for way in (CHOSEN, ADAPTIVE, *(FIXED + name for name in names)):
            both = [each[way] for _, each in measured if way in each]
            if not both:
                continue
            worst = max(measured, key=lambda row: row[1][way].medians if way in row[1] else 0.0)[0]
            medians, means = ([getattr(each, name) for each in both] for name in ("medians", "means"))
            together = sum(each.own for each in both) / sum(each.best for each in both)
            counts = f"{together:.3f}", str(len(both)), worst
            cells.append((way, summary(medians), summary(means), *counts))
        header = ("way", "medians: mean, median, worst", "mean times", "together", "shapes", "worst shape")
        show(f"{step}, over the best backend", header, cells)


def main() -> None:
    """Measure shapes while there is time, and print the ratios."""
    parser = parser_of(__doc__, rounds=2, devices=("cpu", "cuda"))
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--start", type=int, default=0, help="the number of the first shape")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--backends", default="FA4,FA2,cuDNN", help="comma list")
    options = parser.parse_args()
    show_machine()
    device, names = torch.device(options.device), options.backends.split(",")
    numbers = range(options.start, options.start + options.count)
    shapes = [drawn(options.seed, number, device.type) for number in numbers]
    deadline, rows = time.monotonic() + options.seconds, []
    specs = [shape.spec(planning.device_of(device), needs_backward=trains(shape)) for shape in shapes]
    compile_ahead(specs, [registry.find(name) for name in names], options.seconds)
    with adaptive.from_nothing():
        for number, shape in zip(numbers, shapes, strict=True):
            if time.monotonic() > deadline:
                break
            ways = {
                CHOSEN: functools.partial(sides.settings, "measured", among=names),
                ADAPTIVE: functools.partial(sides.settings, "adaptive", among=names),
            } | {
                FIXED + name: functools.partial(attnreg.register_backend, name)
                for name in names
                if name != CUDNN or shape.varlen
            }  # fmt: skip
            taken = measure(shape, ways, device, options.rounds, f"{options.seed}/{number}")
            rows.append({"case": shape.name, "seconds": taken})
            save(options.out, rows)
    report(rows, names)


if __name__ == "__main__":
    main()
