"""How good attnreg's choices are, end to end, on shapes that no table was tuned on.

For each case and direction: the time through attnreg with a measured table, over that of the best
single kernel. There are two yardsticks, since a small call is bound by the host: the kernels called
directly, joined by a minimal `autograd.Function`, and the backends through the same front, each led by
`register_backend`. The other strategies are attnreg's default order, each backend first, and torch alone:
its default SDPA, its `varlen_attn`.

Times are of calls one right after the other; where the host is slower than the device it is the host's.
The tensors change with every call, so that they come from memory as they do in a model, and the calls on
them are one graph, through which autograd goes in one pass. The backward alone is repeated on one graph.
"""

from __future__ import annotations

import functools
import statistics
from typing import TYPE_CHECKING, Any

from attnreg.bench.batches import Batch, named, sets_beyond_the_cache
from attnreg.bench.compare import Checked, checked, short
from attnreg.bench.contexts import table_in_force
from attnreg.bench.report import Report, Table
from attnreg.bench.shapes import BACKWARD, BOTH, FORWARD, held_out
from attnreg.bench.sides import ran
from attnreg.bench.strategies import Runner, by_direction, direct, strategies
from attnreg.bench.summary import CHOSEN, FIXED, GROUPS, aims, gains, ratios, summary
from attnreg.dispatch import counters
from attnreg.errors import BackendUnavailableError
from attnreg.measure.timing import interleaved

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from attnreg.bench.report import Job
    from attnreg.bench.shapes import Shape

QUICK = 6
DIRECTLY = "called directly, "


def measure(job: Job) -> Report:
    """Measure every case that the time allows.

    Raises:
        BackendUnavailableError: attnreg ran none of them.
    """
    shapes = held_out(job.device.type)
    shapes = shapes[: QUICK if job.device.type == "cuda" else QUICK // 2] if job.quick else shapes
    table = table_in_force(job.device, job.table)
    rows: list[dict[str, Any]] = []
    results: dict[str, Any] = {}
    for number, shape in enumerate(shapes):
        job.advance(number, len(shapes), str(shape))
        if job.late:
            job.leave_out(f"{len(shapes) - number} of {len(shapes)} cases", "the time was spent")
            break
        try:
            row = _row(shape, job)
        except Exception as problem:  # noqa: BLE001 - the other cases are worth their figures
            job.leave_out(str(shape), short(problem))
            continue
        rows += [row] if row else []
        results = {"table": table, **_summed(rows)}
        job.keep(results)
    if not rows:
        raise BackendUnavailableError("; ".join(["nothing could be measured", *job.left_out[:3]]))
    lines = [f"chosen by: {table}"]
    lines += [
        f"{one['what']}: {one['value']:.3f}, aim {one['aim']}: {_reached(one)}" for one in results["aims"]
    ]
    return Report(results, list(_tables(results)), lines)


def _summed(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    summed, gained = summary(rows), gains(rows)
    return {"aims": aims(summed, gained), "summary": summed, "gains": gained, "rows": list(rows)}


def _reached(aim: Mapping[str, Any]) -> str:
    return "reached" if aim["reached"] else "MISSED"


def _row(shape: Shape, job: Job) -> dict[str, Any] | None:
    """Return what one case took, microseconds by direction and strategy; None if attnreg didn't run it."""
    batch = Batch(shape, job.device, sets_beyond_the_cache(shape, job.device))
    sample = batch.sample()
    right = checked(
        shape, strategies(batch, job), lambda _, got: (sample, batch.contract(got)), lambda *_: "", job
    )
    if CHOSEN not in right:
        return None
    runners = {name: Runner.through(one.side, shape.backward) for name, one in right.items()}
    for name, (runner, side, backward) in direct(batch, job).items():
        if wrong := sample.verdict(named(side.results(backward))).wrong:
            job.leave_out(f"{shape}, {DIRECTLY}{name}", f"WRONG: {wrong}")
        else:
            runners[DIRECTLY + name] = runner
    measured = interleaved(
        {name: functools.partial(runner.measure, job.device) for name, runner in runners.items()}, job.rounds
    )
    return {
        "case": str(shape),
        "group": shape.group,
        "shape": shape.to_dict(),
        "ran": {name: _ran(one) for name, one in right.items()},
        "directions": {
            direction: _direction({name: statistics.median(seconds) * 1e6 for name, seconds in found.items()})
            for direction, found in by_direction(measured).items()
        },
    }


def _ran(one: Checked) -> dict[str, str]:
    """Return which backend each call runs: a forward without gradients may be another's than one with."""
    counters.reset_stats()
    one.side.results(backward=False)
    return {FORWARD: ran()["forward"], "forward, grad": one.ran["forward"], BACKWARD: one.ran["backward"]}


def _direction(taken: Mapping[str, float]) -> dict[str, Any]:
    directly = {
        name.removeprefix(DIRECTLY): time for name, time in taken.items() if name.startswith(DIRECTLY)
    }
    front = {name: time for name, time in taken.items() if not name.startswith(DIRECTLY)}
    return {"called_directly": directly, "front": front, "ratios": ratios(directly, front)}


def _tables(results: Mapping[str, Any]) -> list[Table]:
    """Return the means, the gains over torch, and a row for each case."""
    found = []
    rows_of = {(r["direction"], r["yardstick"], r["strategy"], r["group"]): r for r in results["summary"]}
    for direction, yardstick in dict.fromkeys(key[:2] for key in rows_of):
        names = dict.fromkeys(key[2] for key in rows_of if key[:2] == (direction, yardstick))
        rows = []
        for name in names:
            cells = [rows_of.get((direction, yardstick, name, group)) for group in GROUPS]
            rows.append((name, *(f"{one['mean']:.3f} / {one['worst']:.2f}" if one else "-" for one in cells)))
        title = f"{direction}: time over that of the {yardstick}, geometric mean / worst"
        found.append(Table(title, ("strategy", *GROUPS), rows))
    gained = [
        (f"{r['group']}, {r['direction']}", f"{r['mean']:.2f}", f"{r['worst']:.2f}", str(r["cases"]))
        for r in results["gains"]
    ]
    found.append(Table("Times as fast as torch's default", ("calls", "mean", "worst", "cases"), gained))
    directions = dict.fromkeys(name for row in results["rows"] for name in row["directions"])
    found += [_cases(direction, results["rows"]) for direction in directions]
    return found


def _cases(direction: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return microseconds of each case in one direction."""
    here = [row for row in rows if direction in row["directions"]]
    names = list(dict.fromkeys(name for row in here for name in row["directions"][direction]["front"]))
    cells = []
    for row in here:
        found, chosen = row["directions"][direction], row["ran"][CHOSEN]
        parts = ("forward, grad", BACKWARD) if direction == BOTH else (direction,)
        times = [found["front"].get(name) for name in names]
        directly = min(found["called_directly"].values(), default=None)
        which = "+".join(dict.fromkeys(chosen[part] for part in parts))
        shown = ("-" if time is None else f"{time:.1f}" for time in (*times, directly))
        cells.append((row["case"], which, *shown))
    short = [name.removeprefix("attnreg, ").removeprefix(FIXED) for name in names]
    return Table(f"{direction}, µs", ("case", "chosen", *short, "called directly"), cells)
