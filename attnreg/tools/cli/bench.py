"""`attnreg bench`: backends compared with each other and with torch; `attnreg.tools.bench` measures."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnreg.errors import AttnregError, InvalidInputError
from attnreg.tools.cli import options, output
from attnreg.tools.cli.options import valued

if TYPE_CHECKING:
    from attnreg.tools.bench.report import Job

Out = Annotated[Path | None, valued("--out", "FILE", "Save the results as JSON after every case.")]
Plot = Annotated[Path | None, valued("--plot", "FILE", "Draw the results: a .png or .svg.")]
Rounds = Annotated[
    int | None, valued("--rounds", "N", "How often each alternative is measured, in turns.", min=1)
]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer cases and fewer rounds.")]
Random = Annotated[
    int | None,
    valued("--random", "N", "Measure N random shapes instead of the fixed ones.", min=1),
]
Seed = Annotated[
    int | None,
    valued("--seed", "S", "With --random: the seed of the shapes. Default: a new one each time."),
]
TableFile = Annotated[
    Path | None, valued("--table", "FILE", "Choose by this table. Default: the one that comes with attnreg.")
]

# What `attnreg bench fresh` is made of.
PARTS = ("varlen", "decode", "dense", "transformers")
Part = Annotated[str, valued("--part", "PART", f"{', '.join(PARTS)}, or all of them.", show_default=True)]

# How often each alternative is measured: without and with `--quick`.
ROUNDS = {
    "varlen": (15, 3),
    "sdpa": (7, 2),
    "overhead": (31, 3),
    "selection": (5, 1),
    "random": (5, 1),
    "fresh": (5, 1),
}

bench = typer.Typer(
    help="""Compare backends with each other and with torch.

    Backends that settings disable are left out. No other setting has an effect on the measurement.

    Example: attnreg bench sdpa --quick --plot sdpa.png
    """,
    no_args_is_help=True,
    rich_markup_mode=None,
)


def _run(
    context: typer.Context,
    rounds: int | None,
    quick: bool,
    device: str,
    backend: list[str],
    budget: str,
    out: Path | None,
    plot: Path | None,
    as_json: bool,
    table: Path | None = None,
    random: int | None = None,
    seed: int | None = None,
    part: str = "all",
) -> None:
    """Measure, save, draw and show what the command is named after."""
    output.import_torch()
    name, place, longest = str(context.info_name), options.present_device(device), options.seconds(budget)
    with output.stdout_to_stderr():
        from attnreg.tools.bench.report import Job, document
        from attnreg.tools.bench.sides import untouched

        drawn = secrets.randbelow(10**6) if seed is None else seed
        entries = options.measurable(options.names("--backend", backend), place)
        _check_files(out, plot, table)
        if place.type == "cuda":
            import torch

            torch.cuda.set_device(place)  # events are recorded on the current one
        job = Job(
            place,
            tuple(entry.name for entry in entries),
            rounds or ROUNDS["random" if random else name][quick],
            quick,
            deadline=time.monotonic() + longest,
            out=out,
            table=table and table.absolute(),
            part=part,
        )
        measured, interrupted = False, True
        with contextlib.suppress(KeyboardInterrupt):
            measure = _measured_by(name, random, drawn)
            with untouched(), output.progress(None) as update:
                job.advance = lambda done, total, text: update(completed=done, total=total, description=text)
                measure(job)
                measured = True
            if plot is not None:
                from attnreg.tools.bench import plots

                plots.draw(name, job.kept, plot)
            interrupted = False
    if job.kept is not None:
        data = document(job.kept, job.left_out)
        if as_json:
            output.print_json(data)
        elif measured:
            _print(job, data["machine"])
        if interrupted and out is not None:
            typer.echo(f"attnreg: what was measured before is in {out}", err=True)
    if interrupted:
        raise typer.Exit(output.INTERRUPTED)


def _measured_by(name: str, random: int | None, seed: int) -> Callable[[Job], None]:
    """Return what measures for a command; of so many random shapes if that is a number."""
    if random:
        from attnreg.tools.bench import random_shapes

        return functools.partial(random_shapes.measure, count=random, seed=seed)
    return importlib.import_module(f"attnreg.tools.bench.{name}").measure  # type: ignore[no-any-return]


# Typer reads the options of a command off its function.
def _with_table(
    context: typer.Context,
    rounds: Rounds = None,
    quick: Quick = False,
    device: options.DeviceHere = "",
    backend: options.Backends = [],  # noqa: B006 - typer makes a new list for each call
    budget: options.Budget = "",
    out: Out = None,
    plot: Plot = None,
    table: TableFile = None,
    as_json: options.AsJson = False,
) -> None:
    _run(**locals())


def _without_table(
    context: typer.Context,
    rounds: Rounds = None,
    quick: Quick = False,
    device: options.DeviceHere = "",
    backend: options.Backends = [],  # noqa: B006
    budget: options.Budget = "",
    out: Out = None,
    plot: Plot = None,
    as_json: options.AsJson = False,
) -> None:
    _run(**locals())


def _selection(
    context: typer.Context,
    rounds: Rounds = None,
    quick: Quick = False,
    device: options.DeviceHere = "",
    backend: options.Backends = [],  # noqa: B006
    budget: options.Budget = "",
    out: Out = None,
    plot: Plot = None,
    table: TableFile = None,
    random: Random = None,
    seed: Seed = None,
    as_json: options.AsJson = False,
) -> None:
    if seed is not None and not random:
        raise InvalidInputError("--seed: got no --random, expected it as well: the other shapes are fixed")
    _run(**locals())


def _fresh(
    context: typer.Context,
    part: Part = "all",
    rounds: Rounds = None,
    quick: Quick = False,
    device: options.DeviceHere = "",
    backend: options.Backends = [],  # noqa: B006
    budget: options.Budget = "",
    out: Out = None,
    plot: Plot = None,
    table: TableFile = None,
    as_json: options.AsJson = False,
) -> None:
    if part not in ("all", *PARTS):
        raise InvalidInputError(f"--part: got {part!r}, expected all or one of {', '.join(PARTS)}")
    _run(**locals())


def _check_files(out: Path | None, plot: Path | None, table: Path | None) -> None:
    """Fail now if a file can't be read, written or drawn: not after everything has been measured."""
    from attnreg.core.times.table import load

    if out is not None:
        options.check_writable("--out", out.absolute(), '"machine"')
    if table is not None:
        load(table)
    if plot is not None:
        if plot.suffix.lower() not in (".png", ".svg"):
            raise InvalidInputError(f"--plot: got {str(plot)!r}, expected a file named .png or .svg")
        if importlib.util.find_spec("matplotlib") is None:
            raise AttnregError("--plot needs matplotlib: pip install 'attnreg[plots]'")
        options.check_writable("--plot", plot.absolute())


