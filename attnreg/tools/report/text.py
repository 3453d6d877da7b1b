"""The tables of a terminal: what `attnreg report` and `attnreg run --stats` print of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from attnreg.tools.report.gains import predicted
from attnreg.tools.report.lines import CallRow, RunReport, grouped
from attnreg.tools.report.page import describe, duration, masks_of, share

# Rows of a table of times that are shown; the page has more.
MOST = 20


class TextTable(NamedTuple):
    """A table: its title, its columns and its rows, the last `right` columns flush right."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: int = 0


def tables_of(run: RunReport, where: str = "") -> Iterator[TextTable]:
    """Yield the tables of a run that have rows; `where` says whose failures are counted."""
    tables = *_timed(run), *_counted(run, where), *_outlook(run)
    yield from (table for table in tables if table.rows)


def _flush_right(heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: int) -> Iterator[list[str]]:
    """Yield the heads, then the rows, with the first `numbers` cells padded to one width on their left."""
    lines = [heads, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(numbers)]
    for line in lines:
        yield [*(cell.rjust(width) for cell, width in zip(line, widths, strict=False)), *line[numbers:]]


def _numbers_first(
    title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: int
) -> TextTable:
    padded, *lines = _flush_right(heads, rows[:MOST], numbers)
    if len(rows) > MOST:
        lines.append([*[""] * (len(heads) - 1), f"and {len(rows) - MOST:,} more rows, which the page has"])
    return TextTable(title, padded, lines if rows else ())


def _timed(run: RunReport) -> Iterator[TextTable]:
    """Yield what took how long, and who decided; nothing of lines without times."""
    if not run.rows:
        return
    rows = [
        (
            share(row.total_us, run.total_us), _known(row.total_us), _known(row.mean_us), f"{row.calls:,}",
            row.backend, row.direction, describe(row.spec),
        )
        for row in run.rows
    ]  # fmt: skip
    heads = ("share", "total", "mean", "calls", "backend", "direction", "call")
    yield _numbers_first("Calls by share of time", heads, rows, 4)
    sums = grouped(run.rows, lambda row: row.source)
    decided = [(f"{calls:,}", _known(total or None), source) for source, (calls, total) in sums.items()]
    yield _numbers_first("Who decided", ("calls", "time", "request, table or order"), decided, 2)
    slow = sorted(run.rows, key=lambda row: -row.first_use_us)[:5]
    first = [(_known(row.decided_us), _known(row.first_us), *_named(row)) for row in slow]
    yield _numbers_first(
        "First use", ("deciding, loading", "first call", "backend", "direction", "call"), first, 2
    )


def _counted(run: RunReport, where: str) -> Iterator[TextTable]:
    """Yield what `Stats` has."""
    calls = [(name, str(n["forward"]), str(n["backward"])) for name, n in run.calls.items()]
    yield TextTable("What ran", ("backend", "forward", "backward"), calls, right=2)
    rows = [(row["backend"], str(row["count"]), row["reason"]) for row in run.counted("fallbacks")]
    yield TextTable("What could not run, and why", ("backend", "calls", "reason"), rows)
    failures = [
        (row["backend"], f"failed {_times(row['count'])} in a {row['direction']}{where}: {_error(row)}")
        for row in run.counted("failures")
    ]
    yield TextTable("What failed", ("backend", "error"), failures)
    passed = [(row["kernel"], str(row["count"]), row["reason"]) for row in run.counted("bypassed")]
    yield TextTable("What PyTorch sent past attnreg, and why", ("kernel", "calls", "reason"), passed)
    slow = [("", path) for path in run.sentences("slow_paths")]
    yield TextTable("Slow paths", ("", ""), slow)
    heads, masks = masks_of(run)
    yield TextTable("What boolean masks were", heads, masks, right=len(heads) - 1)


def _outlook(run: RunReport) -> Iterator[TextTable]:
    """Yield which calls a table predicts to be faster on another backend."""
    gains = predicted(run.rows).gains if run.rows else ()
    rows = [
        (
            duration(gain.saves_us), gain.backend, gain.row.backend,
            gain.row.direction, describe(gain.row.spec),
        )
        for gain in gains
    ]  # fmt: skip
    heads = ("saves", "on", "ran on", "direction", "call")
    yield _numbers_first("Predicted to be faster on another backend, by measured tables", heads, rows, 1)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _error(row: dict[str, Any]) -> str:
    return f"{row['error']}: {row['message']}"


def _known(microseconds: float | None) -> str:
    return "" if microseconds is None else duration(microseconds)


def _named(row: CallRow) -> tuple[str, str, str]:
    return row.backend, row.direction, describe(row.spec)


def sites_of(run: RunReport) -> Iterator[str]:
    """Yield where the first call of each kernel that passed by was made, to print below the tables."""
    for row in run.counted("bypassed"):
        if row["site"]:
            yield f"first call of {row['kernel']}: {row['site']}"
