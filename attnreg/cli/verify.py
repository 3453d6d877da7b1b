"""`attnreg verify`: every backend of this machine against a float64 reference, case by case."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnreg.cli import options, output
from attnreg.cli.options import valued
from attnreg.errors import InvalidInputError

if TYPE_CHECKING:
    import torch

    from attnreg.contract.discovery import Entry
    from attnreg.measure import Case, Error, Outcome

TENSORS = ("out", "lse", "dq", "dk", "dv")
LEGEND = """\
numbers: the largest error, divided by that of plain PyTorch in the same dtype;
         not divided where PyTorch's error is 0
WRONG:   the error exceeds twice PyTorch's plus the rounding error of the dtype"""


def verify(
    backend: options.Backends = [],  # noqa: B006 - typer makes a new list for each call
    device: options.DeviceHere = "",
    dtype: Annotated[
        list[str],
        valued("--dtype", "DTYPES", "One or several with commas. Default: bf16, with --full all."),
    ] = [],  # noqa: B006
    full: Annotated[
        bool, typer.Option("--full/--quick", help="All cases, some of which take seconds each.")
    ] = False,
    case: Annotated[str, valued("--case", "TEXT", "Only the cases with this text in their name.")] = "",
    as_json: options.AsJson = False,
) -> None:
    """Check every backend against a float64 reference.

    A backend is wrong in a case if its error exceeds twice the error of plain PyTorch in the same
    dtype, plus the rounding error of that dtype. The exit code is 1 if any is wrong.

    Example: attnreg verify --backend FA2,cuDNN --dtype fp16
    """
    output.import_torch()
    from attnreg import measure

    place, named = options.present_device(device), options.names("--backend", backend)
    with output.stdout_to_stderr():
        cases = _cases(full, options.names("--dtype", dtype), case)
        tested: list[tuple[Entry, str, list[Outcome]]] = [
            (entry, reason, []) for entry, reason in options.candidates(named, place)
        ]
        running = [(one.backend, outcomes) for one, reason, outcomes in tested if one.backend and not reason]
        finished = False
        with contextlib.suppress(KeyboardInterrupt), output.progress(len(running) * len(cases)) as update:
            for kernels, outcomes in running:
                update(description=kernels.name)
                for outcome in measure.verify(kernels, place, cases):
                    outcomes.append(outcome)  # is kept if the next case is interrupted
                    update(advance=1, description=f"{kernels.name} {outcome.case}")
            finished = True
    found = [_data(*one) for one in tested]
    if as_json:
        data = {"device": str(place), "cases": len(cases), "finished": finished, "backends": found}
        output.print_json(data)
    else:
        _print(found, place)
    if not finished:
        raise typer.Exit(output.INTERRUPTED)
    missing = bool(named) and any(one["reason"] for one in found)
    if missing or not any(one["rows"] for one in found) or any(one["wrong"] for one in found):
        raise typer.Exit(output.FAILED)


def _cases(full: bool, dtypes: tuple[str, ...], text: str) -> list[Case]:
    from attnreg.measure import CASES, QUICK

    wanted = [options.dtype_name(name) for name in dtypes] or ([] if full else ["bfloat16"])
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


def _data(entry: Entry, reason: str, outcomes: list[Outcome]) -> dict[str, Any]:
    """Return the outcomes of a backend, or the reason why it wasn't run, as plain data."""
    errors = [
        (error.ratio, tensor, str(outcome.case))
        for outcome in outcomes
        for tensor, error in outcome.errors.items()
        if error.math or not error.passed
    ]
    ratio, tensor, case = max(errors, key=lambda error: error[0], default=(0.0, "", ""))
    rows = [_row_data(outcome) for outcome in outcomes]
    states = [row["state"] for row in rows]
    return {
        "name": entry.name,
        "version": entry.version(),
        "reason": reason,
        **{state: states.count(state) for state in ("right", "wrong", "skipped")},
        "worst": {"ratio": output.finite(ratio), "tensor": tensor, "case": case} if errors else None,
        "rows": rows,
    }


def _row_data(outcome: Outcome) -> dict[str, Any]:
    def numbers(error: Error) -> dict[str, Any]:
        named = {"error": error.kernel, "math": error.math, "allowed": error.allowed, "ratio": error.ratio}
        return {"passed": error.passed, **{name: output.finite(number) for name, number in named.items()}}

    refused = not outcome.errors and not outcome.failure
    return {
        "case": outcome.case.name,
        "dtype": outcome.case.dtype,
        "state": "skipped" if refused else "right" if outcome.passed else "wrong",
        "reasons": list(outcome.reasons),
        "failure": outcome.failure,
        "errors": {tensor: numbers(error) for tensor, error in outcome.errors.items()},
    }


def _print(found: list[dict[str, Any]], device: torch.device) -> None:
    for backend in found:
        ran = [row for row in backend["rows"] if row["state"] != "skipped"]
        for dtype, outcomes in groupby(ran, key=lambda row: row["dtype"]):
            rows = (line for row in outcomes for line in _lines(row))
            output.table(f"{backend['name']} on {device}, {dtype}", rows, ("case", *TENSORS, ""))
    headers = ("backend", "right", "wrong", "skipped", "worst", "where")
    output.table("Summary", map(_summary, found), headers)
    output.console().print(LEGEND)


def _lines(row: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    ratios = (_ratio(row["errors"].get(tensor)) for tensor in TENSORS)
    yield row["case"], *ratios, "WRONG" if row["state"] == "wrong" else row["state"]
    if row["failure"]:
        yield (row["failure"].partition("\n")[0], *("" for _ in TENSORS), "")


def _ratio(error: dict[str, Any] | None) -> str:
    if error is None:
        return "-"
    if error["error"] is None:
        return "NaN"
    return f"{error['error']:.0e}" if error["ratio"] is None else f"{error['ratio']:.2f}"


def _summary(backend: dict[str, Any]) -> tuple[str, ...]:
    if backend["reason"]:
        return backend["name"], "", "", "", "", f"not run: {backend['reason']}"
    counts = (str(backend[state]) for state in ("right", "wrong", "skipped"))
    worst = backend["worst"]
    if worst is None:
        return backend["name"], *counts, "-", ""
    ratio = "inf" if worst["ratio"] is None else f"{worst['ratio']:.2f}"
    return backend["name"], *counts, ratio, f"{worst['tensor']} of {worst['case']}"
