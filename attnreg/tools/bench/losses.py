"""What each way to choose a backend lost on random shapes: the ratios, their sums, and tables of these."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from attnreg.tools.bench.report import PrintedTable
from attnreg.tools.bench.shapes import BOTH, FORWARD

Row = Mapping[str, Any]

# The ways to choose; "always" has the name of a backend behind it.
CHOSEN, ORDER, FIXED, TORCH = "attnreg, measured", "attnreg, order", "always ", "torch"
ADAPTIVE = "attnreg, adaptive"

# A loss of more than this is counted; so many of the worst are named.
MUCH, WORST = 1.15, 10
ALL, BY_HOST, BY_DEVICE = "all", "bound by the host", "bound by the device"


def best_of(times: Mapping[str, float]) -> str:
    """Return which backend took least."""
    return min((name for name in times if name.startswith(FIXED)), key=times.__getitem__)


def losses_of(row: Row, step: str) -> dict[str, float]:
    """Return each way's time over the best backend's time: the median of the ratios of the rounds.

    A host may run at half its speed for seconds. Within a round this affects all ways alike.
    """
    rounds = row["rounds"][step]
    best = rounds[best_of(row["microseconds"][step])]
    return {
        name: statistics.median(taken / other for taken, other in zip(times, best, strict=True))
        for name, times in rounds.items()
    }


def losses(rows: Sequence[Row], step: str, bound: str = ALL) -> dict[str, list[float]]:
    """Return what each way loses, of every shape that has the step."""
    losses_by_way: dict[str, list[float]] = {}
    for row in rows:
        if step in row["microseconds"] and bound in (ALL, row["bound"][step]):
            for name, loss in losses_of(row, step).items():
                losses_by_way.setdefault(name, []).append(loss)
    return losses_by_way


def summary(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return mean, percentiles and worst of the losses, by step, bound and way."""
    return [
        {
            "step": step, "bound": bound, "way": name, "shapes": len(ratios),
            "mean": statistics.fmean(ratios), "median": percentile(ratios, 50),
            "p90": percentile(ratios, 90), "p99": percentile(ratios, 99), "worst": max(ratios),
            "above": sum(loss > MUCH for loss in ratios) / len(ratios),
        }
        for step in (FORWARD, BOTH)
        for bound in (ALL, BY_HOST, BY_DEVICE)
        for name, ratios in losses(rows, step, bound).items()
    ]  # fmt: skip


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the least value that `percent` percent of the values don't exceed."""
    return sorted(values)[max(0, -int(-len(values) * percent // 100) - 1)]


def worst_of(rows: Sequence[Row], step: str) -> list[dict[str, Any]]:
    """Return the shapes on which the choice by measurement loses most: what ran, and what is best."""
    shapes = []
    for row in rows:
        if times := row["microseconds"].get(step):
            best = best_of(times)
            shapes.append(
                {
                    "number": row["number"], "case": row["case"], "loss": losses_of(row, step)[CHOSEN],
                    "ran": row["ran"][CHOSEN][step], "best": best.removeprefix(FIXED),
                    "microseconds": times[best],
                }
            )  # fmt: skip
    return sorted(shapes, key=lambda row: -row["loss"])[:WORST]


def tables(summed: Sequence[Row], worst: Mapping[str, Sequence[Row]]) -> list[PrintedTable]:
    """Return the sums, separate for each bound of a call if both occur, and the most that is lost."""
    numbers, result_tables = ("mean", "median", "p90", "p99", "worst"), []
    for step in (FORWARD, BOTH):
        here = [row for row in summed if row["step"] == step]
        bounds = list(dict.fromkeys(row["bound"] for row in here))
        for bound in bounds if len(bounds) > 2 else bounds[:1]:
            rows = [
                (row["way"], *(f"{row[x]:.3f}" for x in numbers), f"{row['above']:.1%}", str(row["shapes"]))
                for row in here
                if row["bound"] == bound
            ]
            title = f"{step}, {bound}: time over that of the best backend"
            result_tables.append(PrintedTable(title, ("chosen", *numbers, f"above {MUCH}", "shapes"), rows))
        cells = [
            (f"{row['number']}: {row['case']}", f"{row['loss']:.2f}", row["ran"], row["best"])
            for row in worst[step]
        ]
        header = ("shape", "loss", "by measurement", "best")
        result_tables.append(PrintedTable(f"{step}: the most that is lost", header, cells))
    return result_tables
