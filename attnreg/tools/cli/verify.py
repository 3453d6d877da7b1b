"""`attnreg verify`: every backend of this machine against a float64 reference, case by case."""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
from collections.abc import Collection, Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnreg.errors import BuildError, InvalidInputError
from attnreg.tools.cli import options, output
from attnreg.tools.cli.options import valued

if TYPE_CHECKING:
    import torch

    from attnreg.core.registry.entry import Entry
    from attnreg.testing import Check, Conformance, Outcome
    from attnreg.tools.measure import Error

DTYPES = ("bfloat16", "float16", "float32", "float64")
# Failures that say nothing of a kernel: later checks in the process fail, too.
_OF_DEVICE = re.compile(r"MemoryError|out of memory|can't allocate|CUDA error: (?!no kernel image)")
FEW = 8  # cases and reasons: so many are shown though nothing is wrong
TENSORS = ("out", "lse", "dq", "dk", "dv")
FURTHER = ("dsinks", "dbias")  # shown where a case has it
LEGEND = """\
numbers: the largest error, divided by that of plain PyTorch in the same dtype;
         not divided where PyTorch's error is 0; - where nothing was computed
right:   no error exceeds twice PyTorch's plus the rounding error of the dtype:
         so a number above 2 can be right, where PyTorch's error is small
WRONG:   an error exceeds that, or more is wrong: what, and where, is above
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
    case: Annotated[
        str,
        valued("--case", "TEXT", "Only the case of this name, or the cases with this text in their name."),
    ] = "",
    seed: Annotated[
        int, valued("--seed", "N", "The seed of the values and of the random cases.", show_default=True)
    ] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but what is wrong.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print the right cases, too.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Check every backend against a float64 reference.

    A backend may have twice the error of plain PyTorch in the same dtype (three times with a softcap), plus
    the rounding error of that dtype. With a larger error it is wrong in this case. It is also wrong if it
    breaks the contract in another way, such as by writing to its inputs. The exit code is 1 if a backend is
    wrong, never runs something that it declares, or is named and can't run here.

    For each wrong case the output says where: the first wrong element, how many, which rows and heads, and
    which rows see no key. It has the command that repeats this case alone.

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
    if finished and not (dtype or case or seed):  # all that a kernel from the hub is verified by
        with output.stdout_to_stderr():
            for (entry, _, kit, _), data in zip(tested, backends, strict=True):
                _remember(entry, kit, data)
    if as_json:
        count = max((len(checks) for _, checks, _ in running), default=0)
        data = {"device": str(place), "cases": count, "finished": finished, "backends": backends}
        output.print_json(data)
    elif quiet:
        _print_wrong(backends, named)
    else:
        _print(backends, place, sum(len(data["rows"]) for data in backends) if verbose else FEW)
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


def _remember(entry: Entry, kit: Conformance | None, data: dict[str, Any]) -> None:
    """Write down what came of all checks of a kernel from the hub, which serves if nothing is wrong."""
    from attnreg.core.dispatch.planning import device_of
    from attnreg.core.registry.sourced import SourcedEntry

    if kit is None or not isinstance(entry, SourcedEntry):
        return
    ran = [row for row in data["rows"] if row["state"] != "skipped"]
    wrong = [row for row in ran if row["state"] == "wrong"]
    # The kernel may be right all the same: the device was full, or has failed.
    if faults := [row["failure"] for row in wrong if _OF_DEVICE.search(row["failure"])]:
        first_line = faults[0].partition("\n")[0]
        typer.echo(f"{entry.name}: nothing is noted, as the device failed: {first_line}", err=True)
        return
    what = "" if ran else "no check could be run"
    if wrong:
        first = wrong[0]
        failure = first["failure"].partition("\n")[0] or "; ".join(_places(first))
        what = (
            f"{len(wrong)} of {len(ran)} checks are wrong, first {first['case']}, {first['dtype']}: {failure}"
        )
    elif data["never_ran"]:
        what = data["never_ran"][0]
    try:
        entry.remember(device_of(kit.device), len(ran), what)
    except OSError as error:
        typer.echo(f"{entry.name}: the result can't be noted for other programs: {error}", err=True)


def _checks(kit: Conformance, text: str) -> list[Check]:
    """Return the checks of a backend that `--case` selects."""
    if unknown := [dtype for dtype in kit.dtypes if dtype not in DTYPES]:
        raise InvalidInputError(f"--dtype: got {','.join(unknown)!r}, expected one of {', '.join(DTYPES)}")
    folded = text.casefold()
    checks = [check for check in kit.checks if folded in (check.name.casefold(), str(check).casefold())]
    checks = checks or [check for check in kit.checks if folded in str(check).casefold()]
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
        "compiled": _compiled(entry),
        "reason": reason,
        **{state: states.count(state) for state in ("right", "wrong", "skipped")},
        "worst": {"ratio": output.finite(ratio), "tensor": tensor, "case": case} if errors else None,
        "refused": dict(report.refused.most_common()) if report else {},
        "never_ran": list(report.never_ran) if report else [],
        "notes": list(report.notes) if report else [],
        "rows": rows,
    }


def _compiled(entry: Entry) -> dict[str, Any] | None:
    """Return which compiled kernel the cases of a backend could run on; None if it has none of attnreg's."""
    from attnreg.core.torchlib import building

    if entry.name != building.CPU_KERNEL.backend:
        return None
    state, file, reason = building.status(building.CPU_KERNEL)
    try:
        used = building.instructions()
    except BuildError as error:
        return {"state": state, "file": None, "instructions": None, "reason": reason or str(error)}
    return {"state": state, "file": str(file), "instructions": used, "reason": reason}


