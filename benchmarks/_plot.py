"""Bars of times: a panel for each step, a group for each case, a colour for each side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

__all__ = ["draw"]

# Two greys, then Okabe and Ito's palette: apart for every kind of colour vision.
COLOURS = ("#D0D0D0", "#8C8C8C", "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7")
INK = "#333333"


def draw(rows: Sequence[dict[str, Any]], yardstick: str, title: str, path: Path) -> None:
    """Write a picture of rows with `case`, `step`, `side` and `milliseconds`; the yardstick is a line."""
    steps = list(dict.fromkeys(row["step"] for row in rows))
    figure = Figure(figsize=(13, 4.6 * len(steps)), dpi=130, layout="constrained")
    for axes, step in zip(figure.subplots(len(steps), 1, squeeze=False)[:, 0], steps, strict=True):
        _panel(axes, [row for row in rows if row["step"] == step], yardstick)
        axes.set_title(f"{step}; bars that reach the top go on beyond it", loc="left", color=INK)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, ncols=len(labels), loc="outside lower center", fontsize=9)
    figure.suptitle(title, x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _panel(axes: Axes, rows: Sequence[dict[str, Any]], yardstick: str) -> None:
    times = {(row["case"], row["side"]): row["milliseconds"] for row in rows}
    cases = list(dict.fromkeys(row["case"] for row in rows))
    sides = [name for name in dict.fromkeys(row["side"] for row in rows) if name != yardstick]
    top = 1.9 * max(times[case, yardstick] for case in cases)
    width = 0.8 / len(sides)
    for place, (side, colour) in enumerate(zip(sides, COLOURS, strict=False)):
        at = [number - 0.4 + width * (place + 0.5) for number in range(len(cases))]
        heights = [times.get((case, side), 0.0) for case in cases]
        axes.bar(at, heights, width * 0.92, color=colour, label=side)
        for x, height in zip(at, heights, strict=True):
            text, ink = f"{height:.2f}" if height else "none", "white" if height and place else INK
            axes.text(x, top * 0.015, text, rotation=90, ha="center", va="bottom", fontsize=8, color=ink)
    for number, case in enumerate(cases):
        label = yardstick if number == 0 else None
        axes.hlines(
            times[case, yardstick], number - 0.43, number + 0.43, color=INK, linewidth=1.8, label=label
        )
    axes.set_ylim(0, top)
    axes.set_xticks(range(len(cases)), cases)
    axes.set_xlabel("case")
    axes.set_ylabel("time per call, ms (lower is better)")
    axes.spines[["top", "right"]].set_visible(False)