def _print(job: Job, machine: dict[str, str]) -> None:
    """Print the machine, the tables, what was left out, and which targets are reached."""
    from attnreg.tools.bench.report import show, show_machine

    place = output.console()
    show_machine(place, machine)
    for title, header, rows in job.tables:
        if rows:
            show(title, header, rows, place)
    for line in (*(f"left out: {line}" for line in job.left_out), *job.summary):
        place.print(line, soft_wrap=True)


for _name, _function, _help in (
    (
        "varlen",
        _without_table,
        """Compare varlen_attn on packed sequences.

        The cases are those of the benchmark in PyTorch's pull request 164502.

        Example: attnreg bench varlen --quick --backend FA4,cuDNN
        """,
    ),
    (
        "sdpa",
        _with_table,
        """Compare scaled_dot_product_attention over a grid of shapes.

        Example: attnreg bench sdpa --quick --plot sdpa.png
        """,
    ),
    (
        "overhead",
        _without_table,
        """Measure the host time that attnreg adds to a call.

        Example: attnreg bench overhead --device cpu
        """,
    ),
    (
        "fresh",
        _fresh,
        """Measure calls whose lengths are new in every step.

        Beside each: the same batch repeated, and what torch takes.

        Example: attnreg bench fresh --quick --part varlen
        """,
    ),
    (
        "selection",
        _selection,
        """Compare the chosen backend with the fastest one.

        The shapes are ones that no table was tuned on; --random N draws others.

        Example: attnreg bench selection --random 300 --seed 1 --budget 5m
        """,
    ),
):
    bench.command(_name, help=_help)(output.report_errors(_function))
