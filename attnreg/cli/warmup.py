"""`attnreg warmup`: have backends compile ahead what given calls need."""

import contextlib
import sys
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer

from attnreg.cli.failures import INTERRUPTED, NOTHING_RUNS
from attnreg.cli.output import AsJson, console, heading, print_json, table
from attnreg.cli.parsing import names, present_device, spec_of
from attnreg.cli.torch_first import import_torch

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from attnreg.cli.first_calls import FirstCall
    from attnreg.contract.spec import AttentionSpec

__all__ = ["pairs", "warmup"]

Queries = Annotated[
    list[str],
    typer.Option(
        "--q", metavar="B,S,H,D", help="Batch, length, heads and head dim; repeated for several calls."
    ),
]
Keys = Annotated[
    list[str],
    typer.Option(
        "--kv", metavar="B,S,H,D", help="The same of key and value, one for each --q; else as the query."
    ),
]
Where = Annotated[
    str, typer.Option("--device", metavar="DEVICE", help="cpu, cuda or cuda:1; the GPU where there is one.")
]
Dtypes = Annotated[
    list[str], typer.Option("--dtype", metavar="DTYPE", help="By comma or repeated; bf16 unless given.")
]
Causal = Annotated[bool, typer.Option("--causal", help="No query sees a later key.")]
Window = Annotated[
    str,
    typer.Option("--window", metavar="L,R", show_default=False, help="Keys seen before and after; -1: all."),
]
Varlen = Annotated[bool, typer.Option("--varlen", help="Packed sequences with offsets.")]
ValueDim = Annotated[
    int | None,
    typer.Option("--head-dim-v", metavar="N", min=1, help="Head dim of the value, if it is another."),
]
Deterministic = Annotated[bool, typer.Option("--deterministic", help="With deterministic algorithms on.")]
Backward = Annotated[bool, typer.Option("--backward/--no-backward", help="The gradients, too.")]
Backends = Annotated[
    list[str],
    typer.Option(
        "--backend", metavar="NAME", help="Only these, by comma or repeated; else all that run here."
    ),
]


def warmup(
    q: Queries,
    kv: Keys = [],  # noqa: B006 - typer makes a new list for each call
    device: Where = "",
    dtype: Dtypes = [],  # noqa: B006
    causal: Causal = False,
    window: Window = "-1,-1",
    varlen: Varlen = False,
    head_dim_v: ValueDim = None,
    deterministic: Deterministic = False,
    backward: Backward = True,
    backend: Backends = [],  # noqa: B006
    as_json: AsJson = False,
) -> None:
    """Run calls once, so that backends compile ahead.

    What a backend keeps on disk is there when the next program starts; the rest is only timed.
    """
    import_torch()
    place, asked = present_device("--device", device), names("--backend", backend)
    specs = [
        spec_of(
            *shapes, str(place), name, window, causal, head_dim_v, varlen=varlen, deterministic=deterministic
        )
        for shapes in pairs(q, kv)
        for name in names("--dtype", dtype) or ("bf16",)
    ]
    # A provider that talks while it compiles must not get into the JSON.
    with contextlib.redirect_stdout(sys.stderr):
        done, finished = _run(asked, place, specs, backward)
    if as_json:
        found = [call.to_dict() for call in done]
        print_json({"device": str(place), "finished": finished, "calls": found})
    else:
        _print(console(), done)
    if not finished:
        raise typer.Exit(INTERRUPTED)
    refused = bool(asked) and any(call.reason for call in done)
    if refused or any(call.failed for call in done) or all(call.seconds is None for call in done):
        raise typer.Exit(NOTHING_RUNS)


def pairs(queries: list[str], keys: list[str]) -> list[tuple[str, str]]:
    """Return each `--q` with its `--kv`."""
    from attnreg.errors import InvalidInputError

    if keys and len(keys) != len(queries):
        raise InvalidInputError(f"--kv: got {len(keys)}, expected none or one for each --q, {len(queries)}")
    return list(zip(queries, keys or queries, strict=True))


def _run(
    asked: tuple[str, ...], device: "torch.device", specs: "list[AttentionSpec]", backward: bool
) -> "tuple[list[FirstCall], bool]":
    """Run everything behind a progress bar; the second is False if that was broken off."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from attnreg.cli.first_calls import planned

    place, done = console(stderr=True), []
    columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    todo = planned(asked, device, specs, backward)
    try:
        with Progress(*columns, console=place, transient=True, disable=not place.is_terminal) as progress:
            task = progress.add_task("", total=len(todo))
            for call in todo:
                progress.update(task, description=f"{call.entry.name} {call.direction}")
                done.append(call.run(device))
                progress.update(task, advance=1)
    except KeyboardInterrupt:
        return done, False
    return done, True


def _print(place: "Console", done: "list[FirstCall]") -> None:
    for spec, calls in groupby(done, key=lambda call: call.spec):
        heading(place, f"{spec} on {spec.device}")
        table(place, ("backend", "direction", "seconds", ""), (_row(call) for call in calls))


def _row(call: "FirstCall") -> tuple[str, ...]:
    seconds = "-" if call.seconds is None else f"{call.seconds:.3f}"
    told = call.reason.partition("\n")[0]
    return (
        call.entry.name,
        call.direction,
        seconds.rjust(7),
        told if call.failed or not told else f"not run: {told}",
    )
