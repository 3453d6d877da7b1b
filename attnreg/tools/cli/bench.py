"""`attnreg bench`: backends compared with each other and with torch; `attnreg.tools.bench` measures."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from inspect import Parameter, Signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from attnreg.errors import AttnregError, InvalidInputError, did_you_mean
from attnreg.tools.cli import options, output
from attnreg.tools.cli.options import valued

if TYPE_CHECKING:
    from attnreg.tools.bench.report import Job

# What `attnreg bench fresh` is made of.
PARTS = ("varlen", "decode", "dense", "transformers")

# How often each alternative is measured: without and with `--quick`.
ROUNDS = {
    "varlen": (15, 3),
    "sdpa": (7, 2),
    "overhead": (31, 3),
    "selection": (5, 1),
    "random": (5, 1),
    "fresh": (5, 1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """The options of the bench commands, in the order of their help; `COMMANDS` lists the options of each."""

    part: Annotated[
        list[str], valued("--part", "PARTS", f"Some of {', '.join(PARTS)}, with commas. Default: all.")
    ] = field(default_factory=list)
    rounds: Annotated[
        int | None, valued("--rounds", "N", "How often each alternative is measured, in turns.", min=1)
    ] = None
    quick: Annotated[bool, typer.Option("--quick", help="Fewer cases and fewer rounds.")] = False
    device: options.DeviceHere = ""
    backend: options.Backends = field(default_factory=list)
    budget: options.Budget = ""
    out: Annotated[Path | None, valued("--out", "FILE", "Save the results as JSON after every case.")] = None
    plot: Annotated[Path | None, valued("--plot", "FILE", "Draw the results: a .png or .svg.")] = None
    table: Annotated[
        Path | None,
        valued("--table", "FILE", "Choose by this table. Default: the one that comes with attnreg."),
    ] = None
    random: Annotated[
        int | None, valued("--random", "N", "Measure N random shapes instead of the fixed ones.", min=1)
    ] = None
    seed: Annotated[
        int | None,
        valued("--seed", "S", "With --random: the seed of the shapes. Default: a new one each time."),
    ] = None
    as_json: options.AsJson = False

    def parts(self) -> tuple[str, ...]:
        """Return the parts of `--part`, all of them unless some are named."""
        named = options.names("--part", self.part)
        for name in named:
            if name not in ("all", *PARTS):
                raise InvalidInputError(
                    f"--part: got {name!r}, expected all or some of {', '.join(PARTS)}"
                    f"{did_you_mean(name, PARTS)}"
                )
        return PARTS if not named or "all" in named else named


# Options that every command has.
SHARED = ("rounds", "quick", "device", "backend", "budget", "out", "plot", "as_json")


bench = typer.Typer(
    help="""Compare backends with each other and with torch.

    Backends that settings disable are left out. No other setting has an effect on the measurement.

    Example: attnreg bench sdpa --quick --plot sdpa.png
    """,
    no_args_is_help=True,
    rich_markup_mode=None,
)


def _run(name: str, chosen: BenchOptions) -> None:
    """Measure what a command is named after; save, draw and print the results."""
    if chosen.seed is not None and not chosen.random:
        raise InvalidInputError("--seed: got no --random, expected it as well: the other shapes are fixed")
    output.import_torch()
    with output.stdout_to_stderr():
        job, measure = _job(name, chosen), _measure_function(name, chosen)
        is_measured = _measure(job, measure)
        is_finished = is_measured and (chosen.plot is None or _draw(name, job, chosen.plot))
    if job.kept is not None:
        from attnreg.tools.bench.report import document

        data = document(job.kept, job.left_out)
        if chosen.as_json:
            output.print_json(data)
        elif is_measured:
            _print(job, data["machine"])
        if not is_finished and job.out is not None:
            typer.echo(f"attnreg: what was measured before is in {job.out}", err=True)
    if not is_finished:
        raise typer.Exit(output.INTERRUPTED)


def _job(name: str, chosen: BenchOptions) -> Job:
    """Return what the options ask for, once its files are known to be readable and writable."""
    import torch

    from attnreg.tools.bench.report import Job

    parts, device, budget = (
        chosen.parts(),
        options.present_device(chosen.device),
        options.seconds(chosen.budget),
    )
    entries = options.measurable(options.names("--backend", chosen.backend), device)
    _check_files(chosen.out, chosen.plot, chosen.table)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # events are recorded on the current one
    return Job(
        device,
        tuple(entry.name for entry in entries),
        chosen.rounds or ROUNDS["random" if chosen.random else name][chosen.quick],
        chosen.quick,
        deadline=time.monotonic() + budget,
        out=chosen.out,
        table=chosen.table and chosen.table.absolute(),
        parts=parts,
    )


def _measure_function(name: str, chosen: BenchOptions) -> Callable[[Job], None]:
    """Return the function that measures for a command."""
    if chosen.random:
        from attnreg.tools.bench import random_shapes

        seed = secrets.randbelow(10**6) if chosen.seed is None else chosen.seed
        return functools.partial(random_shapes.measure, count=chosen.random, seed=seed)
    return importlib.import_module(f"attnreg.tools.bench.{name}").measure  # type: ignore[no-any-return]


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

    def command(**values: Any) -> None:
        _run(name, BenchOptions(**values))

    hints = get_type_hints(BenchOptions, include_extras=True)
    defaults = BenchOptions()
    command.__signature__ = Signature(  # type: ignore[attr-defined]
        [
            Parameter(
                option.name,
                Parameter.KEYWORD_ONLY,
                default=getattr(defaults, option.name),
                annotation=hints[option.name],
            )
            for option in fields(BenchOptions)
            if option.name in (*SHARED, *further)
        ]
    )
    return command


for _name, (_further, _help) in COMMANDS.items():
    bench.command(_name, help=_help)(output.report_errors(_command(_name, _further)))
