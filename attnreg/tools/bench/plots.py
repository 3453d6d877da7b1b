"""Pictures of what was measured: TFLOP/s under a ceiling, shares of the shapes by loss, times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullLocator

from attnreg.tools.bench.report import machine, time_text
from attnreg.tools.bench.selection import CHOSEN, losses
from attnreg.tools.bench.shapes import BOTH, FORWARD
from attnreg.tools.drawing import (
    INK,
    MARKS,
    NEUTRAL,
    OURS,
    SMALL,
    add_legend,
    colours_of,
    dress,
    new_figure,
    save,
)

# Numbers of the marks of a panel, by their names, by panel; and the ends of their lines, if there are any.
Marks = Mapping[str, Mapping[str, float]]
Ends = Mapping[str, Mapping[str, Sequence[float] | None]]

TITLES = {
    "varlen": "Packed sequences through varlen_attn",
    "sdpa": "Dense calls through scaled_dot_product_attention",
    "overhead": "What a call costs the host",
    "selection": "Shapes that no table was tuned on",
    "fresh": "Calls with new lengths, beside the same batch repeated",
}

SPREAD: dict[str, Any] = {"linewidth": 1.3, "zorder": 2}


def draw(name: str, results: Any, path: Path, measured_on: Mapping[str, str] | None = None) -> None:
    """Write the picture of a measurement, as PNG or SVG by its suffix; `measured_on` is this machine."""
    facts = measured_on or machine()
    title = f"{TITLES[name]}\n{facts.get('gpu', facts['processor'])}, torch {facts['torch']}"
    if name == "selection":
        _draw_losses(results["rows"], title, path)
    elif name == "fresh":
        _draw_times(*_of_streams(results["rows"]), title, "ms", "lines end at the 95th percentile", path)
    elif name == "overhead":
        costs, quartiles = _costs(results)
        known = any(ends for sides in quartiles.values() for ends in sides.values())
        note = "lines: the middle half of the rounds" if known else "medians; the file has no spread"
        _draw_times(costs, quartiles, title, "µs", note, path)
    else:
        _draw_speeds(results["rows"], results["matmul_teraflops"], title, path)


# Speeds


def _draw_speeds(rows: Sequence[Mapping[str, Any]], ceiling: float, title: str, path: Path) -> None:
    """Draw a line for each side, from case to case, below the ceiling in TFLOP/s; all axes have one scale.

    A panel is a line of axes, and steps are columns.
    """
    steps, sides, panels = _each(rows, "step"), colours_of(_each(rows, "side")), _each(rows, "panel")
    most = 1.06 * max(ceiling, *(row["teraflops"] for row in rows))
    figure = new_figure(1.6 * len(panels) + 1.8)
    grid = figure.subplots(len(panels), len(steps), squeeze=False, sharey=True)
    for number, (line, panel) in enumerate(zip(grid, panels, strict=True)):
        for axes, step in zip(line, steps, strict=True):
            here = [row for row in rows if (row["panel"], row["step"]) == (panel, step)]
            _speed_lines(axes, here, sides, ceiling)
            dress(axes, f"{step}\n{panel}" if number == 0 else panel)
            axes.set_ylim(0, most)
    figure.supylabel("TFLOP/s (higher is better)", color=INK, fontsize=SMALL)
    add_legend(figure, last="matmul")
    save(figure, f"{title}; lines: fastest to slowest round", path)


def _speed_lines(
    axes: Axes, rows: Sequence[Mapping[str, Any]], sides: Mapping[str, str], ceiling: float
) -> None:
    cases = _each(rows, "case")
    for number, (side, colour) in enumerate(sides.items()):
        drawn = [row for row in rows if row["side"] == side]
        if not drawn:  # a backend may run none of a panel's cases
            continue
        at = [cases.index(row["case"]) for row in drawn]
        speeds = [row["teraflops"] for row in drawn]
        # The first marks are the largest, so that they show behind others.
        size = max(8.0 - number, 3.0)
        axes.plot(at, speeds, f"{MARKS[number]}-", color=colour, label=side, markersize=size, linewidth=1.0)
        axes.vlines(at, *zip(*map(_slowest_and_fastest, drawn), strict=True), color=colour, **SPREAD)
    label = f"matmul, as measured: {ceiling:.3g} TFLOP/s"
    axes.axhline(ceiling, color=INK, linestyle="--", linewidth=1.1, label=label)
    axes.set_xticks(range(len(cases)), [case.replace(" x ", " x\n").replace(", ", ",\n") for case in cases])
    axes.margins(x=0.06)


def _slowest_and_fastest(row: Mapping[str, Any]) -> tuple[float, float]:
    """Return the TFLOP/s of the slowest and of the fastest round."""
    fast, slow = row.get("fastest_and_slowest", (row["milliseconds"],) * 2)
    return row["teraflops"] * row["milliseconds"] / slow, row["teraflops"] * row["milliseconds"] / fast


# Losses


def _cumulative(
    axes: Axes, by_way: Mapping[str, Sequence[float]], colours: Mapping[str, str], heading: str
) -> None:
    """Draw which share of the shapes loses at most so much: a line for each way."""
    for name, ratios in by_way.items():
        if not ratios:
            continue
        ends = [*sorted(ratios), 1e3]  # the line goes on to the edge
        shares = [min((number + 1) / len(ratios), 1.0) for number in range(len(ends))]
        width, order = (2.4, 5) if name == CHOSEN else (1.4, 3)
        axes.step(ends, shares, where="post", color=colours[name], linewidth=width, zorder=order, label=name)
    dress(axes, heading, "time over that of the best, log scale", "share of shapes up to it", grid="both")
    axes.set_xscale("log")
    axes.set_xlim(0.97, 2.5)
    axes.set_xticks((1, 1.15, 1.5, 2, 2.5))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(0.0, 1.01)


def _draw_losses(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Draw which share of the shapes loses at most so much: axes for each step."""
    steps = [step for step in (FORWARD, BOTH) if losses(rows, step)]
    figure = new_figure(4.4)
    for axes, step in zip(figure.subplots(1, len(steps), squeeze=False)[0], steps, strict=True):
        by_way = losses(rows, step)
        shapes = max(map(len, by_way.values()))
        _cumulative(axes, by_way, colours_of(by_way), f"{step}, {shapes} shapes")
    add_legend(figure)
    save(figure, title, path)


