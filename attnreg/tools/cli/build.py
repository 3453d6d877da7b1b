"""`attnreg build`: compile what attnreg has in C++ now, so that calls cost less."""

import time
from typing import Annotated

import typer

from attnreg.errors import BuildError, InvalidInputError
from attnreg.tools.cli.options import AsJson
from attnreg.tools.cli.output import FAILED, console, print_json, table


def build(
    missing: Annotated[
        bool, typer.Option("--missing", help="Compile only what isn't compiled yet and hasn't failed before.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Compile again what is compiled and current, too.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compile the call cache and the kernel for this CPU now.

    The call cache runs repeated calls without Python, and is compiled for this torch and Python. The kernel
    is compiled even if a wheel brought one, unless --missing is given. Both go into the user's cache folder.
    CXX names the compiler; without it the command looks for one. Compiling takes about half a minute. What is
    compiled and current stays: the command then takes about a second. Programs that start after it use both.
    Without this command the first program that runs attention has what is missing compiled in the background,
    which ATTNREG_BUILD=off forbids. With ATTNREG_ROUTERS=python neither is used.

    The exit code is 1 if one of them can't be compiled; the other is kept.

    Example: attnreg build
    """
    if missing and force:
        raise InvalidInputError("--force: got --missing as well, expected one of the two")
    # No torch: where everything is compiled, its import would take most of the time.
    from attnreg.core.torchlib import building

    began = time.perf_counter()
    made: dict[str, str] = {}
    failures: list[str] = []
    libraries = {"file": building.CALL_CACHE, "cpu_kernel": building.CPU_KERNEL}
    statuses = {name: building.status(library) for name, library in libraries.items()}
    others = {status.reason for status in statuses.values() if status.state == "building"}
    for reason in others:
        typer.echo(f"attnreg: {reason}, waiting for it", err=True)
    is_current = {name: not force and building.is_current(library) for name, library in libraries.items()}
    for name, library in libraries.items():
        try:
            if missing and statuses[name].state == "failed":
                raise BuildError(statuses[name].reason)
            keeps = is_current[name] or missing or bool(others and not force)
            with console(stderr=True).status(f"compiling {library.title}"):
                made[name] = str(building.build(library, keeps))
        except BuildError as error:
            failures.append(str(error))
            # With --missing it goes into a log.
            message = building.in_one_line(str(error)) if missing else error
            typer.echo(f"attnreg: {message}", err=True)
    seconds = round(time.perf_counter() - began, 1)
    if as_json:
        problem = {"type": "BuildError", "message": "\n".join(failures)}
        print_json({**made, **({"error": problem} if failures else {"seconds": seconds})})
    elif made and not missing:
        titles = {"file": "call cache", "cpu_kernel": "CPU kernel"}
        rows = [(titles[name], file) for name, file in made.items()]
        again = "both were compiled before; `attnreg build --force` compiles them again"
        table(
            "", [*rows, ("current", again) if all(is_current.values()) else ("compiled in", f"{seconds} s")]
        )
    if failures:
        raise typer.Exit(FAILED)
