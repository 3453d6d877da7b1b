"""`attnreg build`: compile the routers, so that what torch's own kernels answer costs less of the host."""

import time

import typer

from attnreg.cli.failures import NOTHING_RUNS
from attnreg.cli.output import AsJson, console, print_json, table
from attnreg.cli.torch_first import import_torch

__all__ = ["build"]


def build(as_json: AsJson = False) -> None:
    """Compile the routers for this torch and Python, with the C++ compiler of this machine.

    Calls that torch's own kernels answer go straight there then, in programs that start from now on.
    """
    import_torch()
    from attnreg import building
    from attnreg.errors import BuildError

    place, began = console(stderr=True), time.perf_counter()
    try:
        with place.status("compiling the routers"):
            file = building.build()
    except BuildError as error:
        typer.echo(f"attnreg: {error}", err=True)
        if as_json:
            print_json({"error": {"type": "BuildError", "message": str(error)}})
        raise typer.Exit(NOTHING_RUNS) from None
    took = round(time.perf_counter() - began, 1)
    if as_json:
        print_json({"file": str(file), "seconds": took})
    else:
        table(console(), ("", ""), (("built", str(file)), ("in", f"{took} s")))
