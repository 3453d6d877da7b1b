"""What each way to choose a backend loses, on shapes drawn at random: `attnreg bench selection --random N`.

A shape follows from the seed and its number. Each backend is registered in turn; the time of the best of
them, forward and forward + backward as one, is what those of attnreg's choice by measurement, its policy
"adaptive" (from nothing, after its turns), its default order and every backend are divided by, in each round.
Calls are made as a program makes them, one right after the other, the layers of a model in one graph. Whether
the host or the device takes longer is measured for the best backend; shapes of both kinds are summed up
separately, as what is lost on the host no kernel can win back.
"""

from __future__ import annotations

import contextlib
import functools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle
from math import exp, log
from typing import Any

from attnreg import _registry
from attnreg.bench import sides
from attnreg.bench.ahead import compile_ahead
from attnreg.bench.compare import batch_beyond_the_cache, checked, short
from attnreg.bench.report import Job, Table
from attnreg.bench.selection import strategies
from attnreg.bench.shapes import BOTH, FORWARD, Shape, decode, dense, packed
from attnreg.bench.sides import Side
from attnreg.bench.summary import ADAPTIVE, CHOSEN, FIXED, TORCH
from attnreg.dispatch import planning
from attnreg.dispatch.counters import reset_stats
from attnreg.errors import BackendUnavailableError
from attnreg.measure.timing import calls_for, interleaved, timer_for
from attnreg.selection import adaptive
from attnreg.selection.turns import MOST_TURNS
from attnreg.tuning.kinds import kind_of

# As long as a measurement takes, but for calls that take longer. With 50 calls of 40 us in each of three
# rounds the best backend of a call bound by the host took 1.03 times as long as itself. So few fill no queue
# of a GPU, in which case the host would wait for it.
SECONDS, MOST_CALLS, FEW_CALLS = 0.012, 250, 50
# A measurement is the least of so many in a row, as `timeit` takes it: one that another program interrupts
# says nothing of a kernel. With one alone the same backend, measured twice, differed by up to 1.5 at 30 us.
BURSTS = 3
# A loss of more than this is counted, and a host that takes so much of the time is what bounds a call.
MUCH, HOST_BOUND = 1.15, 0.9
WORST = 10
ALL, BY_HOST, BY_DEVICE = "all", "bound by the host", "bound by the device"

# Lengths, the most tokens in a call, the most floating-point operations of a forward.
GPU, CPU = (180, 11_600, 48_000, 6e11), (12, 400, 1_200, 2e8)

Row = Mapping[str, Any]


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
    with adaptive.from_nothing():
        _measure(job, count, seed, table, rows)
    if not rows:
        raise BackendUnavailableError("; ".join(["nothing could be measured", *job.left_out[:3]]))
    summed, worst = summary(rows), {step: worst_of(rows, step) for step in (FORWARD, BOTH)}
    job.keep({"seed": seed, "table": table, "summary": summed, "worst": worst, "rows": rows})
    job.tables = _tables(summed, worst)
    job.summary = [f"chosen by: {table}", f"{len(rows)} shapes of seed {seed}"]


def _compile_ahead(job: Job, count: int, seed: int) -> None:
    """Have the kernels compiled that the shapes need: one shape of each kind needs all of its kind's."""
    job.advance(0, count, "compiling")
    device = planning.device_of(job.device)
    specs = [draw(seed, number, device.type).spec(device) for number in range(count)]
    one_of_each = {kind_of(spec, "forward"): spec for spec in specs}
    compile_ahead(one_of_each.values(), map(_registry.find, job.backends), job.deadline - time.monotonic())


