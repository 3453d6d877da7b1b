"""What each way to choose a backend lost on random shapes: the ratios, their sums, and tables of these."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from attnreg.tools.bench.report import Table
from attnreg.tools.bench.shapes import BOTH, FORWARD
from attnreg.tools.bench.summary import CHOSEN, FIXED, Row

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
        name: statistics.median(one / other for one, other in zip(times, best, strict=True))
        for name, times in rounds.items()
    }


def losses(rows: Sequence[Row], step: str, bound: str = ALL) -> dict[str, list[float]]:
    """Return what each way loses, of every shape that has the step."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if step in row["microseconds"] and bound in (ALL, row["bound"][step]):
            for name, loss in losses_of(row, step).items():
                found.setdefault(name, []).append(loss)
    return found


def summary(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return mean, percentiles and worst of the losses, by step, bound and way."""
    return [
        {
            "step": step, "bound": bound, "way": name, "shapes": len(found), "mean": statistics.fmean(found),
            "median": percentile(found, 50), "p90": percentile(found, 90), "p99": percentile(found, 99),
            "worst": max(found), "above": sum(loss > MUCH for loss in found) / len(found),
        }
        for step in (FORWARD, BOTH)
        for bound in (ALL, BY_HOST, BY_DEVICE)
        for name, found in losses(rows, step, bound).items()
    ]  # fmt: skip


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the least value that `percent` percent of the values don't exceed."""
    return sorted(values)[max(0, -int(-len(values) * percent // 100) - 1)]


def worst_of(rows: Sequence[Row], step: str) -> list[dict[str, Any]]:
    """Return the shapes on which the choice by measurement loses most: what ran, and what is best."""
    found = []
    for row in rows:
        if times := row["microseconds"].get(step):
            best = best_of(times)
            found.append(
                {
                    "number": row["number"], "case": row["case"], "loss": losses_of(row, step)[CHOSEN],
                    "ran": row["ran"][CHOSEN][step], "best": best.removeprefix(FIXED),
                    "microseconds": times[best],
                }
            )  # fmt: skip
    return sorted(found, key=lambda one: -one["loss"])[:WORST]


def tables(summed: Sequence[Row], worst: Mapping[str, Sequence[Row]]) -> list[Table]:
    """Return the sums, separate for each bound of a call if both occur, and the most that is lost."""
    numbers, found = ("mean", "median", "p90", "p99", "worst"), []
    for step in (FORWARD, BOTH):
        here = [one for one in summed if one["step"] == step]
        bounds = list(dict.fromkeys(one["bound"] for one in here))
        for bound in bounds if len(bounds) > 2 else bounds[:1]:
            rows = [
                (one["way"], *(f"{one[x]:.3f}" for x in numbers), f"{one['above']:.1%}", str(one["shapes"]))
                for one in here
                if one["bound"] == bound
            ]
            title = f"{step}, {bound}: time over that of the best backend"
            found.append(Table(title, ("chosen", *numbers, f"above {MUCH}", "shapes"), rows))
        cells = [
            (f"{one['number']}: {one['case']}", f"{one['loss']:.2f}", one["ran"], one["best"])
            for one in worst[step]
        ]
        header = ("shape", "loss", "by measurement", "best")
        found.append(Table(f"{step}: the most that is lost", header, cells))
    return found
