"""`attnreg demo`: train on real text, packed and padded, and compare what comes of it."""

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnreg.cli.output import AsJson, console, heading, print_json, table

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from attnreg.demo.result import Result

__all__ = ["demo"]

DISAGREE = 1
CONTEXT = 1024
DOCUMENTS = 12

Steps = Annotated[int, typer.Option(min=2, help="How many batches to train on.")]
Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="Where to write the plot.")]
Seed = Annotated[int, typer.Option(help="Of the weights and of the choice of documents.")]
Where = Annotated[str, typer.Option("--device", help="Where to train; the GPU unless given, if there is one.")]


def demo(
    steps: Steps = 36, out: Out = Path("demo-output"), seed: Seed = 0, device: Where = "", as_json: AsJson = False
) -> None:
    """Train a small model on real text, packed and padded: same losses, which is faster, what ran."""
    place = console(stderr=as_json)
    result = _trained(place, steps, seed, _device(device))
    plot = _plotted(result, out)
    if as_json:
        print_json({**result.to_dict(), "plot": plot and str(plot)})
    else:
        _print(place, result)
        place.print(f"Plot: {plot}" if plot else "No plot: pip install 'attnreg[plots]' for one")
    if not result.agrees:
        raise typer.Exit(DISAGREE)
