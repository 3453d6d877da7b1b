"""`attnreg verify`: every backend of this machine against a float64 reference, case by case."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnreg.errors import InvalidInputError
from attnreg.tools.cli import options, output
from attnreg.tools.cli.options import valued

if TYPE_CHECKING:
    import torch

    from attnreg.core.registry.entry import Entry
    from attnreg.testing import Check, Conformance, Outcome
    from attnreg.tools.measure import Error

DTYPES = ("bfloat16", "float16", "float32", "float64")
REPEATS = 5  # so many commands that repeat what is wrong are shown
TENSORS = ("out", "lse", "dq", "dk", "dv")
OF_SINKS = "dsinks"  # shown where a case has it
LEGEND = """\
numbers: the largest error, divided by that of plain PyTorch in the same dtype;
         not divided where PyTorch's error is 0; - where nothing was computed
right:   no error exceeds twice PyTorch's plus the rounding error of the dtype:
         so a number above 2 can be right, where PyTorch's error is small
WRONG:   an error exceeds that, or the next line says what else is wrong
drawn:   cases drawn from what the backend declares; --seed N draws others"""


def verify(
    backend: options.Backends = [],  # noqa: B006 - typer makes a new list for each call
    device: options.DeviceHere = "",
    dtype: Annotated[
        list[str],
        valued(
            "--dtype",
            "DTYPES",
            "One or several with commas. Default: the first of bf16, fp16, fp32 and fp64 that is declared; "
            "for random cases, and with --full, all that are declared.",
        ),
    ] = [],  # noqa: B006
    full: Annotated[
        bool, typer.Option("--full/--quick", help="Whether to run cases that take seconds or gigabytes, too.")
    ] = False,
    case: Annotated[str, valued("--case", "TEXT", "Only the cases with this text in their name.")] = "",
    seed: Annotated[
        int, valued("--seed", "N", "The seed of the values and of the random cases.", show_default=True)
    ] = 0,
    as_json: options.AsJson = False,
) -> None:
    """Check every backend against a float64 reference.

    A backend is wrong in a case if its error exceeds twice the error of plain PyTorch in the same dtype,
    plus the rounding error of that dtype. It is also wrong if it breaks the contract in another way, such as
    by writing to its inputs. The exit code is 1 if a backend is wrong, never runs something that it declares,
    or is named and can't run here.

    Example: attnreg verify --backend FA2,cuDNN --dtype fp16
    """
    output.import_torch()
    from attnreg.testing import Conformance

    place, named = options.present_device(device), options.names("--backend", backend)
    with output.stdout_to_stderr():
        wanted = tuple(options.dtype_name(name) for name in options.names("--dtype", dtype))
        tested: list[tuple[Entry, str, Conformance | None, list[Outcome]]] = []
        for entry, reason in options.candidates(named, place):
            runs = entry.backend is not None and not reason
            kit = (
                Conformance(entry.backend, place, wanted, seed, full=full) if runs and entry.backend else None
            )
            tested.append((entry, reason, kit, []))
        running = [(kit, _checks(kit, case), outcomes) for _, _, kit, outcomes in tested if kit]
        finished = _run(running)
    backends = [_data(*arguments) for arguments in tested]
    if as_json:
        count = max((len(checks) for _, checks, _ in running), default=0)
        data = {"device": str(place), "cases": count, "finished": finished, "backends": backends}
        output.print_json(data)
    else:
        _print(backends, place)
    if not finished:
        raise typer.Exit(output.INTERRUPTED)
    missing = bool(named) and any(row["reason"] for row in backends)
    wrong = any(row["wrong"] or row["never_ran"] for row in backends)
    if missing or wrong or not any(row["rows"] for row in backends):
        raise typer.Exit(output.FAILED)


def _run(running: list[tuple[Conformance, list[Check], list[Outcome]]]) -> bool:
    """Add the outcome of every check to its list; returns whether it came to the end."""
    total = sum(len(checks) for _, checks, _ in running)
    with contextlib.suppress(KeyboardInterrupt), output.progress(total) as update:
        for kit, checks, outcomes in running:
            for check in checks:
                update(description=f"{kit.backend.name} {check}")
                outcomes.append(kit.run(check))
                update(advance=1)
        return True
    return False


def _checks(kit: Conformance, text: str) -> list[Check]:
    """Return the checks of a backend that `--case` selects."""
    if unknown := [dtype for dtype in kit.dtypes if dtype not in DTYPES]:
        raise InvalidInputError(f"--dtype: got {','.join(unknown)!r}, expected one of {', '.join(DTYPES)}")
    checks = [check for check in kit.checks if text.casefold() in str(check).casefold()]
    if not checks:
        raise InvalidInputError(
            f"--case: got {text!r}, expected a part of a case's name, such as 'heads 4:2'"
        )
    return checks


def _data(entry: Entry, reason: str, kit: Conformance | None, outcomes: list[Outcome]) -> dict[str, Any]:
    """Return the outcomes of a backend, or the reason why it wasn't run, as plain data."""
    errors = [
        (error.ratio, tensor, str(outcome.check))
        for outcome in outcomes
        for tensor, error in outcome.errors.items()
        if error.math or not error.passed
    ]
    ratio, tensor, case = max(errors, key=lambda error: error[0], default=(0.0, "", ""))
    rows = [_row_data(kit, outcome) for outcome in outcomes if kit]
    states = [row["state"] for row in rows]
    report = kit.report(outcomes) if kit else None
    return {
        "name": entry.name,
        "version": entry.version(),
        "reason": reason,
        **{state: states.count(state) for state in ("right", "wrong", "skipped")},
        "worst": {"ratio": output.finite(ratio), "tensor": tensor, "case": case} if errors else None,
        "refused": dict(report.refused.most_common()) if report else {},
        "never_ran": list(report.never_ran) if report else [],
        "rows": rows,
    }


