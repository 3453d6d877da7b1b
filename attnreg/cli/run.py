"""`attnreg run`: an unchanged program, its attention on backends of the user's choice."""

import atexit
import builtins
import functools
import importlib.util
import io
import os
import pkgutil
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from attnreg.cli.output import console, heading, table
from attnreg.errors import InvalidInputError

Backend = Annotated[
    list[str],
    typer.Option("--backend", metavar="NAMES", help="Prefer these, one or several with commas."),
]
Disable = Annotated[
    list[str], typer.Option("--disable", metavar="NAMES", help="Never run these, one or several with commas.")
]
Config = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="Settings file (TOML).")]
Strict = Annotated[
    bool | None,
    typer.Option("--strict/--no-strict", help="Fail if a preferred backend can't run a call."),
]
Stats = Annotated[
    bool, typer.Option("--stats", help="When the program ends, print on stderr which backends ran.")
]
Record = Annotated[
    Path | None,
    typer.Option("--record", metavar="FILE", help="Record the attention calls, for `attnreg tune --from`."),
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
    """Run a Python program on attention backends of your choice.

    The program needs no change. The options set ATTNREG_BACKEND, ATTNREG_DISABLE, ATTNREG_CONFIG,
    ATTNREG_STRICT and ATTNREG_RECORD for the program and for the processes that it starts.

    Example: attnreg run --backend FA4,cuDNN train.py --epochs 3
    """
    name, *arguments = program
    _check_exists(name, as_module)
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
    start = _run_module if as_module else _run_script
    context.obj.append(functools.partial(start, name, arguments))


def _check_exists(name: str, as_module: bool) -> None:
    if as_module:
        _set_first_path(str(Path.cwd()))
        # To look up a module inside a package would import the package.
        outermost = name.partition(".")[0]
        if not outermost or importlib.util.find_spec(outermost) is None:
            raise InvalidInputError(f"-m: got {name!r}, expected a module that can be imported")
    elif not Path(name).exists():
        raise InvalidInputError(f"got {name!r}, expected a program: there is no such file")


def _activate(given: dict[str, str]) -> None:
    """Set the variables, for child processes too, and read them before the program starts.

    Reading them checks the names of backends, for which torch is imported. No GPU is initialised: the
    program may still set CUDA_VISIBLE_DEVICES.
    """
    import torch  # noqa: F401 - before attnreg's own modules, see `errors.import_torch`

    import attnreg

    os.environ.update(given)
    attnreg.reload()


def _print_stats() -> None:
    import attnreg

    counted, place = attnreg.stats(), console(stderr=True)
    heading(place, "What ran" if counted.calls else "No attention call went through attnreg")
    if counted.calls:
        calls = ((name, str(n["forward"]), str(n["backward"])) for name, n in counted.calls.items())
        table(place, ("backend", "forward", "backward"), calls, right=2)
    if counted.fallbacks:
        heading(place, "What could not run, and why")
        rows = ((row.backend, str(row.count), row.reason) for row in counted.fallbacks)
        table(place, ("backend", "calls", "reason"), rows)


def _run_script(name: str, arguments: list[str]) -> None:
    """Run a file as `python name arguments` does."""
    path = Path(name).absolute()
    sys.argv = [name, *arguments]
    if pkgutil.get_importer(str(path)) is not None:  # a folder or an archive with a __main__.py
        _set_first_path(str(path))
        runpy.run_path(str(path), run_name="__main__")
        return
    _set_first_path(str(path.resolve().parent))
    # `runpy.run_path` would set __file__ to the path as typed, which is wrong after a chdir, and would
    # clear the module while the program's threads and exit handlers still use it.
    main = ModuleType("__main__")
    main.__file__, main.__builtins__ = str(path), builtins  # type: ignore[attr-defined]
    sys.modules["__main__"] = main
    with io.open_code(str(path)) as file:
        code = compile(file.read(), str(path), "exec")
    exec(code, main.__dict__)  # noqa: S102 - running a program is the command's purpose


def _run_module(name: str, arguments: list[str]) -> None:
    """Run a module as `python -m name arguments` does; sys.path has the current folder already."""
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _set_first_path(folder: str) -> None:
    """Replace the folder that Python put first on sys.path, the command line's, by the program's."""
    if not sys.flags.safe_path:
        sys.path[0] = folder