def _row_data(kit: Conformance, outcome: Outcome) -> dict[str, Any]:
    def numbers(error: Error) -> dict[str, Any]:
        named = {"error": error.kernel, "math": error.math, "allowed": error.allowed, "ratio": error.ratio}
        finite = {name: output.finite(number) for name, number in named.items()}
        return {"passed": error.passed, **finite, "nan": error.has_nan, "place": error.place}

    case, dtype = outcome.check.name, outcome.case.dtype
    where = (
        f"--backend {shlex.quote(kit.backend.name)} --device {kit.device} --dtype {dtype} --seed {kit.seed}"
    )
    full = " --full" if outcome.case.heavy else ""
    is_module = Path(sys.argv[0]).parts[-2:] == ("attnreg", "__main__.py")
    command = "python -m attnreg" if is_module else "attnreg"
    return {
        "case": case,
        "dtype": dtype,
        "shapes": outcome.case.shapes,
        "state": "skipped" if outcome.refused else "right" if outcome.passed else "wrong",
        "reasons": list(outcome.reasons),
        "failure": outcome.failure,
        "repeat": "" if outcome.passed else f"{command} verify {where}{full} --case {shlex.quote(case)}",
        "errors": {tensor: numbers(error) for tensor, error in outcome.errors.items()},
    }


