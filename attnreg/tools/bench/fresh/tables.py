"""Shows the figures: tables to print, lines that say what is lost, Markdown for the docs."""

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
        PrintedTable(f"{case}, {step}", HEADER, list(map(_cells, here))) for (case, step), here in _each(rows)
    ]


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        row["side"], row["stream"], _ms(row["milliseconds"]), _ms(row["p95"]), _ms(row["slowest"]),
        f"{row['over_same']:.2f}", _ratio(row["over_yardstick"]), _ms(row["first"][0]), row["ran"],
    )  # fmt: skip


def lines(rows: Rows) -> list[str]:
    """Return a line for each stream of attnreg's: what new lengths cost it, and whether it gains or loses."""
    return [
        f"{case}, {step}: {row['side']}, {row['stream']}: {row['over_same']:.2f} times the same batch"
        f"{_against(row)}"
        for (case, step), here in _each(rows)
        for row in here
        if row["side"].startswith(OURS) and row["over_same"] != 1.0
    ]


def _against(row: Mapping[str, Any]) -> str:
    ratio = row["over_yardstick"]
    if ratio is None:
        return ""
    verdict = "LOSES" if ratio > NOISE else "gains" if ratio < 1 / NOISE else "level"
    return f"; {ratio:.2f} times {row['yardstick']}: {verdict}"


def markdown(results: Mapping[str, Any]) -> str:
    """Return the tables of a page of the docs: milliseconds, median and 95th percentile."""
    return "\n\n".join(
        "\n".join(_markdown(case, step, here)) for (case, step), here in _each(results["rows"])
    )


def _markdown(case: str, step: str, rows: Rows) -> Iterator[str]:
    streams = list(dict.fromkeys(row["stream"] for row in rows))
    same, *others = streams
    ratios = [f"{stream} / {of}" for of in (same, "torch's") for stream in others]
    yield "| " + " | ".join([f"{case}, {step}, ms", same, *others, *ratios, "first call"]) + " |"
    yield "|---" * (3 + 3 * len(others)) + "|"
    for side in dict.fromkeys(row["side"] for row in rows):
        by = {row["stream"]: row for row in rows if row["side"] == side}
        cells = [f"{_ms(row['milliseconds'])} ({_ms(row['p95'])})" for row in by.values()]
        cells += [f"{by[stream]['over_same']:.2f}" for stream in others]
        cells += [_ratio(by[stream]["over_yardstick"]) for stream in others]
        yield "| " + " | ".join([side, *cells, _ms(by[same]["first"][0])]) + " |"


def _each(rows: Rows) -> Iterator[tuple[tuple[str, str], list[Mapping[str, Any]]]]:
    """Yield case and step with what was measured of them."""
    for key in dict.fromkeys((row["case"], row["step"]) for row in rows):
        yield key, [row for row in rows if (row["case"], row["step"]) == key]


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.4f}" if milliseconds < 0.1 else f"{milliseconds:.3g}"


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"
