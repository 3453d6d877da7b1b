"""The command line: `attnreg` and `python -m attnreg`.

A command is a function in a file of its own, both of its name; `output` and `options` are shared. Any room
may be imported, but torch, rich and what imports them only inside functions, so that `--help` is fast. Exit
codes: 0; 1 nothing can run, or a backend is wrong; 2 usage; 130 and 141 for Ctrl-C and a closed pipe. Read
`info.py` first.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Annotated, Any, NoReturn

import typer
from typer.main import get_command

from attnreg import __version__
from attnreg.errors import AttnregError
from attnreg.tools.cli.output import report_errors
from attnreg.tools.lines import REPLACING, register_replacing

COMMANDS = (
    "info", "explain", "verify", "warmup", "build", "tune", "lock", "check", "init", "run", "report",
    "config-schema", "demo", "bench",
)  # fmt: skip

# Plain help: the boxes that rich would draw take longer to import than all the rest, and suit no pipe.
app = typer.Typer(
    name="attnreg",
    help="One registry for the attention kernels of this machine, behind PyTorch's own functions.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the command line of this process; the program of `attnreg run` starts once that has returned."""
    programs: list[Callable[[], None]] = []
    try:
        with _ended_by_closed_pipe(), _any_encoding():
            get_command(app).main(obj=programs)
    except SystemExit:
        if not programs:
            raise
    # Outside of the `try`: the program's exceptions, SystemExit among them, are its own.
    programs[0]()


@contextlib.contextmanager
def _ended_by_closed_pipe() -> Iterator[None]:
    """Let a closed pipe end the process without a message, as it ends other command-line tools."""
    if not hasattr(signal, "SIGPIPE"):
        yield
        return
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        yield
    finally:
        if sys.stdout is not None:  # the process may have been started without one
            sys.stdout.flush()  # what is still in the buffer would otherwise fail when Python ends
        signal.signal(signal.SIGPIPE, before)


@contextlib.contextmanager
def _any_encoding() -> Iterator[None]:
    """Replace what the encoding of stdout lacks: an error would come after the work. Not for `run`."""
    register_replacing()
    stdout = sys.stdout
    if not isinstance(stdout, io.TextIOWrapper):
        yield
        return
    before = stdout.errors
    stdout.reconfigure(errors=REPLACING)
    try:
        yield
    finally:
        stdout.reconfigure(errors=before)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"attnreg {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


def _function(name: str) -> Callable[..., Any]:
    """Return a command's function; if its file can't be imported, one that says why."""
    module = name.replace("-", "_")
    try:
        command: Callable[..., Any] = getattr(importlib.import_module(f"attnreg.tools.cli.{module}"), module)
    except ImportError as error:
        cause = error

        def broken() -> NoReturn:
            raise AttnregError(f"{name} can't be loaded: {cause}") from cause

        broken.__doc__ = f"Can't be loaded: {cause}."
        return broken
    return command


for _name in COMMANDS:
    _command = _function(_name)
    if isinstance(_command, typer.Typer):  # it has commands of its own
        app.add_typer(_command, name=_name)
    else:
        # What follows the first positional argument of `run` belongs to the program that it is to start.
        _context = {"allow_interspersed_args": _name != "run"}
        app.command(_name, context_settings=_context)(report_errors(_command))
