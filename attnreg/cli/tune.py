"""`attnreg tune`: what each backend costs on this machine, as a table that decides by itself."""

import contextlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnreg.cli.explain import Causal, ValueDim, Varlen, Window
from attnreg.cli.failures import INTERRUPTED, NOTHING_RUNS
from attnreg.cli.output import AsJson, console, print_json
from attnreg.cli.parsing import names, present_device, seconds
from attnreg.cli.torch_first import import_torch
from attnreg.cli.warmup import Backends, Backward, Deterministic, Dtypes

if TYPE_CHECKING:
    from attnreg.contract.spec import AttentionSpec
    from attnreg.tuning.session import Session

__all__ = ["tune"]

Grid = Annotated[
    str, typer.Option("--grid", metavar="NAME", help="quick or full; quick if no calls are given.")
]
Queries = Annotated[
    list[str],
    typer.Option("--q", metavar="B,S,H,D", help="A call: batch, length, heads, head dim; repeated."),
]
Keys = Annotated[
    list[str], typer.Option("--kv", metavar="B,S,H,D", help="Its key and value, one for each --q.")
]
Trace = Annotated[
    Path | None,
    typer.Option("--from", metavar="FILE", help="The calls that attnreg.record or ATTNREG_RECORD wrote."),
]
Budget = Annotated[str, typer.Option("--budget", metavar="TIME", help="Stop in time: 60s, 5m; else all.")]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="The table; else named after the device.")
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Begin anew; else points that FILE has are kept.")]
Where = Annotated[
    str, typer.Option("--device", metavar="DEVICE", help="cpu, cuda or cuda:1; the GPU where there is one.")
]


def tune(
    grid: Grid = "",
    q: Queries = [],  # noqa: B006 - typer makes a new list for each call
    kv: Keys = [],  # noqa: B006
    trace: Trace = None,
    budget: Budget = "",
    out: Out = None,
    fresh: Fresh = False,
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
    """Measure what backends cost here, for attnreg to choose by.

    Each is held to float64 first; a wrong one is never chosen. The table is saved after every
    call, so whatever ends this early loses nothing.
    """
    began = time.monotonic()
    import_torch()
    place, longest = present_device("--device", device), seconds("--budget", budget)
    # A provider that talks while it compiles must not get into the JSON.
    with contextlib.redirect_stdout(sys.stderr):
        from attnreg.cli import tuned, tunings
        from attnreg.errors import InvalidInputError

        given = tunings.given(
            q, kv, place, names("--dtype", dtype), window, causal, head_dim_v,
            varlen=varlen, deterministic=deterministic, needs_backward=backward,
        )  # fmt: skip
        described = {
            "--dtype": dtype, "--causal": causal, "--window": window != "-1,-1", "--varlen": varlen,
            "--head-dim-v": head_dim_v, "--deterministic": deterministic,
        }  # fmt: skip
        if not q and (idle := [name for name, told in described.items() if told]):
            raise InvalidInputError(f"{' and '.join(idle)}: describes a call of --q, and there is none")
        specs = tunings.wanted(given, trace, grid, place, backward, out)
        session = tunings.begun(out, place, names("--backend", backend), fresh)
        end, told = _run(session, specs, began + longest)
    if as_json:
        print_json(tuned.summary(session, specs, end))
    else:
        tuned.show(console(), session, specs, end)
    if told:
        typer.echo(f"attnreg: {told}", err=True)
    if end == "interrupted":
        raise typer.Exit(INTERRUPTED)
    if told or not session.points:
        raise typer.Exit(NOTHING_RUNS)


def _run(session: "Session", specs: "list[AttentionSpec]", deadline: float) -> tuple[str, str]:
    """Measure behind a progress bar; return how it ended, and what has to be said of that."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from attnreg.cli import tunings
    from attnreg.tuning.failures import DeviceLostError

    place, done = console(stderr=True), 0
    columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    try:
        with Progress(*columns, console=place, transient=True, disable=not place.is_terminal) as progress:
            task = progress.add_task("what calls take the host", total=len(specs))
            tunings.measure_fronts(session)
            for spec in session.run(specs, deadline - time.monotonic()):
                done += 1
                progress.update(task, completed=done, description=_short(spec))
    except KeyboardInterrupt:
        return "interrupted", ""
    except DeviceLostError as error:
        return "stopped", f"{error}; what was measured before is in {session.out}"
    if done == len(specs):
        return "finished", ""
    nothing = "the time was spent before a single call was measured: give it more"
    return "budget spent", "" if session.points else nothing


def _short(spec: "AttentionSpec") -> str:
    return f"{spec.max_q} x {spec.max_k}, head dim {spec.head_dim}"
