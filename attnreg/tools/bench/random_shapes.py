"""What each way to choose a backend loses, on shapes drawn at random: `attnreg bench selection --random N`.

The seed and a shape's number determine the shape. The *ways* to choose are attnreg's choice by measurement,
its policy "adaptive" (from nothing, after its turns), its default order, and each backend registered. A way's
loss is its time over the best backend's time in the same round, for the forward and for forward + backward as
a whole.

Calls follow each other immediately, as in a program, and the layers of a model share a graph of autograd. For
the best backend it is measured whether the host or the device takes longer. Losses of shapes that the host
bounds are summed up apart, because no kernel can win back time that the host takes.
"""

from __future__ import annotations

import contextlib
import functools
import random
import statistics
import time
from collections.abc import Mapping
from math import exp, log
from typing import Any

from attnreg.core import registry
from attnreg.core.dispatch import planning
from attnreg.core.dispatch.counters import reset_stats
from attnreg.core.times import adaptive
from attnreg.core.times.kinds import kind_of
from attnreg.core.times.turns import MOST_TURNS
from attnreg.tools.bench import sides
from attnreg.tools.bench.ahead import compile_ahead
from attnreg.tools.bench.compare import SideTimer, batch_beyond_the_cache, checked, measured_in_time
from attnreg.tools.bench.losses import BY_DEVICE, BY_HOST, best_of, summary, tables, worst_of
from attnreg.tools.bench.report import Job
from attnreg.tools.bench.selection import strategies
from attnreg.tools.bench.shapes import BOTH, FORWARD, Shape, decode, dense, packed
from attnreg.tools.bench.sides import Side
from attnreg.tools.bench.summary import ADAPTIVE, CHOSEN, FIXED, TORCH
from attnreg.tools.measure.timing import interleaved, timer_for

# Seconds of a measurement, unless a call takes longer. With 50 calls of 40 us in each of three rounds, the
# best backend of a call bound by the host took 1.03 times as long as itself. `FEW_CALLS` is for the host's
# time: so few calls don't fill a GPU's queue, for which the host would wait.
SECONDS, MOST_CALLS, FEW_CALLS = 0.012, 250, 50
# A measurement is the least of so many in a row, as in `timeit`: other programs interrupt some of them.
# Without this, two measurements of the same backend differed by a factor of up to 1.5 at 30 us.
BURSTS = 3
# The host bounds a call if it takes at least this share of the call's time.
HOST_BOUND = 0.9
# A shape that the host bounds gets so many times as many rounds in addition: there, two times five rounds of
# the same backend differed by a factor of up to 1.29.
MORE = 2

# Lengths, the most tokens in a call, the most floating-point operations of a forward.
GPU, CPU = (180, 11_600, 48_000, 6e11), (12, 400, 1_200, 2e8)


def draw(seed: int, number: int, device: str) -> Shape:
    """Draw a shape; one seed and number are always the same shape."""
    rng = random.Random(f"{seed}/{number}")
    gpu = device == "cuda"
    least, longest, tokens, most = GPU if gpu else CPU
    dtype = "bfloat16" if gpu else "float32"

    def length() -> int:
        return round(exp(rng.uniform(log(least), log(longest))))

    group, dim = rng.choice((1, 4, 8)), rng.choice((64, 96, 128))
    heads = rng.choice((8, 16, 24, 32))
    kind, causal = rng.choices(("dense", "packed", "decode"), (4, 4, 2))[0], rng.random() < 0.75
    while True:
        batch = round(exp(rng.uniform(0.0, log(24))))
        rest = heads, heads // group, dim
        if kind == "decode":
            shape = decode(batch, rng.choice((1, 1, 1, 4)), length(), *rest, dtype)
        elif kind == "packed":
            shape = packed([length() for _ in range(batch)], *rest, causal, dtype)
        else:
            shape = dense(batch, length(), *rest, causal, dtype)
        if sum(shape.lengths_k) <= tokens * (4 if kind == "decode" else 1) and shape.flops(FORWARD) <= most:
            return shape


def measure(job: Job, count: int, seed: int) -> None:
    """Measure so many shapes, or as many as there is time for; refuses where none could be."""
    table = sides.table_in_force(job.device, job.table)
    rows: list[dict[str, Any]] = []
    _compile_ahead(job, count, seed)
    shapes = [draw(seed, number, job.device.type) for number in range(count)]
    names = [f"{number}: {shape}" for number, shape in enumerate(shapes)]
    with adaptive.from_nothing():
        for number, row in measured_in_time(shapes, names, _row, job):
            rows.append({"number": number} | row)
            job.keep({"seed": seed, "table": table, "rows": [*rows]})
    job.check_measured(rows)
    summed, worst = summary(rows), {step: worst_of(rows, step) for step in (FORWARD, BOTH)}
    job.keep({"seed": seed, "table": table, "summary": summed, "worst": worst, "rows": rows})
    job.tables = tables(summed, worst)
    job.summary = [f"chosen by: {table}", f"{len(rows)} shapes of seed {seed}"]