def _row_data(kit: Conformance, outcome: Outcome) -> dict[str, Any]:
    def numbers(error: Error) -> dict[str, Any]:
        named = {"error": error.kernel, "math": error.math, "allowed": error.allowed, "ratio": error.ratio}
        return {"passed": error.passed, **{name: output.finite(number) for name, number in named.items()}}

    case, dtype = str(outcome.check).removesuffix(f" {outcome.case.dtype}"), outcome.case.dtype
    where = (
        f"--backend {shlex.quote(kit.backend.name)} --device {kit.device} --dtype {dtype} --seed {kit.seed}"
    )
    return {
        "case": case,
        "dtype": dtype,
        "state": "skipped" if outcome.refused else "right" if outcome.passed else "wrong",
        "reasons": list(outcome.reasons),
        "failure": outcome.failure,
        "repeat": "" if outcome.passed else f"attnreg verify {where} --case {shlex.quote(case)}",
        "errors": {tensor: numbers(error) for tensor, error in outcome.errors.items()},
    }


def _print(backends: list[dict[str, Any]], device: torch.device) -> None:
    for backend in backends:
        ran = [row for row in backend["rows"] if row["state"] != "skipped"]
        for dtype, grouped in groupby(ran, key=lambda row: row["dtype"]):
            outcomes = list(grouped)
            tensors = (*TENSORS, *{OF_SINKS for row in outcomes if OF_SINKS in row["errors"]})
            rows = (line for row in outcomes for line in _lines(row, tensors))
            output.table(f"{backend['name']} on {device}, {dtype}", rows, ("case", *tensors, ""))
    skipped = [
        (backend["name"], str(count), reason)
        for backend in backends
        for reason, count in backend["refused"].items()
    ]
    if skipped:
        output.table("Not run", skipped, ("backend", "cases", "because"))
    never = [(backend["name"], "WRONG", text) for backend in backends for text in backend["never_ran"]]
    if never:
        output.table("Declared and never run", never, ("backend", "", "what"))
    headers = ("backend", "right", "wrong", "skipped", "worst", "where")
    output.table("Summary", map(_summary, backends), headers)
    repeats = [row["repeat"] for backend in backends for row in backend["rows"] if row["repeat"]]
    for command in repeats[:REPEATS]:
        output.console().print(f"repeat one: {command}")
    output.console().print(LEGEND)


def _lines(row: dict[str, Any], tensors: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    ratios = (_ratio(row["errors"].get(tensor)) for tensor in tensors)
    yield row["case"], *ratios, "WRONG" if row["state"] == "wrong" else row["state"]
    if row["failure"]:
        yield (row["failure"].partition("\n")[0], *("" for _ in tensors), "")


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
