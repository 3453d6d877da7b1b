"""Sides held to the accuracy rule, then timed in turn: what `varlen` and `sdpa` do with each shape."""

from __future__ import annotations

import statistics
import textwrap
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from attnreg.bench.report import Table
from attnreg.bench.shapes import FORWARD
from attnreg.bench.sides import STEPS, in_words, ran
from attnreg.dispatch.counters import reset_stats
from attnreg.measure.timing import interleaved, median_ratio

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from attnreg.bench.report import Job
    from attnreg.bench.shapes import Shape
    from attnreg.bench.sides import Side
    from attnreg.measure import Sample

    # What the results of a side, by its name, are compared with, and these by their names in the contract.
    Expected = Callable[[str, list[Tensor]], tuple[Sample, dict[str, Tensor]]]

# As long as a measurement takes; long enough for the clock, short enough for many rounds.
SECONDS = 0.01


class Checked(NamedTuple):
    """A side that is right: its error in units of the most that passes, and what ran in each direction."""

    side: Side
    error: float
    ran: dict[str, str]


def checked(
    shape: Shape,
    sides: Mapping[str, Side],
    expected: Expected,
    against: Callable[[str, dict[str, str]], str],
    job: Job,
) -> dict[str, Checked]:
    """Return the sides that are right, and record in the job why the others are left out.

    Args:
        shape: the call.
        sides: by name.
        expected: returns what a side's results are compared with.
        against: returns why a side doesn't count, given what ran.
        job: the measurement.
    """
    right = {}
    for name, side in sides.items():
        reset_stats()
        try:
            sample, results = expected(name, side.results(shape.backward))
            verdict = sample.verdict(results)
        except Exception as problem:  # noqa: BLE001 - one side that breaks must not hide the others
            job.leave_out(f"{shape}, {name}", short(problem))
            continue
        found = ran()
        if verdict.wrong:
            job.leave_out(f"{shape}, {name}", f"WRONG: {verdict.wrong}; ran {in_words(found)}")
        elif why := against(name, found):
            job.leave_out(f"{shape}, {name}", why)
        else:
            right[name] = Checked(side, verdict.error, found)
    return right


def short(problem: Exception) -> str:
    """Return an exception in one line."""
    return textwrap.shorten(f"{type(problem).__name__}: {problem}".partition("\n")[0], 150)


def timed(
    shape: Shape, right: Mapping[str, Checked], yardstick: str, rate: float, job: Job
) -> list[dict[str, Any]]:
    """Time the sides of a shape; returns a row for each side and step.

    Times are milliseconds of the device with the host ahead, the median of the rounds.
    """
    rows = []
    for step, run in STEPS.items():
        measures = {
            name: one.side.timed(run, one.side.calls(run, SECONDS), "device") for name, one in right.items()
        }
        taken = interleaved(measures, job.rounds)
        for name, seconds in taken.items():
            speed = shape.flops(step) / statistics.median(seconds)
            rows.append(
                {
                    "case": str(shape),
                    "shape": shape.to_dict(),
                    "step": step,
                    "side": name,
                    "milliseconds": statistics.median(seconds) * 1e3,
                    "fastest_and_slowest": [min(seconds) * 1e3, max(seconds) * 1e3],
                    "times_yardstick": median_ratio(taken[yardstick], seconds),
                    "teraflops": speed / 1e12,
                    "of_matmul_rate": speed / rate,
                    "error": right[name].error,
                    "ran": right[name].ran,
                }
            )
    return rows


def table(title: str, rows: Sequence[Mapping[str, Any]], against: str) -> Table:
    """Return the rows of one case and step as a table; ratios are to the side `against`."""
    header = ("side", "ms", f"x {against}", "TFLOP/s", "of matmul", "of allowed", "ran")
    cells = [
        (
            row["side"], f"{row['milliseconds']:.3f}", f"{row['times_yardstick']:.2f}",
            f"{row['teraflops']:.3g}", f"{row['of_matmul_rate']:.0%}", f"{row['error']:.2f}",
            _who_ran(row),
        )
        for row in rows
    ]  # fmt: skip
    return Table(title, header, cells)


def _who_ran(row: Mapping[str, Any]) -> str:
    found = row["ran"]
    same = row["step"] == FORWARD or found["forward"] == found["backward"]
    return str(found["forward"] if same else f"{found['forward']}, {found['backward']}")


def dtype_of(shape: Shape) -> torch.dtype:
    """Return the shape's dtype as torch's."""
    found: torch.dtype = getattr(torch, shape.dtype)
    return found
