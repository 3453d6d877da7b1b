"""The style of all plots: colours, marks, sizes and axes. Only this module and those that draw import it.

A figure is as wide as a page, so that its labels have their size there.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

# Inches; and pixels of an inch.
PAGE, DPI = 8.6, 150

# Points. None is smaller than `SMALL`.
TITLE, HEADING, SMALL = 11, 10, 9

# Characters of a title that a page has room for.
TITLE_WIDTH = 88

# Greys for torch, then Okabe and Ito's palette and three darker colours of Paul Tol's: distinct for every
# kind of colour vision. What attnreg chooses, and each backend, has the same colour in every picture.
GREYS = ("#404040", "#8C8C8C", "#D0D0D0")
COLOURS = (
    "#D55E00", "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#F0E442",
    "#882255", "#332288", "#999933",
)  # fmt: skip
OURS, NEUTRAL = COLOURS[0], GREYS[1]
OF_BACKENDS = dict(zip(("FA2", "FA4", "cuDNN", "cpu", "math"), COLOURS[1:], strict=False))
MARKS = "osD^vP*X<>"
INK, FAINT = "#333333", "#D9D9D9"


def colours_of(names: Iterable[str]) -> dict[str, str]:
    """Return a colour for each name: greys for torch's own, which don't go through attnreg."""
    backends = {name: name.removeprefix("attnreg, ").removeprefix("always ") for name in names}
    taken = {OF_BACKENDS[backend] for backend in backends.values() if backend in OF_BACKENDS}
    greys, colours = iter(GREYS), (colour for colour in COLOURS if colour not in taken)
    return {
        name: OF_BACKENDS.get(backend)
        or next(greys if name.startswith(("torch", "SDPA")) else colours, "#000000")
        for name, backend in backends.items()
    }


def new_figure(height: float, width: float = PAGE) -> Figure:
    """Return an empty figure; sizes are in inches."""
    spaced = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08, wspace=0.03, hspace=0.03)
    return Figure(figsize=(width, height), dpi=DPI, layout=spaced)


def dress(axes: Axes, title: str = "", x: str = "", y: str = "", grid: str = "y") -> None:
    """Give axes a title, labels, and the lines of `grid`: "x", "y", "both" or none."""
    axes.set_title(title, loc="left", color=INK, fontsize=HEADING)
    axes.set_xlabel(x, color=INK, fontsize=SMALL)
    axes.set_ylabel(y, color=INK, fontsize=SMALL)
    axes.tick_params(colors=INK, labelsize=SMALL)
    if grid:
        axes.grid(axis=grid, color=FAINT, linewidth=0.6)  # type: ignore[arg-type]
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)


def add_legend(figure: Figure, last: str = "") -> None:
    """Add one legend for all axes, below them; what begins with `last` comes last."""
    # A name may be missing in some axes.
    legends = [axes.get_legend_handles_labels() for axes in figure.axes]
    named = {label: handle for each in legends for handle, label in zip(*each, strict=True)}
    labels = sorted(named, key=lambda label: bool(last) and label.startswith(last))
    figure.legend(
        [named[label] for label in labels], labels, frameon=False, ncols=min(len(labels), 4),
        loc="outside lower center", fontsize=SMALL, labelcolor=INK,
    )  # fmt: skip


def save(figure: Figure, title: str, path: Path) -> None:
    """Write the figure below a title, as PNG or SVG by its suffix."""
    # A processor may have a long name.
    lines = [line for long in title.splitlines() for line in textwrap.wrap(long, TITLE_WIDTH)]
    figure.suptitle("\n".join(lines), x=0.01, ha="left", color=INK, fontsize=TITLE)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
