"""`attnreg bench`: backends compared with each other and with torch; `attnreg.tools.bench` measures."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnreg.errors import AttnregError, InvalidInputError, did_you_mean
from attnreg.tools.cli import options, output
from attnreg.tools.cli.options import valued

if TYPE_CHECKING:
    from attnreg.tools.bench.report import Job

# What `attnreg bench fresh` is made of.
PARTS = ("varlen", "decode", "dense")

# How often each alternative is measured: without and with `--quick`.
ROUNDS = {
    "varlen": (15, 3),
    "sdpa": (7, 2),
    "overhead": (31, 3),
    "selection": (5, 1),
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
    name: str,
    *,
    part: Annotated[
        list[str], valued("--part", "PARTS", f"Some of {', '.join(PARTS)}, with commas. Default: all.")
    ] = [],  # noqa: B006 - typer makes a new list for each call
    rounds: Annotated[
        int | None, valued("--rounds", "N", "How often each alternative is measured, in turns.", min=1)
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer cases and fewer rounds.")] = False,
    device: options.DeviceHere = "",
    backend: options.Backends = [],  # noqa: B006
    budget: options.Budget = "",
    out: Annotated[Path | None, valued("--out", "FILE", "Save the results as JSON after every case.")] = None,
    plot: Annotated[Path | None, valued("--plot", "FILE", "Draw the results: a .png or .svg.")] = None,
    table: Annotated[
        Path | None,
        valued("--table", "FILE", "Choose by this table. Default: the one that comes with attnreg."),
    ] = None,
    random: Annotated[
        int | None, valued("--random", "N", "Measure N random shapes instead of the fixed ones.", min=1)
    ] = None,
    seed: Annotated[
        int | None,
        valued("--seed", "S", "With --random: the seed of the shapes. Default: a new one each time."),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure what a command is named after; save, draw and print the results."""
    if seed is not None and not random:
        raise InvalidInputError("--seed: got no --random, expected it as well: the other shapes are fixed")
    output.import_torch()
    with output.stdout_to_stderr():
        job = _job(device, backend, out, plot, table)
        job.parts, job.quick = _parts(part), quick
        job.rounds = rounds or ROUNDS[name][quick]
        job.deadline = time.monotonic() + options.seconds(budget)
        is_measured = _measure(job, _measure_function(name, random, seed))
        is_finished = is_measured and (plot is None or _draw(name, job, plot))
    if job.kept is not None:
        from attnreg.tools.bench.report import document

        if as_json:
            output.print_json(document(job.kept, job.left_out))
        elif is_measured:
            _print(job)
        if not is_finished and job.out is not None:
            typer.echo(f"attnreg: what was measured before is in {job.out}", err=True)
    if not is_finished:
        raise typer.Exit(output.INTERRUPTED)


def _parts(named: list[str]) -> tuple[str, ...]:
    """Return the parts of `--part`, all of them unless some are named."""
    parts = options.names("--part", named)
    for name in parts:
        if name not in ("all", *PARTS):
            raise InvalidInputError(
                f"--part: got {name!r}, expected all or some of {', '.join(PARTS)}{did_you_mean(name, PARTS)}"
            )
    return PARTS if not parts or "all" in parts else parts


def _job(device: str, backend: list[str], out: Path | None, plot: Path | None, table: Path | None) -> Job:
    """Return what the options ask for, once its files are known to be readable and writable."""
    import torch

    from attnreg.tools.bench.report import Job

    place = options.present_device(device)
    entries = options.measurable(options.names("--backend", backend), place)
    _check_files(out, plot, table)
    if place.type == "cuda":
        torch.cuda.set_device(place)  # events are recorded on the current one
    names = tuple(entry.name for entry in entries)
    return Job(place, names, rounds=1, out=out, table=table and table.absolute())


def _measure_function(name: str, random: int | None, seed: int | None) -> Callable[[Job], None]:
    """Return the function that measures for a command."""
    measure: Callable[..., None] = importlib.import_module(f"attnreg.tools.bench.{name}").measure
    if not random:
        return measure
    return functools.partial(measure, count=random, seed=secrets.randbelow(10**6) if seed is None else seed)


def _measure(job: Job, measure: Callable[[Job], None]) -> bool:
    """Measure behind a progress bar; return False after Ctrl-C."""
    from attnreg.tools.bench.sides import untouched

    with contextlib.suppress(KeyboardInterrupt), untouched(), output.progress(None) as update:
        job.advance = lambda done, total, text: update(completed=done, total=total, description=text)
        measure(job)
        return True
    return False


def _draw(name: str, job: Job, plot: Path) -> bool:
    """Draw the results; return False after Ctrl-C."""
    from attnreg.tools.bench import plots

    with contextlib.suppress(KeyboardInterrupt):
        plots.draw(name, job.kept, plot)
        return True
    return False


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


def _print(job: Job) -> None:
    """Print the machine, the tables, what was left out, and what is said of the results."""
    from attnreg.tools.bench.report import machine_line

    place = output.console()
    place.print(f"{machine_line()}\n", soft_wrap=True)
    for title, header, rows in job.tables:
        if rows:
            output.table(title, rows, header, right=len(header) - 1, place=place)
    for line in (*(f"left out: {line}" for line in job.left_out), *job.summary):
        place.print(line, soft_wrap=True)


# Options that every command has.
SHARED = ("rounds", "quick", "device", "backend", "budget", "out", "plot", "as_json")

# The commands: the options of each besides the shared ones, and its help.
COMMANDS: dict[str, tuple[tuple[str, ...], str]] = {
    "varlen": (
        (),
        """Compare varlen_attn on packed sequences.

        The cases are those of the benchmark in PyTorch's pull request 164502.

        Example: attnreg bench varlen --quick --backend FA4,cuDNN
        """,
    ),
    "sdpa": (
        ("table",),
        """Compare scaled_dot_product_attention over a grid of shapes.

        Example: attnreg bench sdpa --quick --plot sdpa.png
        """,
    ),
    "overhead": (
        (),
        """Measure the host time that attnreg adds to a call.

        Example: attnreg bench overhead --device cpu
        """,
    ),
    "fresh": (
        ("part", "table"),
        """Measure calls whose lengths are new in every step.

        Each is compared with the same batch repeated, and with torch's own function.

        Example: attnreg bench fresh --quick --part decode,dense
        """,
    ),
    "selection": (
        ("table", "random", "seed"),
        """Compare the chosen backend with the fastest one.

        The shapes are ones that no table was tuned on; --random N draws others.

        Example: attnreg bench selection --random 300 --seed 1 --budget 5m
        """,
    ),
}


def _command(name: str, further: tuple[str, ...]) -> Callable[..., None]:
    """Return the function of a command, by whose signature typer knows its options."""

    def command(**chosen: Any) -> None:
        _run(name, **chosen)

    every = inspect.signature(_run, eval_str=True).parameters.values()
    shown = [option for option in every if option.name in (*SHARED, *further)]
    command.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    return command


for _name, (_further, _help) in COMMANDS.items():
    bench.command(_name, help=_help)(output.report_errors(_command(_name, _further)))
