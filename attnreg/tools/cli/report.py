"""`attnreg report`: the page of a run, from the lines of its processes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attnreg import __version__
from attnreg.errors import ConfigError
from attnreg.tools.cli.options import check_writable, valued
from attnreg.tools.cli.output import import_torch

# What the files have in their first kilobyte, so that no other file is replaced.
OF_PAGE, OF_LINES = '<meta name="generator" content="attnreg">', '{"program": '


def report(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="What ATTNREG_REPORT or ATTNREG_STATS names, or several."),
    ],
    out: Annotated[
        Path | None,
        valued("--out", "FILE", "The page. Default: the name of the first file, with .html at its end."),
    ] = None,
) -> None:
    """Make a page of what a program's attention did.

    Which calls took how long, on which backends, who decided, what passed by and why, first uses, padding,
    and what is known of possible gains: one HTML file. `attnreg run --report` runs a program and makes its
    page.

    Example: attnreg report stats.jsonl --out report.html
    """
    import_torch()
    page = out or Path(f"{str(files[0]).removesuffix('.jsonl').removesuffix('.html')}.html")
    check_writable("--out", page, OF_PAGE)
    write_page(files, page)
    typer.echo(f"Report: {page}")


def lines_of(page: Path) -> Path:
    """Return the file for the lines of a run whose page is to be written; removes an earlier run's lines."""
    check_writable("--report", page, OF_PAGE)
    lines = page.absolute().with_name(f"{page.name}.jsonl")
    check_writable("--report", lines, OF_LINES)
    for file in (page, lines):
        file.unlink(missing_ok=True)
    return lines


def write_page(files: list[Path], out: Path) -> None:
    """Write the page of files of lines."""
    from attnreg.core.times.table import write_whole
    from attnreg.tools.report import lines
    from attnreg.tools.report.page import page

    made = ", ".join(map(str, files)) or "a run without attention"
    text = page(lines.read(files), f"attnreg {__version__}, from {made}")
    try:
        write_whole(out, text)
    except OSError as error:
        raise ConfigError(f"{out}: can't be written: {error.strerror or error}") from error
