"""The rows of `selection` in sum: ratios to the best, their means and worst, and the aims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from statistics import geometric_mean
from typing import Any

from attnreg.tools.bench.shapes import BACKWARD, BOTH, FORWARD

CHOSEN, ORDER, FIXED, TORCH = "attnreg, measured", "attnreg, order", "always ", "torch"
ADAPTIVE = "attnreg, adaptive"
DIRECT, SAME_FRONT = "best called directly", "best through the same front"
GROUPS = ("all", "dense", "packed", "decode")

MEAN_AIM, WORST_AIM = 1.02, 1.15
GAIN_AIMS = {"dense": 1.10, "packed": 1.6}

Row = Mapping[str, Any]


def ratios(directly: Mapping[str, float], front: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return each strategy's time over the best time, by yardstick; a yardstick without times is left out.

    `directly` has each backend's time when called directly, `front` each strategy's time through the front.
    The best time through the front is the least among the strategies of a fixed order.
    """
    fixed = [time for name, time in front.items() if name.startswith(FIXED)]
    best = {DIRECT: min(directly.values(), default=0.0), SAME_FRONT: min(fixed, default=0.0)}
    return {
        yardstick: {name: time / least for name, time in front.items()}
        for yardstick, least in best.items()
        if least
    }


def summary(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return geometric mean, worst and number of the ratios, by direction, yardstick, group and strategy."""
    summed = []
    for direction, yardstick, group in product((FORWARD, BACKWARD, BOTH), (DIRECT, SAME_FRONT), GROUPS):
        named: dict[str, list[tuple[float, str]]] = {}
        for row in rows:
            if group in ("all", row["group"]) and direction in row["directions"]:
                for strategy, ratio in row["directions"][direction]["ratios"].get(yardstick, {}).items():
                    named.setdefault(strategy, []).append((ratio, row["case"]))
        summed += [
            {
                "direction": direction, "yardstick": yardstick, "group": group, "strategy": strategy,
                "mean": geometric_mean(ratio for ratio, _ in ratios), "worst": max(ratios)[0],
                "worst_case": max(ratios)[1], "cases": len(ratios),
            }
            for strategy, ratios in named.items()
        ]  # fmt: skip
    return summed


def gains(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return how many times as fast as torch's default the chosen backend is, by direction and group."""
    gained = []
    for direction, group in product((FORWARD, BOTH), GROUPS[1:]):
        alike = [row for row in rows if row["group"] == group]
        taken = [row["directions"].get(direction, {"front": {}})["front"] for row in alike]
        times = [
            by_strategy[TORCH] / by_strategy[CHOSEN]
            for by_strategy in taken
            if TORCH in by_strategy and CHOSEN in by_strategy
        ]
        if times:
            gained.append(
                {
                    "direction": direction, "group": group, "mean": geometric_mean(times),
                    "worst": min(times), "cases": len(times),
                }
            )  # fmt: skip
    return gained


def aims(summed: Sequence[Row], gained: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the aims with what was measured for each, and whether it is reached."""
    reached = []
    for row in summed:
        if (row["group"], row["strategy"]) == ("all", CHOSEN) and row["direction"] != BOTH:
            for what, aim in (("mean", MEAN_AIM), ("worst", WORST_AIM)):
                named = "geometric mean" if what == "mean" else "worst"
                text = f"{row['direction']}, chosen / {row['yardstick']}, {named}"
                reached.append({"what": text, "value": row[what], "aim": aim, "reached": row[what] <= aim})
    for row in gained:
        if row["direction"] == BOTH and row["group"] in GAIN_AIMS:
            aim, over = GAIN_AIMS[row["group"]], "SDPA" if row["group"] == "dense" else "varlen_attn"
            text = f"{BOTH}, times as fast as torch's {over}, geometric mean"
            reached.append({"what": text, "value": row["mean"], "aim": aim, "reached": row["mean"] >= aim})
    return reached