def _compile_ahead(job: Job, count: int, seed: int) -> None:
    """Compile the kernels that the shapes need. A shape needs all kernels of its kind."""
    job.advance(0, count, "compiling")
    device = planning.device_of(job.device)
    specs = [draw(seed, number, device.type).spec(device) for number in range(count)]
    one_of_each = {kind_of(spec, "forward"): spec for spec in specs}
    compile_ahead(one_of_each.values(), map(registry.find, job.backends), job.deadline - time.monotonic())


def _row(shape: Shape, job: Job) -> dict[str, Any] | None:
    """Return the microseconds of a shape by step and way; None if no backend runs it."""
    batch = batch_beyond_the_cache(shape, job.device)
    ways = {name: side for name, side in strategies(batch, job).items() if name != TORCH}
    by_turns = functools.partial(sides.settings, "adaptive", job.table, job.backends)
    ways[ADAPTIVE] = Side(batch.with_attnreg, batch.front_sets, by_turns)
    _take_turns(ways[ADAPTIVE], shape.backward)
    right = checked(batch, ways, job)
    if CHOSEN not in right or not any(name.startswith(FIXED) for name in right):
        return None
    timed = {
        name: _timer(right_side.side, shape.backward, MOST_CALLS).measure
        for name, right_side in right.items()
    }
    by_round = _by_round(interleaved(timed, job.rounds))
    taken = _medians(by_round)
    bound = {step: _bound(right[best_of(times)].side, shape.backward, step) for step, times in taken.items()}
    if BY_HOST in bound.values():
        for step, times in _by_round(interleaved(timed, MORE * job.rounds)).items():
            for name, added in times.items():
                by_round[step][name] += added
        taken = _medians(by_round)
    return {
        "case": str(shape),
        "shape": shape.to_dict(),
        "ran": {name: _ran(right_side.side, shape.backward) for name, right_side in right.items()},
        "microseconds": taken,
        "rounds": by_round,
        "bound": bound,
    }


def _by_round(rounds: Mapping[str, list[dict[str, float]]]) -> dict[str, dict[str, list[float]]]:
    """Return microseconds by step, way and round, of seconds by way, round and step."""
    return {
        step: {name: [seconds[step] * 1e6 for seconds in taken] for name, taken in rounds.items()}
        for step in rounds[CHOSEN][0]
    }


def _medians(by_round: Mapping[str, Mapping[str, list[float]]]) -> dict[str, dict[str, float]]:
    return {
        step: {name: statistics.median(microseconds) for name, microseconds in times.items()}
        for step, times in by_round.items()
    }


def _take_turns(side: Side, backward: bool) -> None:
    """Make the calls in which backends take turns, and one more call after them."""
    timer = timer_for(side.sets[0].q.device)
    with side.within():
        for _, run, calls in _timer(side, backward, 1).steps():
            for count in (-(-MOST_TURNS // calls), 1):
                for _ in range(count):
                    with contextlib.suppress(Exception):  # the backend gets no more turns
                        run()
                timer.wait()


def _ran(side: Side, backward: bool) -> dict[str, str]:
    """Return the backends of each step. A forward without a gradient may run on another backend."""
    backends = {}
    with side.within():
        for step, run, _ in _timer(side, backward, 1).steps():
            reset_stats()
            run()
            forward, *both = sides.ran().values()
            backends[step] = forward if step == FORWARD else " + ".join(dict.fromkeys((forward, *both)))
    return backends


def _timer(side: Side, backward: bool, most: int) -> SideTimer:
    return SideTimer(side, backward, SECONDS, most, BURSTS)


def _bound(side: Side, backward: bool, step: str) -> str:
    """Return whether the host takes as long as the calls do; on a CPU the device is the host."""
    if not side.sets[0].q.is_cuda:
        return BY_DEVICE
    timer = _timer(side, backward, FEW_CALLS)
    whole, host = (timer.measure(clock)[step] for clock in ("back_to_back", "host"))
    return BY_HOST if host >= HOST_BOUND * whole else BY_DEVICE
