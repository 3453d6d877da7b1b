"""The tables of a terminal: what `attnreg report` and `attnreg run --stats` print of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from attnreg.tools.report import page
from attnreg.tools.report.gains import predicted
from attnreg.tools.report.lines import RunReport

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


def _columns(title: str, table: page.RunTable, places: Sequence[int], numbers: int = 0) -> TextTable:
    """Return some columns of the page's table in another order, the first `numbers` padded on their left."""
    most = MOST if numbers else len(table.rows)
    lines = [[line[place] for place in places] for line in (table.heads, *table.rows[:most])]
    for column in range(numbers):
        width = max(len(line[column]) for line in lines)
        for line in lines:
            line[column] = line[column].rjust(width)
    if len(table.rows) > most:
        rest = f"and {len(table.rows) - most:,} more rows, which the page has"
        lines.append([*[""] * (len(places) - 1), rest])
    return TextTable(title, lines[0], lines[1:])


def _timed(run: RunReport) -> Iterator[TextTable]:
    """Yield what took how long, and who decided; nothing of lines without times."""
    if run.rows:
        yield _columns("Calls by share of time", page.calls_of(run), (8, 7, 5, 4, 1, 2, 3), 4)
        yield _columns("Who decided", page.deciders_of(run), (1, 2, 0), 2)
        yield _columns("First use", page.first_use_of(run, 5), (3, 4, 0, 1, 2), 2)


def _counted(run: RunReport, where: str) -> Iterator[TextTable]:
    """Yield what `Stats` has."""
    yield TextTable("What ran", *page.directions_of(run))
    yield _columns("What could not run, and why", page.fallbacks_of(run), (0, 2, 1))
    failures = []
    for row in run.counted("failures"):
        times = "once" if row["count"] == 1 else f"{row['count']} times"
        what = f"failed {times} in a {row['direction']}{where}: {row['error']}: {row['message']}"
        failures.append((row["backend"], what))
    yield TextTable("What failed", ("backend", "error"), failures)
    yield _columns("What PyTorch sent past attnreg, and why", page.bypassed_of(run), (1, 5, 2))
    slow = [("", path) for path in run.sentences("slow_paths")]
    yield TextTable("Slow paths", ("", ""), slow)
    yield TextTable("What boolean masks were", *page.masks_of(run))


def _outlook(run: RunReport) -> Iterator[TextTable]:
    """Yield which calls a table predicts to be faster on another backend."""
    if run.rows:
        title = "Predicted to be faster on another backend, by measured tables"
        yield _columns(title, page.gains_of(predicted(run.rows)), (4, 3, 2, 0, 1), 1)


def sites_of(run: RunReport) -> Iterator[str]:
    """Yield where the first call of each kernel that passed by was made, to print below the tables."""
    for row in run.counted("bypassed"):
        if row["site"]:
            yield f"first call of {row['kernel']}: {row['site']}"