def _measure(job: Job, count: int, seed: int, table: str, rows: list[dict[str, Any]]) -> None:
    for number in range(count):
        shape = draw(seed, number, job.device.type)
        job.advance(number, count, str(shape))
        if job.late:
            job.leave_out(f"{count - number} of {count} shapes", "the time was spent")
            break
        try:
            row = _row(shape, job)
        except Exception as problem:  # noqa: BLE001 - the other shapes are worth their figures
            job.leave_out(f"{number}: {shape}", short(problem))
            continue
        if row is not None:
            rows.append({"number": number} | row)
            job.keep({"seed": seed, "table": table, "rows": [*rows]})


def _row(shape: Shape, job: Job) -> dict[str, Any] | None:
    """Return what one shape took, microseconds by step and way; None if no backend runs it."""
    batch = batch_beyond_the_cache(shape, job.device)
    ways = {name: side for name, side in strategies(batch, job).items() if name != TORCH}
    by_turns = functools.partial(sides.settings, "adaptive", job.table, job.backends)
    ways[ADAPTIVE] = Side(batch.with_attnreg, batch.front_sets, by_turns)
    _take_turns(ways[ADAPTIVE], shape.backward)
    right = checked(batch, ways, job)
    if CHOSEN not in right or not any(name.startswith(FIXED) for name in right):
        return None
    timed = {name: functools.partial(_times, one.side, shape.backward, {}) for name, one in right.items()}
    rounds = interleaved(timed, job.rounds)
    by_round = {
        step: {name: [one[step] * 1e6 for one in rounds[name]] for name in rounds}
        for step in rounds[CHOSEN][0]
    }
    taken = {
        step: {name: statistics.median(found) for name, found in times.items()}
        for step, times in by_round.items()
    }
    return {
        "case": str(shape),
        "shape": shape.to_dict(),
        "ran": {name: _ran(one.side, shape.backward) for name, one in right.items()},
        "microseconds": taken,
        "rounds": by_round,
        "bound": {
            step: _bound(right[best_of(times)].side, shape.backward, step) for step, times in taken.items()
        },
    }