def _print(backends: list[dict[str, Any]], device: torch.device, most: int) -> None:
    """Print all outcomes; of what is right, and of the reasons, at most so many rows a backend."""
    explained = False
    for backend in backends:
        ran = [row for row in backend["rows"] if row["state"] != "skipped"]
        shown = ran if len(ran) <= most else [row for row in ran if row["state"] == "wrong"]
        explained = explained or bool(shown)
        for dtype, grouped in groupby(shown, key=lambda row: row["dtype"]):
            rows = list(grouped)
            further = (name for name in FURTHER if any(name in row["errors"] for row in rows))
            tensors = (*TENSORS, *further)
            lines = [_line(row, tensors) for row in rows]
            output.table(f"{backend['name']} on {device}, {dtype}", lines, ("case", *tensors, ""))
    skipped = [row for backend in backends for row in _skipped(backend, most)]
    if skipped:
        output.table("Not run", skipped, ("backend", "cases", "because"))
    _print_wrong(backends)
    for backend in backends:
        for text in backend["notes"]:
            typer.echo(f"note: {backend['name']}: {text}\n")
    for data in backends:
        if compiled := data["compiled"]:
            used, file = compiled["instructions"], compiled["file"]
            text = (
                f"{compiled['state']}; instructions: {used}; {file}"
                if used
                else f"none: {compiled['reason']}"
            )
            output.table("Compiled kernel", [(data["name"], text)])
    headers = ("backend", "right", "wrong", "skipped", "worst", "where")
    if all(data["reason"] for data in backends):
        output.table("Not run", ((data["name"], data["reason"]) for data in backends), ("backend", "why"))
    else:
        output.table("Summary", map(_summary, backends), headers)
    if explained:
        output.console().print(LEGEND)
    if any(len(data["rows"]) > most for data in backends):
        output.console().print("Right cases aren't shown: --verbose prints them.")


def _skipped(backend: dict[str, Any], most: int) -> Iterator[tuple[str, str, str]]:
    """Yield rows about what wasn't run, the most frequent reasons first."""
    reasons = list(backend["refused"].items())
    for reason, count in reasons[:most]:
        yield backend["name"], str(count), reason
    if further := reasons[most:]:
        count = sum(number for _, number in further)
        yield backend["name"], str(count), f"{len(further)} further reasons, which --verbose shows"


def _print_wrong(backends: list[dict[str, Any]], named: Collection[str] = ()) -> None:
    """Print where each wrong case is wrong and what repeats it, unwrapped; and which of `named` can't run."""
    for backend in backends:
        if named and backend["reason"]:
            typer.echo(f"{backend['name']} not run: {backend['reason']}")
        for row in backend["rows"]:
            if row["state"] == "wrong":
                failure = row["failure"].partition("\n")[0]
                heading = f"WRONG: {backend['name']}, {row['case']}, {row['dtype']}: {row['shapes']}"
                lines = heading, failure, *_places(row), f"repeat: {row['repeat']}\n"
                typer.echo("\n  ".join(filter(None, lines)))
        for text in backend["never_ran"]:
            typer.echo(f"WRONG: {backend['name']}: {text}\n")


def _places(row: dict[str, Any]) -> Iterator[str]:
    for tensor, error in row["errors"].items():
        if not error["passed"]:
            got = _number(error["error"], error["nan"])
            yield f"{tensor}: error {got}, allowed {error['allowed']:.3g}; {error['place']}"


def _line(row: dict[str, Any], tensors: tuple[str, ...]) -> tuple[str, ...]:
    ratios = (_ratio(row["errors"].get(tensor)) for tensor in tensors)
    return row["case"], *ratios, "WRONG" if row["state"] == "wrong" else row["state"]


def _ratio(error: dict[str, Any] | None) -> str:
    if error is None:
        return "-"
    if error["error"] is None:
        return _number(None, error["nan"])
    return f"{error['error']:.0e}" if error["ratio"] is None else f"{error['ratio']:.2f}"


def _number(error: float | None, is_nan: bool) -> str:
    """Return an error as text; None stands for an infinite error or for a NaN."""
    return ("NaN" if is_nan else "inf") if error is None else f"{error:.3g}"


def _summary(backend: dict[str, Any]) -> tuple[str, ...]:
    if backend["reason"]:
        return backend["name"], "-", "-", "-", "-", f"not run: {backend['reason']}"
    counts = (str(backend[state]) for state in ("right", "wrong", "skipped"))
    worst = backend["worst"]
    if worst is None:
        return backend["name"], *counts, "-", ""
    ratio = "inf" if worst["ratio"] is None else f"{worst['ratio']:.2f}"
    return backend["name"], *counts, ratio, f"{worst['tensor']} of {worst['case']}"
