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
    folder. Programs that start from then on use them; ATTNREG_ROUTERS=python leaves them out.
    """
    import_torch()
    from attnreg import building
    from attnreg.errors import BuildError

    place, began = console(stderr=True), time.perf_counter()
    try:
        with place.status("compiling the routers"):
            file = building.build()
        with place.status("compiling the CPU kernel"):
            kernel = building.build(building.CPU_KERNEL)
    except BuildError as error:
        typer.echo(f"attnreg: {error}", err=True)
        if as_json:
            print_json({"error": {"type": "BuildError", "message": str(error)}})
        raise typer.Exit(NOTHING_RUNS) from None
    took = round(time.perf_counter() - began, 1)
    if as_json:
        print_json({"file": str(file), "cpu_kernel": str(kernel), "seconds": took})
    else:
        table(console(), ("", ""), (("built", str(file)), ("and", str(kernel)), ("in", f"{took} s")))