def _take_turns(side: Side, backward: bool) -> None:
    """Make the calls at which backends take turns, and one more, which finds them over."""
    timer = timer_for(side.sets[0].q.device)
    with side.within():
        for _, run, calls, _ in _steps(side, backward):
            for count in (-(-MOST_TURNS // calls), 1):
                for _ in range(count):
                    with contextlib.suppress(Exception):  # the backend gets no more turns
                        run()
                timer.wait()


def _ran(side: Side, backward: bool) -> dict[str, str]:
    """Return what runs in each step: without a gradient a forward may be another backend's."""
    found = {}
    with side.within():
        for step, run, _, _ in _steps(side, backward):
            reset_stats()
            run()
            forward, *both = sides.ran().values()
            found[step] = forward if step == FORWARD else " + ".join(dict.fromkeys((forward, *both)))
    return found


def best_of(times: Mapping[str, float]) -> str:
    """Return which backend took least."""
    return min((name for name in times if name.startswith(FIXED)), key=times.__getitem__)


def _steps(side: Side, backward: bool) -> Iterator[tuple[str, Callable[[], object], int, int]]:
    """Yield each step, what is timed, how many calls are in it, and how often it is run before."""
    in_turn = cycle(side.sets)
    yield FORWARD, lambda: sides.forward(side.front, next(in_turn)), 1, sides.WARM_UP
    if backward:
        once = -(-sides.WARM_UP // len(side.sets))
        sets = side.sets
        yield BOTH, lambda: sides.layers_backward(sides.layers(side.front, sets), sets), len(sets), once


def _times(
    side: Side, backward: bool, often: dict[str, int], clock: str = "back_to_back", most: int = MOST_CALLS
) -> dict[str, float]:
    """Return the seconds of a call in each step; `often` keeps how often each is run for that."""
    taken, timer = {}, timer_for(side.sets[0].q.device)
    with side.within():
        for step, run, calls, before in _steps(side, backward):
            for _ in range(before):
                run()
            if step not in often:
                often[step] = calls_for(SECONDS / BURSTS, timer.back_to_back(run, 1), most)
            taken[step] = min(getattr(timer, clock)(run, often[step]) for _ in range(BURSTS)) / calls
    return taken


def _bound(side: Side, backward: bool, step: str) -> str:
    """Return whether the host takes as long as the calls do; on a CPU the device is the host."""
    if not side.sets[0].q.is_cuda:
        return BY_DEVICE
    often: dict[str, int] = {}
    clocks = "back_to_back", "host"
    whole, host = (_times(side, backward, often, clock, FEW_CALLS)[step] for clock in clocks)
    return BY_HOST if host >= HOST_BOUND * whole else BY_DEVICE


def losses_of(row: Row, step: str) -> dict[str, float]:
    """Return the time of each way over that of the best backend: in each round, and of that the median.

    A host runs at half its speed for seconds at a time. In one round all ways have it alike.
    """
    rounds = row["rounds"][step]
    best = rounds[best_of(row["microseconds"][step])]
    return {
        name: statistics.median(one / other for one, other in zip(times, best, strict=True))
        for name, times in rounds.items()
    }


def losses(rows: Sequence[Row], step: str, bound: str = ALL) -> dict[str, list[float]]:
    """Return what each way loses, of every shape that has the step."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if step in row["microseconds"] and bound in (ALL, row["bound"][step]):
            for name, loss in losses_of(row, step).items():
                found.setdefault(name, []).append(loss)
    return found


def summary(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return mean, percentiles and worst of the losses, by step, bound and way."""
    return [
        {
            "step": step, "bound": bound, "way": name, "shapes": len(found), "mean": statistics.fmean(found),
            "median": percentile(found, 50), "p90": percentile(found, 90), "p99": percentile(found, 99),
            "worst": max(found), "above": sum(loss > MUCH for loss in found) / len(found),
        }
        for step in (FORWARD, BOTH)
        for bound in (ALL, BY_HOST, BY_DEVICE)
        for name, found in losses(rows, step, bound).items()
    ]  # fmt: skip


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the least value that so many percent of all don't exceed."""
    return sorted(values)[max(0, -int(-len(values) * percent // 100) - 1)]


def worst_of(rows: Sequence[Row], step: str) -> list[dict[str, Any]]:
    """Return the shapes on which the choice by measurement loses most: what ran, and what is best."""
    found = []
    for row in rows:
        if times := row["microseconds"].get(step):
            best = best_of(times)
            found.append(
                {
                    "number": row["number"], "case": row["case"], "loss": losses_of(row, step)[CHOSEN],
                    "ran": row["ran"][CHOSEN][step], "best": best.removeprefix(FIXED),
                    "microseconds": times[best],
                }
            )  # fmt: skip
    return sorted(found, key=lambda one: -one["loss"])[:WORST]


def _tables(summed: Sequence[Row], worst: Mapping[str, Sequence[Row]]) -> list[Table]:
    """Return the sums, separate for each bound of a call if both occur, and the most that is lost."""
    numbers, found = ("mean", "median", "p90", "p99", "worst"), []
    for step in (FORWARD, BOTH):
        here = [one for one in summed if one["step"] == step]
        bounds = list(dict.fromkeys(one["bound"] for one in here))
        for bound in bounds if len(bounds) > 2 else bounds[:1]:
            rows = [
                (one["way"], *(f"{one[x]:.3f}" for x in numbers), f"{one['above']:.1%}", str(one["shapes"]))
                for one in here
                if one["bound"] == bound
            ]
            title = f"{step}, {bound}: time over that of the best backend"
            found.append(Table(title, ("chosen", *numbers, f"above {MUCH}", "shapes"), rows))
        cells = [
            (f"{one['number']}: {one['case']}", f"{one['loss']:.2f}", one["ran"], one["best"])
            for one in worst[step]
        ]
        header = ("shape", "loss", "by measurement", "best")
        found.append(Table(f"{step}: the most that is lost", header, cells))
    return found
