"""Calls as programs make them: new lengths in each, beside one batch that repeats. `attnreg bench fresh`.

Packed training steps have other documents each time, a cache has one key more at each token. What is decided,
prepared, compiled or planned for lengths that never come again costs its time at each call, which no
benchmark of one repeated batch shows.

`turns` has how a row is checked and timed, `attention` the rows, `tables` what becomes of the figures. Read
`turns` first. `benchmarks/fresh_llama.py` has rows of a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from attnreg.tools.bench.compare import measured_in_time
from attnreg.tools.bench.fresh import attention, tables
from attnreg.tools.bench.fresh.turns import FreshRow, measured
from attnreg.tools.bench.report import Job
from attnreg.tools.bench.sides import table_in_force

__all__ = ["measure", "measure_rows"]


def measure(job: Job) -> None:
    """Measure the rows of `job.parts`."""
    measure_rows(attention.rows(job), job)


def measure_rows(wanted: Sequence[FreshRow], job: Job) -> None:
    """Measure the rows that there is time for, on a CPU with one thread."""
    table = table_in_force(job.device, job.table)
    rows: list[dict[str, Any]] = []
    results = {"table": table, "rows": rows}
    threads = torch.get_num_threads()
    if job.device.type == "cpu":
        torch.set_num_threads(1)
    try:
        for _, figures in measured_in_time(wanted, list(map(str, wanted)), measured, job):
            rows += figures
            job.keep(results)
    finally:
        torch.set_num_threads(threads)
    job.check_measured(rows)
    job.tables = tables.tables(rows)
    job.summary = [f"chosen by: {table}", *tables.lines(rows)]
