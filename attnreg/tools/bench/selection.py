"""How good attnreg's choices are, end to end, on shapes that no table was tuned on.

Each case and direction has a ratio: the time through attnreg with a measured table, over the time of the best
single kernel. A small call is bound by the host, so there are two yardsticks:

- the kernels called directly, joined by a minimal `autograd.Function`;
- the backends through the same front, each preferred by `register_backend`.

The other strategies are attnreg's default order, each backend first, and torch alone: its default SDPA, its
`varlen_attn`.

Calls follow each other immediately. If the host is slower than the device, their time is the host's. Each
call uses other tensors, so that they come from memory as in a model. The calls share a graph, which autograd
traverses in a single pass. The backward alone is repeated on the same graph.
"""

from __future__ import annotations

import functools
import statistics
from typing import Any

from attnreg import api
from attnreg.core import registry
from attnreg.core.dispatch import counters, planning
from attnreg.tools.bench import sides
from attnreg.tools.bench.compare import (
    Batch,
    Checked,
    SideTimer,
    batch_beyond_the_cache,
    checked,
    measured_in_time,
)
from attnreg.tools.bench.report import Job, PrintedTable, reached
from attnreg.tools.bench.shapes import BACKWARD, BOTH, FORWARD, Shape, held_out
from attnreg.tools.bench.sides import Side
from attnreg.tools.bench.summary import CHOSEN, FIXED, GROUPS, ORDER, TORCH, aims, gains, ratios, summary
from attnreg.tools.measure.timing import interleaved

QUICK = 6
DIRECTLY = "called directly, "
# Of a measurement: see `SideTimer`.
SECONDS, MOST_CALLS = 0.005, 100


