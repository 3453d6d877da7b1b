"""`attnreg bench`: backends compared with each other and with torch; `attnreg.bench` measures."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnreg.cli.backends import measurable
from attnreg.cli.errors import INTERRUPTED, import_torch, report_errors
from attnreg.cli.options import AsJson, Backends, Budget, DeviceHere, names, present_device, seconds
from attnreg.cli.output import console, print_json, progress, stdout_to_stderr
from attnreg.errors import AttnregError, ConfigError, InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from rich.console import Console

    from attnreg.bench.report import Job, Report

FORMATS = (".png", ".svg")

Out = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="Save the results as JSON after every case.")
]
Plot = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Draw the results: a .png or .svg.")
]
Rounds = Annotated[
    int | None,
    typer.Option("--rounds", metavar="N", min=1, help="How often each alternative is measured, in turns."),
]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer cases and fewer rounds.")]
TableFile = Annotated[
    Path | None,
    typer.Option("--table", metavar="FILE", help="Choose by this table. Default: the device's own."),
]

bench = typer.Typer(
    help="""Compare backends with each other and with torch.

    Backends that settings disable are left out. No other setting has an effect on the measurement.

    Example: attnreg bench sdpa --quick --plot sdpa.png
    """,
    no_args_is_help=True,
    rich_markup_mode=None,
)


@bench.command("varlen")
@report_errors
def varlen(
    rounds: Rounds = None,
    quick: Quick = False,
    device: DeviceHere = "",
    backend: Backends = [],  # noqa: B006 - typer makes a new list for each call
    budget: Budget = "",
    out: Out = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Compare varlen_attn on packed sequences.

    The cases are those of the benchmark in PyTorch's pull request 164502.

    Example: attnreg bench varlen --quick --backend FA4,cuDNN
    """
    _bench("varlen", (15, 3), rounds, quick, device, backend, budget, out, plot, as_json)


@bench.command("sdpa")
@report_errors
def sdpa(
    rounds: Rounds = None,
    quick: Quick = False,
    device: DeviceHere = "",
    backend: Backends = [],  # noqa: B006
    budget: Budget = "",
    out: Out = None,
    plot: Plot = None,
    table: TableFile = None,
    as_json: AsJson = False,
) -> None:
    """Compare scaled_dot_product_attention over a grid of shapes.

    Example: attnreg bench sdpa --quick --plot sdpa.png
    """
    _bench("sdpa", (7, 2), rounds, quick, device, backend, budget, out, plot, as_json, table)


@bench.command("overhead")
@report_errors
def overhead(
    rounds: Rounds = None,
    quick: Quick = False,
    device: DeviceHere = "",
    backend: Backends = [],  # noqa: B006
    budget: Budget = "",
    out: Out = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Measure the host time that attnreg adds to a call.

    Example: attnreg bench overhead --device cpu
    """
    _bench("overhead", (31, 3), rounds, quick, device, backend, budget, out, plot, as_json)


@bench.command("selection")
@report_errors
def selection(
    rounds: Rounds = None,
    quick: Quick = False,
    device: DeviceHere = "",
    backend: Backends = [],  # noqa: B006
    budget: Budget = "",
    out: Out = None,
    plot: Plot = None,
    table: TableFile = None,
    as_json: AsJson = False,
) -> None:
    """Compare the chosen backend with the fastest one.

    The shapes are ones that no table was tuned on.

    Example: attnreg bench selection --table here.json --budget 5m
    """
    _bench("selection", (5, 1), rounds, quick, device, backend, budget, out, plot, as_json, table)


def _bench(
    name: str,
    default_rounds: tuple[int, int],
    rounds: int | None,
    quick: bool,
    device: str,
    backend: list[str],
    budget: str,
    out: Path | None,
    plot: Path | None,
    as_json: bool,
    table: Path | None = None,
) -> None:
    """Measure, show, save and draw; `default_rounds` are those without and with `--quick`."""
    import_torch()
    place, longest = present_device("--device", device), seconds("--budget", budget)
    with stdout_to_stderr():
        from attnreg.bench.report import document

        given = default_rounds[quick] if rounds is None else rounds
        job = _job(place, names("--backend", backend), given, quick, longest, out, table)
        draw = _drawing(plot)
        report: Report | None = None
        interrupted = True
        with contextlib.suppress(KeyboardInterrupt):
            report = _measured(job, importlib.import_module(f"attnreg.bench.{name}").measure)
            job.keep(report.results)
            draw(name, report.results)
            interrupted = False
    if job.kept is not None:
        data = document(job.kept, job.left_out)
        if as_json:
            print_json(data)
        elif report is not None:
            _print(console(), report, job, data["machine"])
        if interrupted and out is not None:
            typer.echo(f"attnreg: what was measured before is in {out}", err=True)
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def _job(
    place: torch.device,
    named: tuple[str, ...],
    rounds: int,
    quick: bool,
    longest: float,
    out: Path | None,
    table: Path | None,
) -> Job:
    """Return what is to be measured, once its files are known to be readable and writable."""
    from attnreg.bench.report import Job
    from attnreg.tuning.table import check_writable, load

    backends = tuple(entry.name for entry in measurable(named, place))
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
    return Job(place, backends, rounds, quick, time.monotonic() + longest, out, table and table.absolute())


def _drawing(plot: Path | None) -> Callable[[str, Any], None]:
    """Return what draws the results, or fail now: not after everything has been measured."""
    from attnreg.tuning.table import check_writable

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


def _measured(job: Job, measure: Callable[[Job], Report]) -> Report:
    """Measure behind a progress bar, without settings."""
    from attnreg.bench.sides import untouched

    with untouched(), progress(None) as update:
        job.advance = lambda done, total, text: update(completed=done, total=total, description=text)
        return measure(job)


def _print(place: Console, report: Report, job: Job, machine: dict[str, str]) -> None:
    """Print the machine, the tables, what was left out, and which targets are reached."""
    from attnreg.bench.report import show, show_machine

    show_machine(place, machine)
    for title, header, rows in report.tables:
        if rows:
            show(title, header, rows, place)
    for line in job.left_out:
        place.print(f"left out: {line}", soft_wrap=True)
    for line in report.summary:
        place.print(line, soft_wrap=True)
