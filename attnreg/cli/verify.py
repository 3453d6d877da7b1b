"""`attnreg verify`: every backend of this machine against float64, case by case."""

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from attnreg.cli.output import AsJson, console, print_json
from attnreg.cli.parsing import dtype_name, names, torch_device
from attnreg.cli.torch_first import import_torch

if TYPE_CHECKING:
    import torch

    from attnreg.cli.verdicts import Verdict
    from attnreg.verification import Case

__all__ = ["verify"]

WRONG = 1
INTERRUPTED = 130

Backends = Annotated[
    list[str], typer.Option("--backend", help="Only these, by comma or repeated; all that run here unless given.")
]
Where = Annotated[str, typer.Option("--device", help="cpu, cuda or cuda:1; the GPU where there is one.")]
Dtypes = Annotated[list[str], typer.Option("--dtype", help="Only these; bf16 unless --full.")]
Full = Annotated[bool, typer.Option("--full/--quick", help="All dtypes and the cases that take seconds each.")]
Only = Annotated[str, typer.Option("--case", metavar="TEXT", help="Only the cases with this in their name.")]


def verify(
    backend: Backends = [],  # noqa: B006 - typer makes a new list for each call
    device: Where = "",
    dtype: Dtypes = [],  # noqa: B006
    full: Full = False,
    case: Only = "",
    as_json: AsJson = False,
) -> None:
    """Hold the backends of this machine to float64, case by case."""
    import_torch()
    with contextlib.redirect_stdout(sys.stderr):
