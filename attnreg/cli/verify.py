"""`attnreg verify`: every backend of this machine against a float64 reference, case by case."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from attnreg.cli.backends import candidates
from attnreg.cli.errors import FAILED, INTERRUPTED, import_torch
from attnreg.cli.options import AsJson, Backends, DeviceHere, dtype_name, names, present_device
from attnreg.cli.output import console, finite, heading, print_json, progress, stdout_to_stderr, table

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch
    from rich.console import Console

    from attnreg.contract.discovery import Entry
    from attnreg.measure import Case, Error, Outcome

TENSORS = ("out", "lse", "dq", "dk", "dv")
LEGEND = """\
numbers: the largest error, divided by that of plain PyTorch in the same dtype;
         not divided where PyTorch's error is 0
WRONG:   the error exceeds twice PyTorch's plus the rounding error of the dtype"""

Dtypes = Annotated[
    list[str],
    typer.Option(
        "--dtype",
        metavar="DTYPES",
        help="One or several with commas. Default: bf16, with --full all.",
    ),
]
Full = Annotated[bool, typer.Option("--full/--quick", help="All cases, some of which take seconds each.")]
CaseText = Annotated[
    str, typer.Option("--case", metavar="TEXT", help="Only the cases with this text in their name.")
]


def verify(
    backend: Backends = [],  # noqa: B006 - typer makes a new list for each call
    device: DeviceHere = "",
    dtype: Dtypes = [],  # noqa: B006
    full: Full = False,
    case: CaseText = "",
    as_json: AsJson = False,
) -> None:
    """Check every backend against a float64 reference.

    A backend is wrong in a case if its error exceeds twice the error of plain PyTorch in the same
    dtype, plus the rounding error of that dtype. The exit code is 1 if any is wrong.

    Example: attnreg verify --backend FA2,cuDNN --dtype fp16
    """
    import_torch()
    place, named = present_device("--device", device), names("--backend", backend)
    with stdout_to_stderr():
        cases = _cases(full, names("--dtype", dtype), case)
        results = [BackendResult(*candidate) for candidate in candidates(named, place)]
        finished = _run(results, place, cases)
    if as_json:
        found = [result.to_dict() for result in results]
        print_json({"device": str(place), "cases": len(cases), "finished": finished, "backends": found})
    else:
        _print(console(), results, place)
    if not finished:
        raise typer.Exit(INTERRUPTED)
    ran = any(result.outcomes for result in results)
    missing = bool(named) and any(result.reason for result in results)
    if missing or not ran or any(result.count("WRONG") for result in results):
        raise typer.Exit(FAILED)


class Worst(NamedTuple):
    """The largest error, divided by that of plain PyTorch, and where it was."""

    ratio: float
    tensor: str
    case: str


