"""How exact each backend is: its largest error against float64 in units of plain PyTorch's in the same dtype.

    python benchmarks/accuracy.py [--quick] [--device D] [--backends A,B] [--dtypes A,B] [--json FILE]

Every backend is held to every case of `attnreg.measure`. For each dtype and tensor: the worst and
the geometric mean of error / error of PyTorch; the aim is 2 at most. Where rounding the result alone
costs more than PyTorch's own error, twice that rounding is allowed beside it, as in `attnreg verify`; "of
what is allowed" is the worst by that rule, and wrong above 1. What a backend refuses isn't run, and counted
with its reasons.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from attnreg.bench.report import save, show, show_machine
from attnreg.cli.backends import candidates
from attnreg.cli.verify import TENSORS, BackendResult, state
from attnreg.measure import CASES, QUICK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnreg.measure import Case, Outcome


def listed(text: str) -> tuple[str, ...]:
    """Return the parts of a list with commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def finite(number: float) -> float | None:
    """Return what JSON can hold."""
    return number if math.isfinite(number) else None


def summary(outcomes: Sequence[Outcome], tensor: str) -> dict[str, Any]:
    """Return the worst and the mean of one tensor's errors."""
    errors = [(o.errors[tensor], o.case.name) for o in outcomes if tensor in o.errors]
    # Where PyTorch makes no error at all there is no ratio: only the rule's allowance for rounding.
    ratios = [(error.ratio, case) for error, case in errors if error.math]
    used = [error.kernel / (error.allowed or math.ulp(0.0)) for error, _ in errors]
    positive = [ratio for ratio, _ in ratios if 0.0 < ratio < math.inf]
    worst, where = max(ratios, default=(0.0, ""))
    return {
        "tensor": tensor,
        "cases": len(errors),
        "worst": finite(worst),
        "worst_case": where,
        "above_2": sum(ratio > 2.0 for ratio, _ in ratios),
        "geometric_mean": statistics.geometric_mean(positive) if positive else None,
        "most_of_allowed": finite(max(used, default=0.0)),
        "wrong": sum(not error.passed for error, _ in errors),
    }


def wrong(verdict: BackendResult) -> list[dict[str, Any]]:
    """Return the wrong cases with what is wrong."""
    found = []
    for outcome in verdict.outcomes:
        if state(outcome) == "WRONG":
            failed = {name: str(error) for name, error in outcome.errors.items() if not error.passed}
            found.append({"case": str(outcome.case), "failure": outcome.failure, "errors": failed})
    return found


def refused(verdict: BackendResult) -> dict[str, int]:
    """Return reasons, without the numbers that were got, and how many cases each kept from a direction."""
    reasons = (reason for outcome in verdict.outcomes for reason in outcome.reasons)
    return dict(Counter(re.sub(r", got .*", "", reason) for reason in reasons).most_common())


def number(value: float | None, missing: str = "NaN") -> str:
    """Return a figure for a table."""
    return missing if value is None else f"{value:.2f}"


def report(verdict: BackendResult) -> dict[str, Any]:
    """Print what was found out about one backend; returns it."""
    name = f"{verdict.entry.name} {verdict.entry.version()}".strip()
    if verdict.reason:
        print(f"{name}: not run: {verdict.reason}")
        return {"backend": verdict.entry.name, "reason": verdict.reason}
    ran = [outcome for outcome in verdict.outcomes if state(outcome) != "skipped"]
    tables = {}
    for dtype in dict.fromkeys(outcome.case.dtype for outcome in ran):
        alike = [outcome for outcome in ran if outcome.case.dtype == dtype]
        found = [summary(alike, tensor) for tensor in TENSORS]
        tables[dtype] = [row for row in found if row["cases"]]
        rows = [
            (row["tensor"], str(row["cases"]), number(row["geometric_mean"], "-"), number(row["worst"]),
             row["worst_case"], str(row["above_2"]), number(row["most_of_allowed"]), str(row["wrong"]))
            for row in tables[dtype]
        ]  # fmt: skip
        header = ("tensor", "cases", "mean", "worst", "in", "above 2", "of what is allowed", "wrong")
        show(f"{name}, {dtype}: error / error of PyTorch", header, rows)
    counts = {what.lower(): verdict.count(what) for what in ("right", "WRONG", "skipped")}
    print(", ".join(f"{what} {count}" for what, count in counts.items()))
    faults, reasons = wrong(verdict), refused(verdict)
    for fault in faults:
        told = fault["failure"] or ", ".join(f"{tensor} {text}" for tensor, text in fault["errors"].items())
        print(f"  WRONG: {fault['case']}: {told}")
    for reason, count in reasons.items():
        print(f"  refused {count} x: {reason}")
    named = {"backend": verdict.entry.name, "version": verdict.entry.version(), "counts": counts}
    return {**named, "errors": tables, "wrong": faults, "refused": reasons}


def chosen(options: argparse.Namespace) -> list[Case]:
    """Return the cases asked for."""
    dtypes = listed(options.dtypes)
    return [
        case
        for case in (QUICK if options.quick else CASES)
        if (not dtypes or case.dtype in dtypes) and options.case.casefold() in case.name
    ]


def main() -> None:
    """Hold every backend to the cases and print what came of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backends", default="", help="names, separated by commas; all unless given")
    parser.add_argument("--dtypes", default="", help="bfloat16, float16, float32, float64; all unless given")
    parser.add_argument("--quick", action="store_true", help="without the cases that take seconds each")
    parser.add_argument("--case", default="", help="only cases with this in their name")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("--device cuda needs a CUDA GPU, and torch finds none here")
    cases = chosen(options)
    if not cases:
        sys.exit("no case has that dtype and that name")
    show_machine()
    results = []
    for candidate in candidates(listed(options.backends), device):
        verdict = BackendResult(*candidate)
        for done, outcome in enumerate(verdict.run(device, cases), 1):
            if done % 100 == 0:
                print(f"{verdict.entry.name}: {done} of {len(cases)}, {outcome.case}", file=sys.stderr)
        results.append(report(verdict))
        save(options.json, results)


if __name__ == "__main__":
    main()
