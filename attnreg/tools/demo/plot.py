"""One picture of a `Result`: the losses, the lengths of the documents, and the speed."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from attnreg.tools.demo.train import LAYOUTS, Result

# Blue and orange of Okabe and Ito's palette, distinct for every kind of colour vision and in grey.
COLOURS = {"packed": "#0072B2", "padded": "#E69F00"}
INK, NEUTRAL, FAINT = "#333333", "#8C8C8C", "#D9D9D9"
BINS = [2**power for power in range(12)]


def draw(result: Result, path: Path) -> None:
    """Write the picture as a PNG, 1800 x 660 pixels."""
    spaced = ConstrainedLayoutEngine(wspace=0.06, w_pad=0.12, h_pad=0.12)
    figure = Figure(figsize=(12, 4.4), dpi=150, layout=spaced)
    losses, lengths, speed = figure.subplots(1, 3, width_ratios=(5, 4, 3))

    _titled(
        losses, f"Losses differ by at most {result.largest_difference:.0e}", "step", "loss, nats per byte"
    )
    steps = range(1, len(result.steps) + 1)
    packed, padded = ([step.loss[name] for step in result.steps] for name in LAYOUTS)
    # Rings around the line: a second line would hide the first where the two agree.
    losses.plot(steps, padded, "o", label="padded", color=COLOURS["padded"], fillstyle="none", markersize=7)
    losses.plot(steps, packed, label="packed", color=COLOURS["packed"], linewidth=1.8)
    losses.legend(frameon=False, labelcolor=INK)

    _titled(lengths, f"Padded to the longest: {result.padding:.0%} padding", "bytes of text", "documents")
    lengths.hist(result.lengths, bins=BINS, color=NEUTRAL, rwidth=0.9)
    lengths.set_xscale("log", base=2)
    lengths.xaxis.set_major_formatter("{x:,.0f}")
    lengths.set_xticks(BINS[::2])

    _titled(speed, f"Packed is {result.speedup:.2g} times as fast", "bytes of text per second", "")
    names = list(LAYOUTS)[::-1]
    values = [result.throughput(name) for name in names]
    bars = speed.barh(names, values, height=0.5, color=[COLOURS[name] for name in names])
    speed.bar_label(bars, fmt="{:,.0f}", padding=4, color=INK)
    speed.set_xlim(0, max(values) * 1.25)
    speed.set_ylim(-0.6, 1.6)
    speed.set_xticks([])  # the bars are labelled
    speed.tick_params(axis="y", length=0)
    speed.grid(visible=False)
    figure.savefig(path)


def _titled(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", color=INK, fontsize=12, pad=12)
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    axes.tick_params(colors=INK)
    axes.grid(axis="y", color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