@dataclass(slots=True)
class BackendResult:
    """A backend and the outcomes of its cases so far.

    Attributes:
        entry: the backend.
        reason: why no case is run; empty if they are.
        outcomes: one for each case, those included that the backend refuses.
    """

    entry: Entry
    reason: str = ""
    outcomes: list[Outcome] = field(default_factory=list)

    def run(self, device: torch.device, cases: Iterable[Case]) -> Iterator[Outcome]:
        """Run the cases one by one; the outcomes so far are kept if that is interrupted."""
        from attnreg import measure

        if self.entry.backend is not None and not self.reason:
            for outcome in measure.verify(self.entry.backend, device, cases):
                self.outcomes.append(outcome)
                yield outcome

    def count(self, wanted: str) -> int:
        """Return how many cases are "right", "WRONG" or "skipped"."""
        return sum(state(outcome) == wanted for outcome in self.outcomes)

    @property
    def worst(self) -> Worst | None:
        """The worst error, or None where nothing was measured."""
        found = (
            Worst(error.ratio, tensor, str(outcome.case))
            for outcome in self.outcomes
            for tensor, error in outcome.errors.items()
            if error.math or not error.passed
        )
        return max(found, key=lambda worst: worst.ratio, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Return the same as plain data, for JSON."""
        worst = self.worst
        return {
            "name": self.entry.name,
            "version": self.entry.version(),
            "reason": self.reason,
            "right": self.count("right"),
            "wrong": self.count("WRONG"),
            "skipped": self.count("skipped"),
            "worst": None if worst is None else {**worst._asdict(), "ratio": finite(worst.ratio)},
            "rows": [_data(outcome) for outcome in self.outcomes],
        }


def state(outcome: Outcome) -> str:
    """Return "right", "WRONG", or "skipped" for a case that the backend refuses."""
    if not outcome.errors and not outcome.failure:
        return "skipped"
    return "right" if outcome.passed else "WRONG"


def _cases(full: bool, dtypes: tuple[str, ...], text: str) -> list[Case]:
    from attnreg.errors import InvalidInputError
    from attnreg.measure import CASES, QUICK

    wanted = [dtype_name("--dtype", name) for name in dtypes] or ([] if full else ["bfloat16"])
    of_dtype = [case for case in (CASES if full else QUICK) if not wanted or case.dtype in wanted]
    if not of_dtype:
        known = ", ".join(dict.fromkeys(case.dtype for case in CASES))
        raise InvalidInputError(f"--dtype: got {','.join(dtypes)!r}, expected one of {known}")
    found = [case for case in of_dtype if text.casefold() in case.name]
    if not found:
        raise InvalidInputError(
            f"--case: got {text!r}, expected a part of a case's name, such as {of_dtype[0].name!r}"
        )
    return found


def _run(results: list[BackendResult], device: torch.device, cases: list[Case]) -> bool:
    """Run all cases behind a progress bar; False if that was interrupted."""
    running = [result for result in results if not result.reason]
    try:
        with progress(len(running) * len(cases)) as update:
            for result in running:
                update(description=result.entry.name)
                for outcome in result.run(device, cases):
                    update(advance=1, description=f"{result.entry.name} {outcome.case}")
    except KeyboardInterrupt:
        return False
    return True


def _data(outcome: Outcome) -> dict[str, Any]:
    def numbers(error: Error) -> dict[str, Any]:
        named = {"error": error.kernel, "math": error.math, "allowed": error.allowed, "ratio": error.ratio}
        return {"passed": error.passed, **{name: finite(number) for name, number in named.items()}}

    return {
        "case": outcome.case.name,
        "dtype": outcome.case.dtype,
        "state": state(outcome).lower(),
        "reasons": list(outcome.reasons),
        "failure": outcome.failure,
        "errors": {tensor: numbers(error) for tensor, error in outcome.errors.items()},
    }


def _print(place: Console, results: list[BackendResult], device: torch.device) -> None:
    for result in results:
        ran = [outcome for outcome in result.outcomes if state(outcome) != "skipped"]
        for dtype, outcomes in groupby(ran, key=lambda outcome: outcome.case.dtype):
            heading(place, f"{result.entry.name} on {device}, {dtype}")
            rows = (row for outcome in outcomes for row in _rows(outcome))
            table(place, ("case", *TENSORS, ""), rows)
    heading(place, "Summary")
    headers = ("backend", "right", "wrong", "skipped", "worst", "where")
    table(place, headers, (_summary(result) for result in results))
    place.print(LEGEND)


def _rows(outcome: Outcome) -> Iterator[tuple[str, ...]]:
    yield outcome.case.name, *(_ratio(outcome.errors.get(tensor)) for tensor in TENSORS), state(outcome)
    if outcome.failure:
        yield (outcome.failure.partition("\n")[0], *("" for _ in TENSORS), "")


def _ratio(error: Error | None) -> str:
    if error is None:
        return "-"
    if math.isinf(error.kernel):
        return "NaN"
    return f"{error.ratio:.2f}" if error.math or not error.kernel else f"{error.kernel:.0e}"


def _summary(result: BackendResult) -> tuple[str, ...]:
    if result.reason:
        return result.entry.name, "", "", "", "", f"not run: {result.reason}"
    counts = (str(result.count(wanted)) for wanted in ("right", "WRONG", "skipped"))
    worst = result.worst
    if worst is None:
        return result.entry.name, *counts, "-", ""
    return result.entry.name, *counts, f"{worst.ratio:.2f}", f"{worst.tensor} of {worst.case}"
