"""Sides held to float64, then timed in turn: what `varlen` and `sdpa` do with each of their shapes."""

from __future__ import annotations

import statistics
import textwrap
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from attnreg.bench.report import Table
from attnreg.bench.shapes import FORWARD
from attnreg.bench.sides import STEPS, ran
from attnreg.bench.timing import ahead, interleaved, median_ratio
from attnreg.bench.truth import TOLERANCE
from attnreg.dispatch.counters import reset_stats

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from attnreg.bench.report import Job
    from attnreg.bench.shapes import Shape
    from attnreg.bench.sides import Side

__all__ = ["Checked", "checked", "dtype_of", "short", "table", "timed", "wrong_backend"]

# As long as a measurement takes; long enough for the clock, short enough for many rounds.
SECONDS = 0.01


class Checked(NamedTuple):
    """A side that is right: how far it is off, and which backend ran in each direction."""

    side: Side
    error: float
    ran: dict[str, str]


def checked(
    shape: Shape,
    sides: Mapping[str, Side],
    error_of: Callable[[str, list[Tensor]], float],
    against: Callable[[str, dict[str, str]], str],
    job: Job,
) -> dict[str, Checked]:
    """Return the sides that are right; tells the job why the others are left out.

    Args:
        shape: the call.
        sides: by name.
        error_of: returns the relative error of a side's results.
        against: returns what speaks against a side, given what ran.
        job: what is told.
    """
    right = {}
    for name, side in sides.items():
        reset_stats()
        try:
            error = error_of(name, side.results(shape.backward))
        except Exception as problem:  # noqa: BLE001 - one side that breaks must not hide the others
            job.leave_out(f"{shape}, {name}", short(problem))
            continue
        found = ran()
        if not error <= TOLERANCE[shape.dtype]:
            job.leave_out(f"{shape}, {name}", f"WRONG, relative error {error:.2g}; ran {_words(found)}")
        elif why := against(name, found):
            job.leave_out(f"{shape}, {name}", why)
        else:
            right[name] = Checked(side, error, found)
    return right


def wrong_backend(wanted: str, found: Mapping[str, str], backward: bool = True) -> str:
    """Return what ran instead of a backend, or an empty string if that did."""
    ways = ("forward", "backward") if backward else ("forward",)
    return "" if all(found[way] == wanted for way in ways) else f"ran {_words(found)}"


def short(problem: Exception) -> str:
    """Return an exception in one line."""
    return textwrap.shorten(f"{type(problem).__name__}: {problem}".partition("\n")[0], 150)


def _words(found: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({way})" for way, name in found.items())


def timed(
    shape: Shape, right: Mapping[str, Checked], yardstick: str, rate: float, job: Job
) -> list[dict[str, Any]]:
    """Time the sides of a shape; returns a row for each side and step.

    Times are milliseconds of the device with the host ahead, the median of the rounds.
    """
    rows = []
    for step, run in STEPS.items():
        measures = {
            name: one.side.timed(run, one.side.calls(run, SECONDS), ahead) for name, one in right.items()
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
                    "relative_error": right[name].error,
                    "ran": right[name].ran,
                }
            )
    return rows


def table(title: str, rows: Sequence[Mapping[str, Any]], against: str) -> Table:
    """Return the rows of one case and step as a table; ratios are to the side `against`."""
    header = ("side", "ms", f"x {against}", "TFLOP/s", "of matmul", "error", "ran")
    cells = [
        (
            row["side"], f"{row['milliseconds']:.3f}", f"{row['times_yardstick']:.2f}",
            f"{row['teraflops']:.3g}", f"{row['of_matmul_rate']:.0%}", f"{row['relative_error']:.1e}",
            _served(row),
        )
        for row in rows
    ]  # fmt: skip
    return Table(title, header, cells)


def _served(row: Mapping[str, Any]) -> str:
    found = row["ran"]
    same = row["step"] == FORWARD or found["forward"] == found["backward"]
    return str(found["forward"] if same else f"{found['forward']}, {found['backward']}")


def dtype_of(shape: Shape) -> torch.dtype:
    """Return the shape's dtype as torch's."""
    found: torch.dtype = getattr(torch, shape.dtype)
    return found
