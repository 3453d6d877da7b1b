"""How the commands print: tables that fit 80 columns, progress on stderr, and JSON alone on stdout."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import sys
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from rich.console import Console

# Cells that a reader looks for; all others keep the colour of the terminal.
STYLES = {
    "ready": "green",
    "right": "green",
    "WRONG": "bold red",
    "wrong": "bold red",
    "broken": "red",
    "can't load": "yellow",
    "disabled": "yellow",
    "experimental": "cyan",
}


def console(*, stderr: bool = False) -> Console:
    """Return a console on stdout or stderr; without colours where that isn't a terminal."""
    from rich.console import Console

    # Messages have brackets and colons that are no markup: `pip install 'attnreg[fa2]'`.
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


def heading(place: Console, text: str) -> None:
    """Print the title of a section."""
    from rich.text import Text

    place.print(Text(text, style="bold"))


def table(place: Console, headers: Iterable[str], rows: Iterable[Iterable[str]], right: int = 0) -> None:
    """Print aligned rows, the last `right` columns flush right; a cell that is too wide is folded."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    names = list(headers)
    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=any(names), header_style="dim")
    for index, name in enumerate(names):
        drawn.add_column(name, justify="right" if index >= len(names) - right else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in row))
    with place.capture() as captured:
        place.print(Padding(drawn, (0, 0, 1, 2)))
    # rich fills every line with blanks, which wrap where a terminal is made narrower, and spoil a diff.
    place.file.writelines(f"{line.rstrip()}\n" for line in captured.get().splitlines())


@contextlib.contextmanager
def progress(total: int | None, description: str = "") -> Iterator[Callable[..., None]]:
    """Show a progress bar on stderr if that is a terminal.

    Yields a function that updates it: rich's `Progress.update` without its first argument.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    place = console(stderr=True)
    columns: tuple[Any, ...] = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn())
    columns += (TextColumn("{task.description}"),)
    with Progress(*columns, console=place, transient=True, disable=not place.is_terminal) as bar:
        yield functools.partial(bar.update, bar.add_task(description, total=total))


def stdout_to_stderr() -> contextlib.AbstractContextManager[Any]:
    """Send what backends' packages print while they load or compile to stderr, away from the JSON."""
    return contextlib.redirect_stdout(sys.stderr)


def print_json(data: object) -> None:
    """Print data as JSON."""
    typer.echo(json.dumps(data, indent=2, allow_nan=False))


def finite(number: float) -> float | None:
    """Return the number, or None for an infinity or NaN, which JSON doesn't have."""
    return number if math.isfinite(number) else None


def counted(number: int, noun: str) -> str:
    """Return "1 row" or "2 rows"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
