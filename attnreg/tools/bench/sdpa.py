"""Dense calls of 16 thousand tokens: torch's default SDPA, attnreg by measurement, each backend.

Head dim 64 and 128 of a model 2048 wide, lengths from 512 to 16384, causal or not, as many key heads
as query heads or a quarter; bfloat16. On a CPU 512 tokens of a model 256 wide, float32.
"""

from __future__ import annotations

import functools
from statistics import geometric_mean
from typing import Any

import torch

from attnreg import api
from attnreg.errors import BackendUnavailableError
from attnreg.tools.bench.compare import batch_beyond_the_cache, checked, timed
from attnreg.tools.bench.report import Job, PrintedTable
from attnreg.tools.bench.shapes import sdpa_grid
from attnreg.tools.bench.sides import STEPS, Side, settings, table_in_force, torch_alone
from attnreg.tools.lines import counted
from attnreg.tools.measure import Case
from attnreg.tools.measure.timing import matmul_rate

TORCH, CHOSEN, LED = "torch SDPA", "attnreg, measured", "attnreg, "


def measure(job: Job) -> None:
    """Time every side of every case; refuses where torch's SDPA, the yardstick, is wrong."""
    shapes = sdpa_grid(job.device.type)
    shapes = shapes[:: len(shapes) // 2] if job.quick else shapes
    table = table_in_force(job.device, job.table)
    rate = matmul_rate(job.device, getattr(torch, shapes[0].dtype))
    rows: list[dict[str, Any]] = []
    results = {"table": table, "matmul_teraflops": rate / 1e12, "rows": rows}
    for shape in job.in_time(shapes):
        rows += _rows(shape, rate, job)
        job.keep(results)
    panels = dict.fromkeys(map(_panel, shapes))
    job.tables = [_table(step, panel, rows) for panel in panels for step in STEPS]
    job.summary = [f"measured: chosen by {table}", *_mean_gains(rows)]
    job.keep(results)


def _rows(shape: Case, rate: float, job: Job) -> list[dict[str, Any]]:
    batch = batch_beyond_the_cache(shape, job.device)
    sets, measured = batch.front_sets, functools.partial(settings, "measured", job.table, job.backends)
    sides = {
        TORCH: Side(batch.with_torch, sets, torch_alone),
        CHOSEN: Side(batch.with_attnreg, sets, measured),
    }
    for name in job.backends:
        within = functools.partial(api.register_backend, name)
        sides[LED + name] = Side(batch.with_attnreg, sets, within, wanted=name)
    right = checked(batch, sides, job)
    if TORCH not in right:
        raise BackendUnavailableError(f"{TORCH} is what all is compared with, and it is wrong here")
    named = {"panel": _panel(shape), "case": f"{len(shape.lens_q)} x {shape.max_q}"}
    return [{**row, **named, "yardstick": TORCH} for row in timed(shape, right, TORCH, rate, job)]


def _panel(shape: Case) -> str:
    heads_q, heads_k = shape.heads
    return f"head dim {shape.dims[0]}{', causal' if shape.is_causal else ''}, {heads_q}:{heads_k} heads"


def _table(step: str, panel: str, rows: list[dict[str, Any]]) -> PrintedTable:
    """Return milliseconds, a case to a row and a side to a column; attnreg's also as times torch's."""
    here = [row for row in rows if (row["step"], row["panel"]) == (step, panel)]
    times = {(row["case"], row["side"]): row for row in here}
    sides = list(dict.fromkeys(row["side"] for row in here))
    cells = []
    for case in dict.fromkeys(row["case"] for row in here):
        side_rows = [times.get((case, side)) for side in sides]
        chosen = times.get((case, CHOSEN))
        last = (
            (f"{chosen['times_yardstick']:.2f}", f"{chosen['of_matmul_rate']:.0%}") if chosen else ("-", "-")
        )
        shown = (f"{row['milliseconds']:.3f}" if row else "-" for row in side_rows)
        cells.append((case, *shown, *last))
    header = ("ms", *(side.replace("attnreg, ", "") for side in sides), "x torch", "of matmul")
    return PrintedTable(f"{panel}, {step}", header, cells)


def _mean_gains(rows: list[dict[str, Any]]) -> list[str]:
    lines = []
    for step in STEPS:
        gains = [r["times_yardstick"] for r in rows if (r["step"], r["side"]) == (step, CHOSEN)]
        if gains:
            lines.append(
                f"{step}: {geometric_mean(gains):.2f} x {TORCH} in the geometric mean of "
                f"{counted(len(gains), 'case')}, {min(gains):.2f} at worst"
            )
    return lines
