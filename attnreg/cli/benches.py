"""What `bench` does around a measurement: which backends, which files, and what is shown of it."""

from __future__ import annotations

import importlib
import importlib.util
import time
from typing import TYPE_CHECKING, Any

from attnreg.bench.report import Job, Report, document, show_machine
from attnreg.bench.report import show as show_table
from attnreg.cli.verdicts import candidates
from attnreg.errors import AttnregError, BackendUnavailableError, ConfigError, InvalidInputError
from attnreg.tuning.table import check_writable, load

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch
    from rich.console import Console

__all__ = ["begun", "document", "drawing", "function", "show"]

# On a GPU the reference would take longer than all others together, and nobody would choose it.
REFERENCE = "math"

FORMATS = (".png", ".svg")


def begun(
    place: torch.device,
    asked: tuple[str, ...],
    rounds: int,
    quick: bool,
    longest: float,
    out: Path | None,
    table: Path | None,
) -> Job:
    """Return what is to be measured; files are known to be readable and writable.

    Raises:
        UnknownBackendError: no backend has one of the names.
        BackendUnavailableError: one that was asked for can't be measured here, or none can.
        ConfigError: the file can't be written, or there is no such table.
    """
    verdicts = candidates(asked, place)
    if asked and (against := next((one for one in verdicts if one.reason), None)):
        raise BackendUnavailableError(f"--backend: {against.entry.name} {against.reason}")
    found = [one.entry.name for one in verdicts if not one.reason]
    if not asked and place.type == "cuda":
        found = [name for name in found if name != REFERENCE]
    if not found:
        raise BackendUnavailableError(f"no backend can be measured on {place}")
    if out is not None:
        try:
            check_writable(out.absolute(), '"machine"')
        except ConfigError as error:
            raise ConfigError(f"--out: {error}") from None
    if table is not None:
        load(table)
    if place.type == "cuda":
        import torch

        torch.cuda.set_device(place)  # events are recorded on the current one
    deadline = time.monotonic() + longest
    return Job(place, tuple(found), rounds, quick, deadline, out, table and table.absolute())


def function(name: str) -> Callable[[Job], Report]:
    """Return what measures, by its name."""
    found: Callable[[Job], Report] = importlib.import_module(f"attnreg.bench.{name}").measure
    return found


def drawing(plot: Path | None) -> Callable[[str, Any], None]:
    """Return what draws the results; nobody wants to measure first and then hear that it can't.

    Raises:
        InvalidInputError: the file is neither a PNG nor an SVG.
        AttnregError: matplotlib isn't installed.
        ConfigError: the file can't be written.
    """
    if plot is None:
        return lambda *_: None
    if plot.suffix.lower() not in FORMATS:
        raise InvalidInputError(f"--plot: got {str(plot)!r}, expected a file named .png or .svg")
    if importlib.util.find_spec("matplotlib") is None:
        raise AttnregError("--plot needs matplotlib: pip install 'attnreg[plots]'")
    try:
        check_writable(plot.absolute())
    except ConfigError as error:
        raise ConfigError(f"--plot: {error}") from None

    def draw(name: str, results: Any) -> None:
        from attnreg.bench import plots

        plots.draw(name, results, plot)

    return draw


def show(place: Console, report: Report, job: Job, machine: dict[str, str]) -> None:
    """Print what the figures were measured on, the tables, what was left out, and the aims."""
    show_machine(place, machine)
    for title, header, rows in report.tables:
        if rows:
            show_table(title, header, rows, place)
    for line in job.left_out:
        place.print(f"left out: {line}", soft_wrap=True)
    for line in report.told:
        place.print(line, soft_wrap=True)
