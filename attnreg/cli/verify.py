"""`attnreg verify`: every backend of this machine against float64, case by case."""

import contextlib
import math
import sys
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer

from attnreg.cli.failures import INTERRUPTED
from attnreg.cli.output import AsJson, console, heading, print_json, table
from attnreg.cli.parsing import dtype_name, names, present_device
from attnreg.cli.torch_first import import_torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from rich.console import Console

    from attnreg.cli.verdicts import Verdict
    from attnreg.measure import Case, Error, Outcome

__all__ = ["verify"]

FAILED = 1
RULE = """\
numbers: error over plain PyTorch's in the same dtype; itself where that is 0
WRONG: more than twice that of plain PyTorch and the rounding of the result"""

Backends = Annotated[
    list[str],
    typer.Option(
        "--backend", metavar="NAME", help="Only these, by comma or repeated; else all that run here."
    ),
]
Where = Annotated[
    str, typer.Option("--device", metavar="DEVICE", help="cpu, cuda or cuda:1; the GPU where there is one.")
]
Dtypes = Annotated[
    list[str], typer.Option("--dtype", metavar="DTYPE", help="Only these; bf16 alone unless --full.")
]
Full = Annotated[bool, typer.Option("--full/--quick", help="All dtypes, and cases that take seconds each.")]
Only = Annotated[str, typer.Option("--case", metavar="TEXT", help="Only the cases with this in their name.")]


def verify(
    backend: Backends = [],  # noqa: B006 - typer makes a new list for each call
    device: Where = "",
    dtype: Dtypes = [],  # noqa: B006
    full: Full = False,
    case: Only = "",
    as_json: AsJson = False,
) -> None:
    """Hold backends to float64, case by case.

    A backend is wrong where its error is more than twice that of plain PyTorch in the same dtype,
    and more than rounding the result costs.
    """
    import_torch()
    place, asked = present_device("--device", device), names("--backend", backend)
    # A provider that talks while it compiles must not get into the JSON.
    with contextlib.redirect_stdout(sys.stderr):
        from attnreg.cli.verdicts import candidates

        cases, verdicts = _cases(full, names("--dtype", dtype), case), candidates(asked, place)
        finished = _run(verdicts, place, cases)
    if as_json:
        found = [verdict.to_dict() for verdict in verdicts]
        print_json({"device": str(place), "cases": len(cases), "finished": finished, "backends": found})
    else:
        _print(console(), verdicts, place)
    if not finished:
        raise typer.Exit(INTERRUPTED)
    ran = any(verdict.outcomes for verdict in verdicts)
    missing = bool(asked) and any(verdict.reason for verdict in verdicts)
    if missing or not ran or any(verdict.count("WRONG") for verdict in verdicts):
        raise typer.Exit(FAILED)


def _cases(full: bool, dtypes: tuple[str, ...], text: str) -> "list[Case]":
    from attnreg.errors import InvalidInputError
    from attnreg.measure import CASES, QUICK

    wanted = [dtype_name("--dtype", name) for name in dtypes] or ([] if full else ["bfloat16"])
    found = [
        case
        for case in (CASES if full else QUICK)
        if (not wanted or case.dtype in wanted) and text.casefold() in case.name
    ]
    if not found:
        raise InvalidInputError(
            f"--case: got {text!r}, expected a part of the name of one of {len(CASES)} cases"
        )
    return found


def _run(verdicts: "list[Verdict]", device: "torch.device", cases: "list[Case]") -> bool:
    """Run everything behind a progress bar; False if that was broken off."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    place = console(stderr=True)
    columns = (BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    try:
        with Progress(*columns, console=place, transient=True, disable=not place.is_terminal) as progress:
            running = [verdict for verdict in verdicts if not verdict.reason]
            task = progress.add_task("", total=len(running) * len(cases))
            for verdict in running:
                progress.update(task, description=verdict.entry.name)
                for outcome in verdict.run(device, cases):
                    progress.update(task, advance=1, description=f"{verdict.entry.name} {outcome.case}")
    except KeyboardInterrupt:
        return False
    return True


def _print(place: "Console", verdicts: "list[Verdict]", device: "torch.device") -> None:
    from attnreg.cli.verdicts import TENSORS, state

    for verdict in verdicts:
        ran = [outcome for outcome in verdict.outcomes if state(outcome) != "skipped"]
        for dtype, outcomes in groupby(ran, key=lambda outcome: outcome.case.dtype):
            heading(place, f"{verdict.entry.name} on {device}, {dtype}")
            rows = (row for outcome in outcomes for row in _rows(outcome, TENSORS, state(outcome)))
            table(place, ("case", *TENSORS, ""), rows)
    heading(place, "In sum")
    headers = ("backend", "right", "wrong", "skipped", "worst", "of")
    table(place, headers, (_summary(verdict) for verdict in verdicts))
    place.print(RULE)


def _rows(outcome: "Outcome", tensors: tuple[str, ...], state: str) -> "Iterator[tuple[str, ...]]":
    yield outcome.case.name, *(_ratio(outcome.errors.get(tensor)) for tensor in tensors), state
    if outcome.failure:
        yield (outcome.failure.partition("\n")[0], *("" for _ in tensors), "")


def _ratio(error: "Error | None") -> str:
    if error is None:
        return "-"
    if math.isinf(error.kernel):
        return "NaN"
    return f"{error.ratio:.2f}" if error.math or not error.kernel else f"{error.kernel:.0e}"


def _summary(verdict: "Verdict") -> tuple[str, ...]:
    if verdict.reason:
        return verdict.entry.name, "", "", "", "", f"not run: {verdict.reason}"
    counts = (str(verdict.count(state)) for state in ("right", "WRONG", "skipped"))
    worst = verdict.worst
    if worst is None:
        return verdict.entry.name, *counts, "-", ""
    return verdict.entry.name, *counts, f"{worst.ratio:.2f}", f"{worst.tensor} of {worst.case}"
