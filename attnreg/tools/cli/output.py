"""How a command prints and ends: tables as wide as the terminal, JSON alone on stdout, exit codes."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import typer

from attnreg import _autoload
from attnreg.errors import AttnregError, BackendUnavailableError, UnsupportedInputError

if TYPE_CHECKING:
    from rich.console import Console

FAILED = 1
USAGE = 2
INTERRUPTED = 130

# Cells that a reader looks for; all others keep the colour of the terminal.
STYLES = {
    **dict.fromkeys(("ready", "right"), "green"),
    **dict.fromkeys(("can't load", "disabled"), "yellow"),
    **dict.fromkeys(("WRONG", "wrong"), "bold red"),
    "broken": "red",
    "experimental": "cyan",
}


def report_errors(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return a command that prints attnreg's own errors on stderr and, with `--json`, as JSON on stdout."""

    @functools.wraps(command)
    def reporting(*args: Any, **options: Any) -> Any:
        _autoload.is_command = True
        try:
            return command(*args, **options)
        except AttnregError as error:
            typer.echo(f"attnreg: {error}", err=True)
            if options.get("as_json"):
                print_json({"error": {"type": type(error).__name__, "message": str(error)}})
            nothing_runs = isinstance(error, UnsupportedInputError | BackendUnavailableError)
            raise typer.Exit(FAILED if nothing_runs else USAGE) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        finally:
            _autoload.is_command = False  # the program of `attnreg run` starts after this

    return reporting


def import_torch() -> None:
    """Import torch before any module of attnreg that imports it.

    `import torch` installs attnreg's routers if an environment variable selects backends. That must
    not run while a module of attnreg is half imported. It doesn't warn of settings that can't be read,
    because the command reports them as an error. Torch's warning that there is no NumPy is silenced, because
    no command needs it.
    """
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)
    import torch  # noqa: F401


def console(*, stderr: bool = False) -> Console:
    """Return a console on stdout or stderr; without colours where that isn't a terminal."""
    from rich.console import Console

    # Messages have brackets and colons that are no markup: `pip install 'attnreg[fa4]'`.
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


def _printable(text: str) -> str:
    return "".join(x if x.isprintable() or x == "\n" else "\N{REPLACEMENT CHARACTER}" for x in text)


def table(
    title: str,
    rows: Iterable[Iterable[str]],
    headers: Iterable[str] = ("", ""),
    *,
    right: int = 0,
    place: Console | None = None,
) -> None:
    """Print a title and aligned rows, the last `right` columns flush right.

    In a terminal the last column is wrapped, without breaking commands. Lines of a pipe or a file stay whole.
    """
    from rich.text import Text

    from attnreg.tools.lines import aligned, width_of

    place = place or console()
    if title:
        place.print(title, style="bold", soft_wrap=True)
    names = list(headers)
    # What a file of another machine has in it doesn't control this terminal.
    cells_of = [[_printable(cell) for cell in row] for row in rows]
    lines = aligned([*([names] if any(names) else []), *cells_of], width_of(place.file), right=right)
    for number, line in enumerate(lines):
        dim = "dim" if number == 0 and any(names) else ""
        # Without the blanks at its end, which wrap where a terminal is made narrower, and spoil a diff.
        cells = Text().join(Text(cell, style=dim or STYLES.get(cell.strip(), "")) for cell in line)
        cells.rstrip()
        place.print(cells, soft_wrap=True)
    place.print()


@contextlib.contextmanager
def progress(total: int | None, description: str = "") -> Iterator[Callable[..., None]]:
    """Show a progress bar on stderr if that is a terminal.

    Yields a function that updates it: rich's `Progress.update` without its first argument.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    place = console(stderr=True)
    if not place.is_terminal:  # a bar that is disabled prints an empty line with rich 13
        yield lambda **_: None
        return
    columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=place, transient=True) as bar:
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