def measure(job: Job) -> None:
    """Measure every case that the time allows; refuses where attnreg ran none of them."""
    shapes = held_out(job.device.type)
    shapes = shapes[: QUICK if job.device.type == "cuda" else QUICK // 2] if job.quick else shapes
    table = sides.table_in_force(job.device, job.table)
    rows: list[dict[str, Any]] = []
    results: dict[str, Any] = {}
    for _, row in measured_in_time(shapes, list(map(str, shapes)), _row, job):
        rows.append(row)
        summed, gained = summary(rows), gains(rows)
        judged = aims(summed, gained)
        results = {"table": table, "aims": judged, "summary": summed, "gains": gained, "rows": [*rows]}
        job.keep(results)
    job.check_measured(rows)
    job.tables, job.summary = _tables(results), [f"chosen by: {table}"]
    for aim in results["aims"]:
        job.summary.append(f"{aim['what']}: {aim['value']:.3f}, aim {aim['aim']}: {reached(aim['reached'])}")
    job.keep(results)


def _row(shape: Shape, job: Job) -> dict[str, Any] | None:
    """Return the microseconds of a case by direction and strategy; None if attnreg didn't run it."""
    batch = batch_beyond_the_cache(shape, job.device)
    right = checked(batch, strategies(batch, job), job)
    if CHOSEN not in right:
        return None
    timed = functools.partial(SideTimer, seconds=SECONDS, most=MOST_CALLS, alone=True)
    runners = {name: timed(right_side.side, shape.backward) for name, right_side in right.items()}
    for name, (side, backward) in _direct(batch, job).items():
        if wrong := batch.verdict(side.results(backward), side.sets).wrong:
            job.leave_out(f"{shape}, {DIRECTLY}{name}", f"WRONG: {wrong}")
        else:
            runners[DIRECTLY + name] = timed(side, backward)
    measured = interleaved({name: runner.measure for name, runner in runners.items()}, job.rounds)
    directions = {}
    for direction in measured[CHOSEN][0]:
        taken = {
            name: statistics.median(seconds[direction] for seconds in rounds) * 1e6
            for name, rounds in measured.items()
            if direction in rounds[0]
        }
        direct = [name for name in taken if name.startswith(DIRECTLY)]
        directly = {name.removeprefix(DIRECTLY): taken.pop(name) for name in direct}
        directions[direction] = {
            "called_directly": directly, "front": taken, "ratios": ratios(directly, taken)
        }  # fmt: skip
    return {
        "case": str(shape),
        "group": shape.group,
        "shape": shape.to_dict(),
        "ran": {name: _ran(right_side) for name, right_side in right.items()},
        "directions": directions,
    }


def _ran(right_side: Checked) -> dict[str, str]:
    """Return the backend of each call. A forward without gradients may run on another backend."""
    counters.reset_stats()
    right_side.side.results(backward=False)
    alone = sides.ran()["forward"]
    return {FORWARD: alone, "forward, grad": right_side.ran["forward"], BACKWARD: right_side.ran["backward"]}


def strategies(batch: Batch, job: Job) -> dict[str, Side]:
    """Return every way to decide: by measurement, by order, always one backend first, torch alone."""
    within: dict[str, Any] = {
        CHOSEN: functools.partial(sides.settings, "measured", job.table, job.backends),
        ORDER: functools.partial(sides.settings, "order", among=job.backends),
        **{FIXED + name: functools.partial(api.register_backend, name) for name in job.backends},
    }
    attnreg_sides = {
        name: Side(batch.with_attnreg, batch.front_sets, context) for name, context in within.items()
    }
    return attnreg_sides | {TORCH: Side(batch.with_torch, batch.front_sets, sides.torch_alone)}


def _direct(batch: Batch, job: Job) -> dict[str, tuple[Side, bool]]:
    """Return each backend's kernels called directly, and whether there is a backward."""
    spec = batch.shape.spec(planning.device_of(job.device))
    direct_sides = {}
    for name in job.backends:
        entry = registry.find(name)
        if entry.reasons(spec, "forward"):
            continue
        backward = batch.shape.backward and not entry.reasons(spec, "backward")
        kernels = entry.kernel("forward", spec), entry.kernel("backward", spec) if backward else None
        direct_sides[name] = (
            Side(sides.called_directly(*kernels, batch.call), batch.sets, sides.by_default),
            backward,
        )
    return direct_sides


def _tables(results: dict[str, Any]) -> list[PrintedTable]:
    """Return the means, the gains over torch, and a row for each case."""
    result_tables = []
    rows_of = {(r["direction"], r["yardstick"], r["strategy"], r["group"]): r for r in results["summary"]}
    for direction, yardstick in dict.fromkeys(key[:2] for key in rows_of):
        names = dict.fromkeys(key[2] for key in rows_of if key[:2] == (direction, yardstick))
        rows = []
        for name in names:
            cells = [rows_of.get((direction, yardstick, name, group)) for group in GROUPS]
            rows.append((name, *(f"{row['mean']:.3f} / {row['worst']:.2f}" if row else "-" for row in cells)))
        title = f"{direction}: time over that of the {yardstick}, geometric mean / worst"
        result_tables.append(PrintedTable(title, ("strategy", *GROUPS), rows))
    gained = [
        (f"{r['group']}, {r['direction']}", f"{r['mean']:.2f}", f"{r['worst']:.2f}", str(r["cases"]))
        for r in results["gains"]
    ]
    result_tables.append(
        PrintedTable("Times as fast as torch's default", ("calls", "mean", "worst", "cases"), gained)
    )
    directions = dict.fromkeys(name for row in results["rows"] for name in row["directions"])
    result_tables += [_cases(direction, results["rows"]) for direction in directions]
    return result_tables


def _cases(direction: str, rows: list[dict[str, Any]]) -> PrintedTable:
    here = [row for row in rows if direction in row["directions"]]
    names = list(dict.fromkeys(name for row in here for name in row["directions"][direction]["front"]))
    cells = []
    for row in here:
        figures, chosen = row["directions"][direction], row["ran"][CHOSEN]
        parts = ("forward, grad", BACKWARD) if direction == BOTH else (direction,)
        times = [figures["front"].get(name) for name in names]
        directly = min(figures["called_directly"].values(), default=None)
        which = "+".join(dict.fromkeys(chosen[part] for part in parts))
        shown = ("-" if time is None else f"{time:.1f}" for time in (*times, directly))
        cells.append((row["case"], which, *shown))
    short = [name.removeprefix("attnreg, ").removeprefix(FIXED) for name in names]
    return PrintedTable(f"{direction}, µs", ("case", "chosen", *short, "called directly"), cells)
