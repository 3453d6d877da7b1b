"""Sides held to the accuracy rule, then timed in turn: what `varlen` and `sdpa` do with each shape."""

from __future__ import annotations

import statistics
import textwrap
from typing import TYPE_CHECKING, Any, NamedTuple

from attnreg.bench.report import Table
from attnreg.bench.shapes import FORWARD
from attnreg.bench.sides import STEPS, in_words, ran, wrong_backend
from attnreg.dispatch.counters import reset_stats
from attnreg.measure.timing import interleaved, median_ratio

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from attnreg.bench.batches import Batch
    from attnreg.bench.report import Job
    from attnreg.bench.shapes import Shape
    from attnreg.bench.sides import Side
    from attnreg.measure.sample import Verdict

# As long as a measurement takes; long enough for the clock, short enough for many rounds.
SECONDS = 0.01


class Checked(NamedTuple):
    """A side that is right: its error in units of the most that passes, and what ran in each direction."""

    side: Side
    error: float
    ran: dict[str, str]


def checked(
    batch: Batch,
    sides: Mapping[str, Side],
    job: Job,
    verdict: Callable[[str, list[Tensor]], Verdict] | None = None,
) -> dict[str, Checked]:
    """Return the sides that are right, and record in the job why the others are left out.

    Args:
        batch: the tensors of the call.
        sides: by name.
        job: the measurement.
        verdict: returns how wrong the results of a side are; for sides whose results aren't a front's.
    """
    right = {}
    for name, side in sides.items():
        what = f"{batch.shape}, {name}"
        reset_stats()
        try:
            results = side.results(batch.shape.backward)
            error, wrong = verdict(name, results) if verdict else batch.verdict(results)
        except Exception as problem:  # noqa: BLE001 - one side that breaks must not hide the others
            job.leave_out(what, short(problem))
            continue
        found = ran()
        if wrong:
            job.leave_out(what, f"WRONG: {wrong}; ran {in_words(found)}")
        elif side.wanted and (why := wrong_backend(side.wanted, found)):
            job.leave_out(what, why)
        else:
            right[name] = Checked(side, error, found)
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
            median = statistics.median(seconds)
            speed = shape.flops(step) / median
            rows.append(
                {
                    "case": str(shape),
                    "shape": shape.to_dict(),
                    "step": step,
                    "side": name,
                    "milliseconds": median * 1e3,
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
