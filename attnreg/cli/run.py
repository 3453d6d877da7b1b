"""`attnreg run`: a program nobody touched, with attnreg serving its attention."""

import atexit
import functools
import importlib.util
import os
from pathlib import Path
from typing import Annotated

import typer

from attnreg.cli.output import console, heading, table
from attnreg.cli.program import lead_path, run_module, run_script
from attnreg.errors import InvalidInputError

__all__ = ["run"]

Backend = Annotated[
    list[str], typer.Option("--backend", metavar="NAME", help="Prefer these, by comma or repeated.")
]
Disable = Annotated[list[str], typer.Option("--disable", metavar="NAME", help="These must not run.")]
Config = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="Settings file (TOML).")]
Strict = Annotated[
    bool | None,
    typer.Option("--strict/--no-strict", help="Whether it is an error if a preferred one can't run a call."),
]
Stats = Annotated[bool, typer.Option("--stats", help="Print on stderr what ran, when the program ends.")]
Record = Annotated[
    Path | None,
    typer.Option("--record", metavar="FILE", help="Write what calls there were, for `attnreg tune`."),
]
AsModule = Annotated[bool, typer.Option("-m", help="PROGRAM is a module, as in `python -m`.")]
Program = Annotated[
    list[str], typer.Argument(metavar="PROGRAM", help="What `python` would run, and its arguments.")
]


def run(
    context: typer.Context,
    program: Program,
    backend: Backend = [],  # noqa: B006 - typer makes a new list for each call
    disable: Disable = [],  # noqa: B006
    config: Config = None,
    strict: Strict = None,
    record: Record = None,
    stats: Stats = False,
    as_module: AsModule = False,
) -> None:
    """Run a program on backends of your choice.

    The program needn't know of attnreg. The options stand for ATTNREG_BACKEND and the other
    variables, for the program and for the processes that it starts.
    """
    name, *arguments = program
    _check_there(name, as_module)
    given = {
        "ATTNREG_BACKEND": ",".join(backend),
        "ATTNREG_DISABLE": ",".join(disable),
        "ATTNREG_CONFIG": "" if config is None else str(config.absolute()),
        "ATTNREG_STRICT": "" if strict is None else str(int(strict)),
        "ATTNREG_RECORD": "" if record is None else str(record.absolute()),
    }
    _activate({variable: value for variable, value in given.items() if value})
    if stats:
        atexit.register(_print_stats)
    start = run_module if as_module else run_script
    context.obj.append(functools.partial(start, name, arguments))


def _check_there(name: str, as_module: bool) -> None:
    if as_module:
        lead_path(str(Path.cwd()))
        # To find a module inside a package would import the package, so only that is looked up.
        outermost = name.partition(".")[0]
        if not outermost or importlib.util.find_spec(outermost) is None:
            raise InvalidInputError(f"-m: got {name!r}, expected a module that can be imported")
    elif not Path(name).exists():
        raise InvalidInputError(f"got {name!r}, expected a program; there is no such file")


def _activate(given: dict[str, str]) -> None:
    """Set the variables, for child processes too, and have them read before the program starts.

    Reading them checks every name, for which the backends' files are imported, and so torch; it
    touches no GPU: the program may still choose among them by CUDA_VISIBLE_DEVICES.
    """
    import torch  # noqa: F401 - before attnreg's own modules, see `torch_first`

    import attnreg

    os.environ.update(given)
    attnreg.reload()


def _print_stats() -> None:
    import attnreg

    counted, place = attnreg.stats(), console(stderr=True)
    heading(place, "What ran" if counted.calls else "No attention call came through attnreg")
    if counted.calls:
        calls = ((name, str(n["forward"]), str(n["backward"])) for name, n in counted.calls.items())
        table(place, ("backend", "forward", "backward"), calls, right=2)
    if counted.fallbacks:
        heading(place, "What could not, and why")
        rows = ((row.backend, str(row.count), row.reason) for row in counted.fallbacks)
        table(place, ("backend", "calls", "reason"), rows)
