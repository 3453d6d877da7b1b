"""One picture of a `Result`: the losses, the lengths of the documents, and the speed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from attnreg.demo.train import LAYOUTS

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

    from attnreg.demo.train import Result

# Blue and orange of Okabe and Ito's palette, distinct for every kind of colour vision and in grey.
COLOURS = {"packed": "#0072B2", "padded": "#E69F00"}
INK, NEUTRAL, FAINT = "#333333", "#8C8C8C", "#D9D9D9"
BINS = [2**power for power in range(12)]


def draw(result: Result, path: Path) -> None:
    """Write the picture as a PNG, 1800 x 660 pixels."""
    spaced = ConstrainedLayoutEngine(wspace=0.06, w_pad=0.12, h_pad=0.12)
    figure = Figure(figsize=(12, 4.4), dpi=150, layout=spaced)
    losses, lengths, speed = figure.subplots(1, 3, width_ratios=(5, 4, 3))
    _losses(losses, result)
    _lengths(lengths, result)
    _speed(speed, result)
    figure.savefig(path)


def _losses(axes: Axes, result: Result) -> None:
    _titled(axes, f"Losses differ by at most {result.largest_difference:.0e}", "step", "loss, nats per byte")
    steps = range(1, len(result.steps) + 1)
    packed, padded = ([step.loss[name] for step in result.steps] for name in LAYOUTS)
    # Rings around the line: a second line would hide the first where the two agree.
    axes.plot(steps, padded, "o", label="padded", color=COLOURS["padded"], fillstyle="none", markersize=7)
    axes.plot(steps, packed, label="packed", color=COLOURS["packed"], linewidth=1.8)
    axes.legend(frameon=False, labelcolor=INK)


def _lengths(axes: Axes, result: Result) -> None:
    _titled(axes, f"Padded to the longest: {result.padding:.0%} padding", "bytes of text", "documents")
    axes.hist(result.lengths, bins=BINS, color=NEUTRAL, rwidth=0.9)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xticks(BINS[::2])


def _speed(axes: Axes, result: Result) -> None:
    _titled(axes, f"Packed is {result.speedup:.2g} times as fast", "bytes of text per second", "")
    names = list(LAYOUTS)[::-1]
    values = [result.throughput(name) for name in names]
    bars = axes.barh(names, values, height=0.5, color=[COLOURS[name] for name in names])
    axes.bar_label(bars, fmt="{:,.0f}", padding=4, color=INK)
    axes.set_xlim(0, max(values) * 1.25)
    axes.set_ylim(-0.6, 1.6)
    axes.set_xticks([])  # the bars are labelled
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False)


def _titled(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", color=INK, fontsize=12, pad=12)
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    axes.tick_params(colors=INK)
    axes.grid(axis="y", color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
