"""`attnreg report`: what a run did, as tables and as a page, from the lines of its processes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnreg import __version__
from attnreg.errors import InvalidInputError, file_errors
from attnreg.tools.cli.options import check_writable, valued
from attnreg.tools.cli.output import console, import_torch, table
from attnreg.tools.report import BEGIN_OF_LINE

if TYPE_CHECKING:
    from rich.console import Console

    from attnreg.tools.report.lines import RunReport

# What a page has in its first kilobyte, so that no other file is replaced.
OF_PAGE = '<meta name="generator" content="attnreg">'


def report(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE", help="Files that ATTNREG_REPORT or ATTNREG_STATS named."),
    ],
    out: Annotated[
        Path | None,
        valued("--out", "FILE", "The page. Default: the name of the first file, with .html at its end."),
    ] = None,
    text: Annotated[bool, typer.Option("--text", help="Print the tables alone, and write no page.")] = False,
) -> None:
    """Print what attention did in a run, and make a page of it.

    The tables and the page say which calls took how long, on which backends, and who decided. They also have
    calls that passed by, first uses, padding, and possible gains. The page is one HTML file with plots. With
    --out only the page is made, with --text only the tables. `attnreg run --report` runs a program and makes
    its page.

    Example: attnreg report stats.jsonl --out report.html
    """
    import_torch()
    from attnreg.tools.report import lines

    if text and out is not None:
        raise InvalidInputError("--text: got --out as well, expected one of them: --text writes no page")
    page = out or Path(f"{str(files[0]).removesuffix('.jsonl').removesuffix('.html')}.html")
    if out is not None:
        check_writable("--out", page, OF_PAGE)
    run = lines.read(files)
    if out is None:
        print_report(run, console())
    if not text:
        check_writable("--out", page, OF_PAGE)
        write_page(files, page, run)
        typer.echo(f"Report: {page}")


def print_report(run: RunReport, place: Console, where: str = "") -> None:
    """Print the tables of a run; `where` says whose failures these are."""
    from attnreg.tools.report import text

    tables = list(text.tables_of(run, where))
    notes = run.sentences("overridden")
    if not tables and not notes:
        place.print("No attention call went through attnreg", style="bold")
    for part in tables:
        table(part.title, part.rows, part.heads, right=part.right, place=place)
    for line in text.sites_of(run):  # below the tables, whose cells would break a path
        place.print(line, soft_wrap=True)
    for note in notes:
        place.print(note, style="bold", soft_wrap=True)


def lines_of(page: Path) -> Path:
    """Return the file for the lines of a run whose page is to be written; removes an earlier run's lines."""
    check_writable("--report", page, OF_PAGE)
    lines = page.absolute().with_name(f"{page.name}.jsonl")
    check_writable("--report", lines, BEGIN_OF_LINE)
    for file in (page, lines):
        file.unlink(missing_ok=True)
    return lines


def write_page(files: list[Path], out: Path, run: RunReport | None = None) -> None:
    """Write the page of files of lines; `run` is what was read of them, if they were read."""
    from attnreg.core.torchlib.caches import write_whole
    from attnreg.tools.report import lines
    from attnreg.tools.report.page import page

    made = ", ".join(map(str, files)) or "a run without attention"
    text = page(run or lines.read(files), f"attnreg {__version__}, from {made}")
    with file_errors(out):
        write_whole(out, text)
