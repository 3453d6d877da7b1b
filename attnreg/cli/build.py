"""`attnreg build`: compile what attnreg has in C++, so that calls cost less."""

import time

import typer

from attnreg.cli.failures import NOTHING_RUNS
from attnreg.cli.output import AsJson, console, print_json, table
from attnreg.cli.torch_first import import_torch

__all__ = ["build"]


def build(as_json: AsJson = False) -> None:
    """Compile the routers, so that a call costs the host less, and a kernel for this CPU.

    For this torch and Python, with the C++ compiler that CXX names or that is found, into the user's cache
    folder. Programs that start from then on use them; ATTNREG_ROUTERS=python leaves both out. Where one
    can't be compiled the other is, and the exit status is 1.
    """
    import_torch()
    from attnreg.errors import BuildError
    from attnreg.torchlib import building

    place, began = console(stderr=True), time.perf_counter()
    made: dict[str, str] = {}
    failures: list[str] = []
    for name, library in (("file", building.CALL_CACHE), ("cpu_kernel", building.CPU_KERNEL)):
        try:
            with place.status(f"compiling {library.title}"):
                made[name] = str(building.build(library))
        except BuildError as error:
            failures.append(str(error))
            typer.echo(f"attnreg: {error}", err=True)
    took = round(time.perf_counter() - began, 1)
    if as_json:
        said = (
            {"error": {"type": "BuildError", "message": "\n".join(failures)}}
            if failures
            else {"seconds": took}
        )
        print_json({**made, **said})
    elif made:
        rows = [*zip(("built", "and"), made.values(), strict=False), ("in", f"{took} s")]
        table(console(), ("", ""), rows)
    if failures:
        raise typer.Exit(NOTHING_RUNS)
