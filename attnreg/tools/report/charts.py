"""The plots of the page, as SVG that stands in it: its text and lines take the page's colours."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from attnreg.tools.drawing import (
    COLOURS,
    FAINT,
    INK,
    MARKS,
    NEUTRAL,
    SMALL,
    add_legend,
    colours_of,
    dress,
    new_figure,
)
from attnreg.tools.report.lines import CallRow

# Inches: a plot is as wide as a phone, and several stand side by side on a wide page.
WIDTH = 4.2
MOST_BARS = 12

# What the page's style sheet sets, by the colour that is drawn.
OF_PAGE = {INK: "var(--ink)", FAINT: "var(--line)"}


def shares(rows: Sequence[CallRow]) -> str:
    """Draw the share of the known time of each row, by its number on the page; the shortest are one bar."""
    known = [(f"{number}", row.total_us) for number, row in enumerate(rows, 1) if row.total_us]
    rest = sum(total for _, total in known[MOST_BARS:])
    bars = known[:MOST_BARS] + ([("others", rest)] if rest else [])
    total = sum(time for _, time in bars)
    names, values = zip(*[(name, 100 * time / total) for name, time in bars], strict=True)
    colours = colours_of(dict.fromkeys(row.backend for row in rows))
    figure = new_figure(0.7 + 0.27 * len(bars), WIDTH)
    axes = figure.subplots()
    painted = [colours[row.backend] for row in rows if row.total_us][: len(bars)]
    painted += [NEUTRAL] * (len(bars) - len(painted))
    if rest:
        painted[-1] = NEUTRAL
    drawn = axes.barh(names, values, height=0.7, color=painted)
    labels = [f"{value:.0f} %" if value >= 1 else "< 1 %" for value in values]
    axes.bar_label(drawn, labels, padding=3, color=INK, fontsize=SMALL)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.18 * max(values))
    dress(axes, "", "share of the measured time, %", "", grid="")
    axes.tick_params(axis="y", length=0)
    if len(colours) > 1:
        for name, colour in colours.items():
            axes.plot([], [], "s", color=colour, label=name)
        add_legend(figure)
    return _svg(figure, "shares")


def times(rows: Sequence[CallRow], text: Callable[[float], str]) -> str:
    """Draw the mean time of each row, the shortest, the longest and the first; `text` shows microseconds."""
    shown = [(number, row) for number, row in enumerate(rows, 1) if row.timed][:MOST_BARS]
    figure = new_figure(1.2 + 0.27 * len(shown), WIDTH)
    axes = figure.subplots()
    for place, (_, row) in enumerate(shown):
        axes.hlines(place, row.shortest_us, row.longest_us, color=NEUTRAL, linewidth=1.6)
    series = (
        ("mean", COLOURS[1], MARKS[0], [row.timed_us / row.timed for _, row in shown]),
        ("first call", COLOURS[0], MARKS[2], [row.first_us for _, row in shown]),
    )
    for label, colour, mark, values in series:
        axes.plot(values, range(len(shown)), mark, color=colour, label=label, markersize=5)
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0,) if high > 100 * low else (1.0, 3.0), numticks=6))
    axes.xaxis.set_major_formatter(lambda value, _: text(value))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_yticks(range(len(shown)), [str(number) for number, _ in shown])
    axes.invert_yaxis()
    dress(axes, "", "time of a call, log scale; lines: shortest to longest", "", grid="x")
    add_legend(figure)
    return _svg(figure, "times")


def _svg(figure: Figure, name: str) -> str:
    """Return a figure as an element of a page, whose ids begin with a name; tables have the same numbers."""
    file = io.StringIO()
    # Text stays text: it can be searched, and is shown in the page's font.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif"}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    for drawn, of_page in OF_PAGE.items():
        text = text.replace(drawn, of_page).replace(drawn.lower(), of_page)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\b(id="|url\(#|href="#)', rf"\g<1>{name}-", text)
    return re.sub(
        r'<svg [^>]*?viewBox="([^"]*)"[^>]*>',
        r'<svg viewBox="\1" aria-hidden="true">',
        text,
        count=1,
    )
