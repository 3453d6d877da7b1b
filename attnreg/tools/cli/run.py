"""`attnreg run`: an unchanged program, its attention on backends of the user's choice."""

import atexit
import builtins
import contextlib
import functools
import importlib.util
import io
import json
import os
import pkgutil
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from attnreg.errors import AttnregError, ConfigError, InvalidInputError
from attnreg.tools.cli.options import valued
from attnreg.tools.cli.output import console
from attnreg.tools.cli.report import lines_of, print_report, write_page


class _Ending:
    """How the program ended, for what runs after it."""

    is_interrupt = False


def run(
    context: typer.Context,
    program: Annotated[
        list[str], typer.Argument(metavar="PROGRAM", help="What `python` would run, and its arguments.")
    ],
    backend: Annotated[
        list[str], valued("--backend", "NAMES", "Prefer these, one or several with commas.")
    ] = [],  # noqa: B006 - typer makes a new list for each call
    disable: Annotated[
        list[str], valued("--disable", "NAMES", "Never run these, one or several with commas.")
    ] = [],  # noqa: B006
    config: Annotated[Path | None, valued("--config", "FILE", "Settings file (TOML).")] = None,
    strict: Annotated[
        bool | None,
        typer.Option("--strict/--no-strict", help="Fail if none of the preferred backends can run a call."),
    ] = None,
    record: Annotated[
        Path | None, valued("--record", "FILE", "Record the attention calls, for `attnreg tune --from`.")
    ] = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="When the program ends, print on stderr which backends ran.")
    ] = False,
    stats_to: Annotated[
        Path | None,
        valued("--stats-to", "FILE", "Add what ran to a file: a line of JSON for each process."),
    ] = None,
    report: Annotated[
        Path | None,
        valued(
            "--report", "FILE", "When the program ends, write a page (HTML) of what ran; calls are timed."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what ran as JSON, on stderr.")] = False,
    as_module: Annotated[bool, typer.Option("-m", help="PROGRAM is a module, as in `python -m`.")] = False,
) -> None:
    """Run a Python program on attention backends of your choice.

    The program needs no change. The options set ATTNREG_BACKEND, ATTNREG_DISABLE, ATTNREG_CONFIG,
    ATTNREG_STRICT, ATTNREG_RECORD, ATTNREG_STATS and ATTNREG_REPORT for the program and for the processes
    that it starts.

    Example: attnreg run --backend FA4,cuDNN train.py --epochs 3
    """
    name, *arguments = program
    _check_exists(name, as_module)
    lines = None if report is None else lines_of(report)
    variables = {
        "ATTNREG_BACKEND": ",".join(backend),
        "ATTNREG_DISABLE": ",".join(disable),
        "ATTNREG_CONFIG": "" if config is None else str(config.absolute()),
        "ATTNREG_STRICT": "" if strict is None else str(int(strict)),
        "ATTNREG_RECORD": "" if record is None else str(record.absolute()),
        "ATTNREG_STATS": "" if stats_to is None else str(stats_to.absolute()),
        "ATTNREG_REPORT": "" if lines is None else str(lines),
    }
    # Read before the program starts, which checks the names of backends; torch is imported for that, before
    # attnreg's own modules as in `import_torch`. No GPU is initialised: the program may still set
    # CUDA_VISIBLE_DEVICES.
    import torch  # noqa: F401

    os.environ.update({variable: value for variable, value in variables.items() if value})
    _read_settings()
    if stats or as_json or stats_to is not None or lines is not None:
        from attnreg.core import aten

        aten.bypassed.observe(1)
        aten.ensure()
    ending = _Ending()
    if stats or as_json or report is not None:
        atexit.register(_keep_interrupt, ending)  # the first that is registered is the last that runs
    if stats or as_json:
        atexit.register(_print_json if as_json else _print_stats)
    if report is not None and lines is not None:
        atexit.register(_write_report, lines, report.absolute(), os.getpid())
    context.obj.append(functools.partial(_start, name, arguments, as_module, ending))


def _read_settings() -> None:
    """Read the settings that the program would read, which `on_error = "native"` may leave out."""
    import attnreg
    from attnreg.core.policy import current as policy
    from attnreg.core.policy.sources import Sources, keeps_native, under_a_lock

    try:
        attnreg.reload()
    except ConfigError as error:
        if not keeps_native():
            raise under_a_lock(error) from error
        if policy.left_out() != str(error):  # `import torch` may have said it
            policy.apply(Sources())
            policy.leave_out(error)


def _check_exists(name: str, as_module: bool) -> None:
    if as_module:
        _set_first_path(str(Path.cwd()))
        # To look up a module inside a package would import the package.
        outermost = name.partition(".")[0]
        if not outermost or importlib.util.find_spec(outermost) is None:
            raise InvalidInputError(f"-m: got {name!r}, expected a module that can be imported")
    elif not Path(name).exists():
        raise InvalidInputError(f"got {name!r}, expected a program: there is no such file")


def _write_report(lines: Path, page: Path, process: int) -> None:
    """Write the page of the program, once it has ended; an error is a line, its exit code stays."""
    if os.getpid() != process:  # a fork of the program
        return
    from attnreg.core.dispatch import stats_file

    stats_file.write()
    try:
        write_page([lines] if lines.exists() else [], page)
    except AttnregError as error:
        typer.echo(f"attnreg: no report: {error}", err=True)
    else:
        typer.echo(f"attnreg: report: {page}", err=True)


def _keep_interrupt(ending: _Ending) -> None:
    """Have Python end as after Ctrl-C, with exit code 130, if that has ended the program.

    Python forgets it as soon as code is executed from a string, as `collections.namedtuple` does in the
    imports of what prints at the end. An interrupt in such code counts again.
    """
    if ending.is_interrupt:
        with contextlib.suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt")  # noqa: S102


def _print_json() -> None:
    import attnreg

    typer.echo(json.dumps(attnreg.stats().to_dict(), indent=2), err=True)


def _print_stats() -> None:
    import attnreg
    from attnreg.tools.report.lines import RunReport

    line = {"program": "", "pid": 0, **attnreg.stats().to_dict()}
    print_report(RunReport([line]), console(stderr=True), " of this process")


def _start(name: str, arguments: list[str], as_module: bool, ending: _Ending) -> None:
    """Run the program as `python name arguments` does, or `python -m name arguments`; note Ctrl-C."""
    try:
        _run_main(name, arguments, as_module)
    except KeyboardInterrupt:
        ending.is_interrupt = True
        raise


def _run_main(name: str, arguments: list[str], as_module: bool) -> None:
    sys.argv = [name, *arguments]
    if as_module:  # sys.path has the current folder already
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        return
    path = Path(name).absolute()
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


def _set_first_path(folder: str) -> None:
    """Replace the folder that Python put first on sys.path, the command line's, by the program's."""
    if not sys.flags.safe_path:
        sys.path[0] = folder
