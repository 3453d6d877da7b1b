"""What each way to choose a backend loses, on shapes that no table was tuned on.

The shapes are drawn at random: a seed and a shape's number determine the shape. Without `--random` they are
always the same. The *ways* to choose are attnreg's choice by measurement, its policy "adaptive" (from
nothing, after its turns), its default order, and each backend registered. The shapes that are always the same
also run on torch alone: its default SDPA, its `varlen_attn`. A way's loss is its time over the best backend's
time in the same round, for the forward and for forward + backward as a whole.

Calls follow each other immediately, as in a program, and the layers of a model share a graph of autograd. For
the best backend it is measured whether the host or the device takes longer. Losses of shapes that the host
bounds are summed up apart, because no kernel can win back time that the host takes.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from attnreg import api
from attnreg.core import registry
from attnreg.core.dispatch import planning
from attnreg.core.dispatch.counters import reset_stats
from attnreg.core.times import adaptive
from attnreg.core.times.kinds import kind_of
from attnreg.core.times.turns import MOST_TURNS
from attnreg.tools.bench import sides
from attnreg.tools.bench.ahead import compile_ahead
from attnreg.tools.bench.compare import (
    Batch,
    SideTimer,
    batch_beyond_the_cache,
    by_step,
    checked,
    measured_in_time,
)
from attnreg.tools.bench.report import Job, PrintedTable
from attnreg.tools.bench.shapes import BOTH, FORWARD, drawn, facts_of, trains
from attnreg.tools.bench.sides import Side
from attnreg.tools.lines import counted
from attnreg.tools.measure import Case
from attnreg.tools.measure.timing import timer_for

Row = Mapping[str, Any]

# The ways to choose; "always" has the name of a backend behind it.
CHOSEN, ORDER, FIXED, TORCH = "attnreg, measured", "attnreg, order", "always ", "torch"
ADAPTIVE = "attnreg, adaptive"

# A loss of more than this is counted; so many of the worst are named.
MUCH, WORST = 1.15, 10
ALL, BY_HOST, BY_DEVICE = "all", "bound by the host", "bound by the device"

# How many shapes there are without `--random`, without and with `--quick`; and their seed, by which already
# the first vary in everything. `--seed` takes numbers, so no random shapes are these.
GPU_COUNTS, COUNTS, SEED = (58, 6), (6, 3), "repeatable"
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


def measure(job: Job, count: int | None = None, seed: int | str = SEED) -> None:
    """Measure `count` shapes of a seed, while there is time; refuses where none could be measured."""
    table = sides.table_in_force(job.device, job.table)
    usual = GPU_COUNTS if job.device.type == "cuda" else COUNTS
    shapes = [drawn(seed, number, job.device.type) for number in range(count or usual[job.quick])]
    results: dict[str, Any] = {"seed": seed, "table": table}
    rows: list[dict[str, Any]] = []
    _compile_ahead(job, shapes)
    names = [f"{number}: {shape.name}" for number, shape in enumerate(shapes)]
    row_of = functools.partial(_row, with_torch=count is None)
    with adaptive.from_nothing():
        for number, row in measured_in_time(shapes, names, row_of, job):
            rows.append({"number": number} | row)
            job.keep(results | {"rows": [*rows]})
    job.check_measured(rows)
    summed, worst = summary(rows), {step: worst_of(rows, step) for step in (FORWARD, BOTH)}
    job.keep(results | {"summary": summed, "worst": worst, "rows": rows})
    job.tables = tables(summed, worst)
    job.summary = [f"chosen by: {table}", f"{counted(len(rows), 'shape')} of seed {seed!r}"]


def _compile_ahead(job: Job, shapes: Sequence[Case]) -> None:
    """Compile the kernels that the shapes need. A shape needs all kernels of its kind."""
    job.advance(0, len(shapes), "compiling")
    device = planning.device_of(job.device)
    specs = [shape.spec(device, needs_backward=trains(shape)) for shape in shapes]
    one_of_each = {kind_of(spec, "forward"): spec for spec in specs}
    compile_ahead(one_of_each.values(), map(registry.find, job.backends), job.deadline - time.monotonic())


def ways(batch: Batch, job: Job) -> dict[str, Side]:
    """Return every way to decide: by measurement, order, one backend first, turns, and torch alone."""
    within: dict[str, Any] = {
        CHOSEN: functools.partial(sides.settings, "measured", job.table, job.backends),
        ORDER: functools.partial(sides.settings, "order", among=job.backends),
        **{FIXED + name: functools.partial(api.register_backend, name) for name in job.backends},
        ADAPTIVE: functools.partial(sides.settings, "adaptive", job.table, job.backends),
    }
    attnregs = {name: Side(batch.with_attnreg, batch.front_sets, context) for name, context in within.items()}
    return attnregs | {TORCH: Side(batch.with_torch, batch.front_sets, sides.torch_alone)}


def _row(shape: Case, job: Job, with_torch: bool) -> dict[str, Any] | None:
    """Return the microseconds of a shape by step and way; None if no backend runs it."""
    batch = batch_beyond_the_cache(shape, job.device)
    compared = {name: side for name, side in ways(batch, job).items() if with_torch or name != TORCH}
    _take_turns(compared[ADAPTIVE], trains(shape))
    right = checked(batch, compared, job)
    if CHOSEN not in right or not any(name.startswith(FIXED) for name in right):
        return None
    timers = {name: _timer(each.side, trains(shape), MOST_CALLS) for name, each in right.items()}
    by_round = _by_round(timers, job.rounds)
    taken = _medians(by_round)
    bound = {step: _bound(right[best_of(times)].side, trains(shape), step) for step, times in taken.items()}
    if BY_HOST in bound.values():
        for step, times in _by_round(timers, MORE * job.rounds).items():
            for name, added in times.items():
                by_round[step][name] += added
        taken = _medians(by_round)
    return {
        "case": shape.name,
        "shape": facts_of(shape),
        "ran": {name: _ran(right_side.side, trains(shape)) for name, right_side in right.items()},
        "microseconds": taken,
        "rounds": by_round,
        "bound": bound,
    }


def _by_round(timers: Mapping[str, SideTimer], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return microseconds by step, way and round."""
    return {
        step: {name: [seconds * 1e6 for seconds in each] for name, each in taken.items()}
        for step, taken in by_step(timers, rounds, "back_to_back").items()
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
        for _, run, calls in side.runs_of_model(backward):
            for count in (-(-MOST_TURNS // calls), 1):
                for _ in range(count):
                    with contextlib.suppress(Exception):  # the backend gets no more turns
                        run()
                timer.wait()


def _ran(side: Side, backward: bool) -> dict[str, str]:
    """Return the backends of each step. A forward without a gradient may run on another backend."""
    backends = {}
    with side.within():
        for step, run, _ in side.runs_of_model(backward):
            reset_stats()
            run()
            forward, *both = sides.ran().values()
            backends[step] = forward if step == FORWARD else " + ".join(dict.fromkeys((forward, *both)))
    return backends


def _timer(side: Side, backward: bool, most: int) -> SideTimer:
    return SideTimer(side, side.runs_of_model(backward), SECONDS, most, BURSTS)


def _bound(side: Side, backward: bool, step: str) -> str:
    """Return whether the host takes as long as the calls do; on a CPU the device is the host."""
    if not side.sets[0].q.is_cuda:
        return BY_DEVICE
    timer = _timer(side, backward, FEW_CALLS)
    whole, host = (timer.measure(clock)[step] for clock in ("back_to_back", "host"))
    return BY_HOST if host >= HOST_BOUND * whole else BY_DEVICE


def best_of(times: Mapping[str, float]) -> str:
    """Return which backend took least."""
    return min((name for name in times if name.startswith(FIXED)), key=times.__getitem__)


def losses_of(row: Row, step: str) -> dict[str, float]:
    """Return each way's time over the best backend's time: the median of the ratios of the rounds.

    A host may run at half its speed for seconds. Within a round this affects all ways alike.
    """
    rounds = row["rounds"][step]
    best = rounds[best_of(row["microseconds"][step])]
    return {
        name: statistics.median(taken / other for taken, other in zip(times, best, strict=True))
        for name, times in rounds.items()
    }


def losses(rows: Sequence[Row], step: str, bound: str = ALL) -> dict[str, list[float]]:
    """Return what each way loses, of every shape that has the step."""
    losses_by_way: dict[str, list[float]] = {}
    for row in rows:
        if step in row["microseconds"] and bound in (ALL, row["bound"][step]):
            for name, loss in losses_of(row, step).items():
                losses_by_way.setdefault(name, []).append(loss)
    return losses_by_way


def summary(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return mean, percentiles and worst of the losses, by step, bound and way."""
    return [
        {
            "step": step, "bound": bound, "way": name, "shapes": len(ratios),
            "mean": statistics.fmean(ratios), "median": percentile(ratios, 50),
            "p90": percentile(ratios, 90), "p99": percentile(ratios, 99), "worst": max(ratios),
            "above": sum(loss > MUCH for loss in ratios) / len(ratios),
        }
        for step in (FORWARD, BOTH)
        for bound in (ALL, BY_HOST, BY_DEVICE)
        for name, ratios in losses(rows, step, bound).items()
    ]  # fmt: skip


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the least value that `percent` percent of the values don't exceed."""
    return sorted(values)[max(0, -int(-len(values) * percent // 100) - 1)]


def worst_of(rows: Sequence[Row], step: str) -> list[dict[str, Any]]:
    """Return the shapes on which the choice by measurement loses most: what ran, and what is best."""
    shapes = []
    for row in rows:
        if times := row["microseconds"].get(step):
            best = best_of(times)
            shapes.append(
                {
                    "number": row["number"], "case": row["case"], "loss": losses_of(row, step)[CHOSEN],
                    "ran": row["ran"][CHOSEN][step], "best": best.removeprefix(FIXED),
                    "microseconds": times[best],
                }
            )  # fmt: skip
    return sorted(shapes, key=lambda row: -row["loss"])[:WORST]


def tables(summed: Sequence[Row], worst: Mapping[str, Sequence[Row]]) -> list[PrintedTable]:
    """Return the sums, separate for each bound of a call if both occur, and the most that is lost."""
    numbers, result_tables = ("mean", "median", "p90", "p99", "worst"), []
    for step in (FORWARD, BOTH):
        here = [row for row in summed if row["step"] == step]
        bounds = list(dict.fromkeys(row["bound"] for row in here))
        for bound in bounds if len(bounds) > 2 else bounds[:1]:
            rows = [
                (row["way"], *(f"{row[x]:.3f}" for x in numbers), f"{row['above']:.1%}", str(row["shapes"]))
                for row in here
                if row["bound"] == bound
            ]
            title = f"{step}, {bound}: time over that of the best backend"
            result_tables.append(PrintedTable(title, ("chosen", *numbers, f"above {MUCH}", "shapes"), rows))
        cells = [
            (f"{row['number']}: {row['case']}", f"{row['loss']:.2f}", row["ran"], row["best"])
            for row in worst[step]
        ]
        header = ("shape", "loss", "by measurement", "best")
        result_tables.append(PrintedTable(f"{step}: the most that is lost", header, cells))
    return result_tables
