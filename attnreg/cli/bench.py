"""`attnreg bench`: backends beside each other and beside torch; `attnreg.bench` does the measuring."""

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnreg.cli.failures import INTERRUPTED, reported
from attnreg.cli.output import AsJson, console, print_json
from attnreg.cli.parsing import names, present_device, seconds
from attnreg.cli.torch_first import import_torch
from attnreg.cli.tune import Where

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnreg.bench.report import Job, Report

__all__ = ["bench"]

Out = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="Save the JSON, too, after every case.")
]
Plot = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Draw the result: a .png or an .svg.")
]
Rounds = Annotated[
    int | None, typer.Option("--rounds", metavar="N", min=1, help="How often each side gets its turn.")
]
Quick = Annotated[bool, typer.Option("--quick", help="A few cases, a few rounds.")]
Names = Annotated[
    list[str], typer.Option("--backend", metavar="NAMES", help="A comma list; else all that load.")
]
Budget = Annotated[str, typer.Option("--budget", metavar="TIME", help="Stop in time: 60s, 5m; else all.")]
Tuned = Annotated[
    Path | None, typer.Option("--table", metavar="FILE", help="Choose by this table; else the device's own.")
]

bench = typer.Typer(
    help="Measure backends beside each other and beside torch. Settings files and variables don't count.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@bench.command("varlen")
@reported
def varlen(
    rounds: Rounds = None,
    quick: Quick = False,
    device: Where = "",
    backend: Names = [],  # noqa: B006 - typer makes a new list for each call
    budget: Budget = "",
    out: Out = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Packed sequences, as PyTorch's PR 164502 measures them."""
    _bench("varlen", (15, 3), rounds, quick, device, backend, budget, out, plot, as_json)


@bench.command("sdpa")
@reported
def sdpa(
    rounds: Rounds = None,
    quick: Quick = False,
    device: Where = "",
    backend: Names = [],  # noqa: B006
    budget: Budget = "",
    out: Out = None,
    plot: Plot = None,
    table: Tuned = None,
    as_json: AsJson = False,
) -> None:
    """Dense calls through scaled_dot_product_attention, over a grid."""
    _bench("sdpa", (7, 2), rounds, quick, device, backend, budget, out, plot, as_json, table)


@bench.command("overhead")
@reported
def overhead(
    rounds: Rounds = None,
    quick: Quick = False,
    device: Where = "",
    backend: Names = [],  # noqa: B006
    budget: Budget = "",
    out: Out = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """What attnreg costs the host per call."""
    _bench("overhead", (31, 3), rounds, quick, device, backend, budget, out, plot, as_json)


@bench.command("selection")
@reported
def selection(
    rounds: Rounds = None,
    quick: Quick = False,
    device: Where = "",
    backend: Names = [],  # noqa: B006
    budget: Budget = "",
    out: Out = None,
    plot: Plot = None,
    table: Tuned = None,
    as_json: AsJson = False,
) -> None:
    """How good the choices are on shapes that no table was tuned on."""
    _bench("selection", (5, 1), rounds, quick, device, backend, budget, out, plot, as_json, table)


def _bench(
    name: str,
    usual: tuple[int, int],
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
    """Measure, show, save and draw; `usual` has the rounds where none are given, in full and quick."""
    import_torch()
    place, longest = present_device("--device", device), seconds("--budget", budget)
    # A provider that talks while it compiles must not get into the JSON.
    with contextlib.redirect_stdout(sys.stderr):
        from attnreg.cli import benches

        given = usual[quick] if rounds is None else rounds
        job = benches.begun(place, names("--backend", backend), given, quick, longest, out, table)
        draw = benches.drawing(plot)
        report: Report | None = None
        interrupted = True
        with contextlib.suppress(KeyboardInterrupt):
            report = _measured(job, benches.function(name))
            job.keep(report.results)
            draw(name, report.results)
            interrupted = False
    if job.kept is not None:
        data = benches.document(job.kept, job.left_out)
        if as_json:
            print_json(data)
        elif report is not None:
            benches.show(console(), report, job, data["machine"])
        if interrupted and out is not None:
            typer.echo(f"attnreg: what was measured before is in {out}", err=True)
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def _measured(job: "Job", measure: "Callable[[Job], Report]") -> "Report":
    """Measure behind a progress bar."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from attnreg.bench.contexts import untouched

    place = console(stderr=True)
    columns: tuple[Any, ...] = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn())
    columns += (TextColumn("{task.description}"),)
    with untouched(), Progress(*columns, console=place, transient=True, disable=not place.is_terminal) as bar:
        task = bar.add_task("", total=None)
        job.advance = lambda done, total, text: bar.update(
            task, completed=done, total=total, description=text
        )
        return measure(job)
