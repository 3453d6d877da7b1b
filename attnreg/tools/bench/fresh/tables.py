"""Shows the figures: tables to print, and lines that say what is lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attnreg.tools.bench.fresh.attention import OURS
from attnreg.tools.bench.report import PrintedTable

Rows = Sequence[Mapping[str, Any]]

# A ratio that two measurements of the same may differ by.
NOISE = 1.03
HEADER = ("side", "lengths", "ms", "p95", "slowest", "/ same", "/ torch's", "first", "ran")


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


def time_text(milliseconds: float) -> str:
    """Return milliseconds as text."""
    return f"{milliseconds:.4f}" if milliseconds < 0.1 else f"{milliseconds:.3g}"


def ratio_text(ratio: float | None) -> str:
    """Return a ratio as text; empty if there is none."""
    return "" if ratio is None else f"{ratio:.2f}"
