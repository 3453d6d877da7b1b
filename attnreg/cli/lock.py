"""`attnreg lock`: what was decided for a recorded workload, as a file that ATTNREG_LOCK replays."""

import contextlib
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from attnreg.cli.failures import NOTHING_RUNS
from attnreg.cli.output import AsJson, console, print_json
from attnreg.cli.torch_first import import_torch

__all__ = ["lock"]

Trace = Annotated[
    Path,
    typer.Option("--from", metavar="FILE", help="The calls that attnreg.record or ATTNREG_RECORD wrote."),
]
Out = Annotated[Path, typer.Option("--out", metavar="FILE", help="The lockfile.")]
Where = Annotated[
    str,
    typer.Option("--device", metavar="DEVICE", help="cpu, cuda or cuda:1; else where the calls were made."),
]


def lock(trace: Trace, out: Out, device: Where = "", as_json: AsJson = False) -> None:
    """Write down which backend runs each call of a recorded workload here.

    With ATTNREG_LOCK=FILE a program runs just that, or fails saying what differs. A lock that is in
    force already is left out of account.
    """
    from attnreg.selection.lockfile import VARIABLE

    in_force = os.environ.pop(VARIABLE, None)  # it needn't be readable: it may be the one to be made anew
    try:
        import_torch()
        # A provider that greets on import must not get into the JSON.
        with contextlib.redirect_stdout(sys.stderr):
            from attnreg.cli import lockings

            found = lockings.locked(trace, out, device)
    finally:
        if in_force is not None:
            os.environ[VARIABLE] = in_force
    if as_json:
        print_json(found.to_dict())
    else:
        lockings.show(console(), found)
    if found.refused:
        raise typer.Exit(NOTHING_RUNS)
