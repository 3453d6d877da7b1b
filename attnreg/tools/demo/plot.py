"""One picture of a `Result`: the losses, the lengths of the documents, and the speed."""

from __future__ import annotations

from pathlib import Path

from attnreg.tools.demo.train import LAYOUTS, Result
from attnreg.tools.drawing import COLOURS, INK, NEUTRAL, SMALL, dress, new_figure

# As wide as a slide.
WIDTH, HEIGHT = 12, 4.4
OF_LAYOUTS = {"packed": COLOURS[1], "padded": COLOURS[2]}
BINS = [2**power for power in range(12)]


def draw(result: Result, path: Path) -> None:
    """Write the picture as a PNG, 1800 x 660 pixels."""
    figure = new_figure(HEIGHT, WIDTH)
    losses, lengths, speed = figure.subplots(1, 3, width_ratios=(5, 4, 4))

    steps = range(1, len(result.steps) + 1)
    packed, padded = ([step.loss[name] for step in result.steps] for name in LAYOUTS)
    # Rings around the line: a second line would hide the first where the two agree.
    losses.plot(
        steps, padded, "o", label="padded", color=OF_LAYOUTS["padded"], fillstyle="none", markersize=7
    )
    losses.plot(steps, packed, label="packed", color=OF_LAYOUTS["packed"], linewidth=1.8)
    losses.legend(frameon=False, labelcolor=INK, fontsize=SMALL)
    losses.locator_params(axis="x", integer=True)
    dress(losses, f"Losses differ by at most {result.largest_difference:.0e}", "step", "loss, nats per byte")

    lengths.hist(result.lengths, bins=BINS, color=NEUTRAL, rwidth=0.9)
    lengths.set_xscale("log", base=2)
    lengths.xaxis.set_major_formatter("{x:,.0f}")
    lengths.set_xticks(BINS[::2])
    dress(lengths, f"Padded to the longest: {result.padding:.0%} padding", "bytes of text", "documents")

    names = list(LAYOUTS)[::-1]
    values = [result.throughput(name) for name in names]
    colours = [OF_LAYOUTS[name] for name in names]
    speed.barh(names, values, height=0.5, color=colours, alpha=0.35)
    speed.plot(values, range(len(names)), "|", color=INK, markersize=22, markeredgewidth=2)
    for place, name in enumerate(names):
        speeds = result.speeds(name)
        # Steps above each other in a fixed pattern, so that equal speeds are all seen.
        heights = [place + 0.06 * (number % 5 - 2) for number in range(len(speeds))]
        speed.plot(speeds, heights, "o", color=colours[place], markersize=3.5)
        speed.text(0, place + 0.32, f" {name}: {values[place]:,.0f}", color=INK, fontsize=SMALL)
    title = f"Packed is {result.speedup:.2g} times as fast"
    dress(speed, title, "bytes of text per second; points: steps, bar: median", grid="x")
    speed.set_xlim(0, 1.05 * max(max(result.speeds(name)) for name in names))
    speed.set_ylim(-0.6, 1.6)
    speed.xaxis.set_major_formatter("{x:,.0f}")
    speed.locator_params(axis="x", nbins=4)
    speed.set_yticks([])
    figure.savefig(path)
