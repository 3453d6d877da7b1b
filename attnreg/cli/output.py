"""How the commands print: tables that fit 80 columns, and JSON that is all there is on stdout."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console

__all__ = ["AsJson", "console", "finite", "heading", "print_json", "table"]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]

# Words that a reader looks for; everything else keeps the colour of the terminal.
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
    """Return where to print; without colours where that isn't a terminal."""
    from rich.console import Console

    # Messages are full of brackets and colons: `pip install 'attnreg[fa2]'` is no markup.
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


def heading(place: Console, text: str) -> None:
    """Print the title of a section."""
    from rich.text import Text

    place.print(Text(text, style="bold"))


def table(place: Console, headers: Iterable[str], rows: Iterable[Iterable[str]], right: int = 0) -> None:
    """Print aligned rows, the last `right` columns to the right; a cell too wide goes on below itself."""
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


def print_json(data: object) -> None:
    """Print data as JSON."""
    typer.echo(json.dumps(data, indent=2, allow_nan=False))


def finite(number: float) -> float | None:
    """Return the number, or None for an infinity or NaN, which JSON doesn't have."""
    return number if math.isfinite(number) else None
