"""Calls as programs make them: new lengths in each, beside one batch that repeats. `attnreg bench fresh`.

Packed training steps have other documents each time, a cache has one key more at each token. What is decided,
prepared, compiled or planned for lengths that never come again costs its time at each call, which no
benchmark of one repeated batch shows.

`turns` has how a row is checked and timed, `attention` the rows; `benchmarks/fresh_llama.py` has rows of a
model. Read `turns` first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from attnreg.tools.bench.compare import measured_in_time
from attnreg.tools.bench.fresh import attention
from attnreg.tools.bench.fresh.attention import OURS
from attnreg.tools.bench.fresh.turns import FreshRow, measured
from attnreg.tools.bench.report import Job, PrintedTable, time_text
from attnreg.tools.bench.sides import table_in_force

__all__ = ["each_case", "lines", "measure", "measure_rows", "ratio_text", "tables"]

Rows = Sequence[Mapping[str, Any]]

# A ratio that two measurements of the same may differ by.
NOISE = 1.03
HEADER = ("side", "lengths", "ms", "p95", "slowest", "/ same", "/ torch's", "first", "ran")


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
    job.tables = tables(rows)
    job.summary = [f"chosen by: {table}", *lines(rows)]


def tables(rows: Rows) -> list[PrintedTable]:
    """Return a table for each row of the benchmark: a line for each side and stream."""
    return [
        PrintedTable(f"{case}, {step}", HEADER, list(map(_cells, here)))
        for (case, step), here in each_case(rows)
    ]


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    times = (row["milliseconds"], row["p95"], row["slowest"])
    ratios = f"{row['over_same']:.2f}", ratio_text(row["over_yardstick"])
    first = time_text(row["first"][0])
    return row["side"], row["stream"], *map(time_text, times), *ratios, first, row["ran"]


def lines(rows: Rows) -> list[str]:
    """Return a line for each stream of attnreg's: what new lengths cost it, and whether it gains or loses."""
    return [
        f"{case}, {step}: {row['side']}, {row['stream']}: {row['over_same']:.2f} times the same batch"
        f"{_against(row)}"
        for (case, step), here in each_case(rows)
        for row in here
        if row["side"].startswith(OURS) and row["over_same"] != 1.0
    ]


def _against(row: Mapping[str, Any]) -> str:
    ratio = row["over_yardstick"]
    if ratio is None:
        return ""
    verdict = "LOSES" if ratio > NOISE else "gains" if ratio < 1 / NOISE else "level"
    return f"; {ratio:.2f} times {row['yardstick']}: {verdict}"


def each_case(rows: Rows) -> Iterator[tuple[tuple[str, str], list[Mapping[str, Any]]]]:
    """Yield case and step with what was measured of them."""
    for key in dict.fromkeys((row["case"], row["step"]) for row in rows):
        yield key, [row for row in rows if (row["case"], row["step"]) == key]


def ratio_text(ratio: float | None) -> str:
    """Return a ratio as text; empty if there is none."""
    return "" if ratio is None else f"{ratio:.2f}"
