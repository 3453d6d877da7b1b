"""`attnreg verify`: every backend of this machine against a float64 reference, case by case."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnreg.cli import output
from attnreg.cli.backends import candidates
from attnreg.cli.options import AsJson, Backends, DeviceHere, dtype_name, names, present_device, valued
from attnreg.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from attnreg.contract.discovery import Entry
    from attnreg.measure import Case, Error, Outcome

TENSORS = ("out", "lse", "dq", "dk", "dv")
STATES = ("right", "WRONG", "skipped")
LEGEND = """\
numbers: the largest error, divided by that of plain PyTorch in the same dtype;
         not divided where PyTorch's error is 0
WRONG:   the error exceeds twice PyTorch's plus the rounding error of the dtype"""

Dtypes = Annotated[
    list[str], valued("--dtype", "DTYPES", "One or several with commas. Default: bf16, with --full all.")
]
Full = Annotated[bool, typer.Option("--full/--quick", help="All cases, some of which take seconds each.")]
CaseText = Annotated[str, valued("--case", "TEXT", "Only the cases with this text in their name.")]


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
    output.import_torch()
    from attnreg import measure

    place, named = present_device(device), names("--backend", backend)
    with output.stdout_to_stderr():
        cases = _cases(full, names("--dtype", dtype), case)
        results = [BackendResult(*candidate) for candidate in candidates(named, place)]
        running = [(one, one.entry.backend) for one in results if one.entry.backend and not one.reason]
        finished = False
        with contextlib.suppress(KeyboardInterrupt), output.progress(len(running) * len(cases)) as update:
            for result, tested in running:
                update(description=tested.name)
                for outcome in measure.verify(tested, place, cases):
                    result.outcomes.append(outcome)  # is kept if the next case is interrupted
                    update(advance=1, description=f"{tested.name} {outcome.case}")
            finished = True
    if as_json:
        found = [result.to_dict() for result in results]
        output.print_json(
            {"device": str(place), "cases": len(cases), "finished": finished, "backends": found}
        )
    else:
        _print(results, place)
    if not finished:
        raise typer.Exit(output.INTERRUPTED)
    ran = any(result.outcomes for result in results)
    missing = bool(named) and any(result.reason for result in results)
    if missing or not ran or any(result.counts["WRONG"] for result in results):
        raise typer.Exit(output.FAILED)


@dataclass(slots=True)
class BackendResult:
    """A backend and the outcomes of its cases so far, those included that it refuses."""

    entry: Entry
    reason: str = ""  # why no case is run
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        """How many cases are in each of `STATES`."""
        found = [_state(outcome) for outcome in self.outcomes]
        return {name: found.count(name) for name in STATES}

    @property
    def worst(self) -> tuple[float, str, str] | None:
        """The largest error divided by PyTorch's, the tensor and the case; None if nothing was measured."""
        found = (
            (error.ratio, tensor, str(outcome.case))
            for outcome in self.outcomes
            for tensor, error in outcome.errors.items()
            if error.math or not error.passed
        )
        return max(found, key=lambda worst: worst[0], default=None)

    def to_dict(self) -> dict[str, Any]:
        """Return the same as plain data, for JSON."""
        worst = self.worst
        return {
            "name": self.entry.name,
            "version": self.entry.version(),
            "reason": self.reason,
            **{name.lower(): number for name, number in self.counts.items()},
            "worst": worst and {"ratio": output.finite(worst[0]), "tensor": worst[1], "case": worst[2]},
            "rows": [_data(outcome) for outcome in self.outcomes],
        }


def _state(outcome: Outcome) -> str:
    """Return which of `STATES` a case is in: "skipped" if the backend refuses it."""
    if not outcome.errors and not outcome.failure:
        return "skipped"
    return "right" if outcome.passed else "WRONG"


def _cases(full: bool, dtypes: tuple[str, ...], text: str) -> list[Case]:
    from attnreg.measure import CASES, QUICK

    wanted = [dtype_name(name) for name in dtypes] or ([] if full else ["bfloat16"])
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


def _data(outcome: Outcome) -> dict[str, Any]:
    def numbers(error: Error) -> dict[str, Any]:
        named = {"error": error.kernel, "math": error.math, "allowed": error.allowed, "ratio": error.ratio}
        return {"passed": error.passed, **{name: output.finite(number) for name, number in named.items()}}

    return {
        "case": outcome.case.name,
        "dtype": outcome.case.dtype,
        "state": _state(outcome).lower(),
        "reasons": list(outcome.reasons),
        "failure": outcome.failure,
        "errors": {tensor: numbers(error) for tensor, error in outcome.errors.items()},
    }


def _print(results: list[BackendResult], device: torch.device) -> None:
    for result in results:
        ran = [outcome for outcome in result.outcomes if _state(outcome) != "skipped"]
        for dtype, outcomes in groupby(ran, key=lambda outcome: outcome.case.dtype):
            rows = (row for outcome in outcomes for row in _rows(outcome))
            output.table(f"{result.entry.name} on {device}, {dtype}", rows, ("case", *TENSORS, ""))
    headers = ("backend", "right", "wrong", "skipped", "worst", "where")
    output.table("Summary", (_summary(result) for result in results), headers)
    output.console().print(LEGEND)


def _rows(outcome: Outcome) -> Iterator[tuple[str, ...]]:
    yield outcome.case.name, *(_ratio(outcome.errors.get(tensor)) for tensor in TENSORS), _state(outcome)
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
    counts = map(str, result.counts.values())
    if result.worst is None:
        return result.entry.name, *counts, "-", ""
    ratio, tensor, case = result.worst
    return result.entry.name, *counts, f"{ratio:.2f}", f"{tensor} of {case}"