# Times


def _costs(results: Mapping[str, Any]) -> tuple[Marks, Ends]:
    """Return microseconds by front, step and side, and quartiles where they are known."""
    costs: dict[str, dict[str, float]] = {}
    quartiles: dict[str, dict[str, Sequence[float] | None]] = {}
    spread = results.get("quartiles", {})
    for front, sides in results.items():
        for side, steps in sides.items() if front != "quartiles" else ():
            for step, microseconds in steps.items():
                panel = f"{front}: {step}"
                costs.setdefault(panel, {})[side] = microseconds
                ends = spread.get(front, {}).get(side, {}).get(step)
                quartiles.setdefault(panel, {})[side] = ends
    return costs, quartiles


def _of_streams(rows: Iterable[Mapping[str, Any]]) -> tuple[Marks, Ends]:
    """Return milliseconds by case, step, side and stream, with lines to the 95th percentile."""
    times: dict[str, dict[str, float]] = {}
    ends: dict[str, dict[str, Sequence[float] | None]] = {}
    for row in rows:
        panel, name = f"{row['case']}: {row['step']}", f"{row['side']}, {row['stream']}"
        times.setdefault(panel, {})[name] = row["milliseconds"]
        ends.setdefault(panel, {})[name] = (row["milliseconds"], row["p95"])
    return times, ends


def _draw_times(times: Marks, ends: Ends, title: str, unit: str, note: str, path: Path) -> None:
    """Draw a mark with its value for each side; all axes have one logarithmic scale.

    A case has a line of axes, one for each of its steps. It stands once, above the first: it is often wider.
    """
    lines: dict[str, list[str]] = {}
    for panel in times:
        lines.setdefault(panel.partition(":")[0], []).append(panel)
    values = [time for sides in times.values() for time in sides.values()]
    heights = [0.21 * max(len(times[panel]) for panel in line) + 0.95 for line in lines.values()]
    figure = new_figure(sum(heights) + 1.1)
    rows = figure.add_gridspec(len(lines), 1, height_ratios=heights)
    for number, line in enumerate(lines.values()):
        cells = rows[number].subgridspec(1, len(line))
        names = list(dict.fromkeys(name for panel in line for name in times[panel]))[::-1]
        for column, panel in enumerate(line):
            axes = figure.add_subplot(cells[column])
            _time_marks(axes, names, times[panel], ends[panel])
            case, _, step = panel.partition(": ")
            dress(axes, f"{'' if column else case}\n{step}", f"{unit}, log scale", grid="x")
            axes.set_xscale("log")
            axes.set_xlim(0.8 * min(values), 2.5 * max(values))
            wide = max(values) > 100 * min(values)
            axes.xaxis.set_major_locator(LogLocator(subs=(1.0,) if wide else (1.0, 3.0)))
            # Three axes beside each other have no room for "10000" behind "1000".
            axes.xaxis.set_major_formatter(
                lambda value, _: f"{value:g}" if value < 1e4 else f"{value / 1e3:g}k"
            )
            axes.xaxis.set_minor_locator(NullLocator())
            axes.set_yticks(range(len(names)), names if column == 0 else [""] * len(names))
            axes.set_ylim(-0.6, len(names) - 0.4)
            axes.tick_params(axis="y", length=0)
    save(figure, f"{title}\nlower is better; {note}", path)


def _time_marks(
    axes: Axes,
    names: Sequence[str],
    times: Mapping[str, float],
    ends: Mapping[str, Sequence[float] | None],
) -> None:
    for number, name in enumerate(names):
        if name not in times:
            continue
        colour = OURS if "attnreg" in name else NEUTRAL
        axes.plot(times[name], number, "o", color=colour, markersize=5.5)
        low, high = ends[name] or (times[name], times[name])
        if high > low:
            axes.hlines(number, low, high, color=colour, **SPREAD)
        axes.annotate(
            time_text(times[name]), (max(times[name], high), number), (5, 0), textcoords="offset points",
            va="center", fontsize=SMALL, color=INK,
        )  # fmt: skip


def _each(rows: Iterable[Mapping[str, Any]], key: str) -> list[str]:
    return list(dict.fromkeys(row[key] for row in rows))
