"""Pictures of what was measured: TFLOP/s under a ceiling, ratios from case to case, microseconds."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from attnreg.tools.bench.losses import losses
from attnreg.tools.bench.overhead_cpu import QUESTIONS
from attnreg.tools.bench.report import machine
from attnreg.tools.bench.shapes import BACKWARD, BOTH, FORWARD
from attnreg.tools.bench.summary import CHOSEN, DIRECT, FIXED
from attnreg.tools.drawing import (
    COLOURS,
    INK,
    MARKS,
    NEUTRAL,
    OURS,
    SMALL,
    add_legend,
    colours_of,
    dress,
    label_bars,
    new_figure,
    save,
)

# For each case the ratio of each strategy to the best.
Ratios = dict[str, dict[str, float]]

TITLES = {
    "varlen": "Packed sequences through varlen_attn",
    "sdpa": "Dense calls through scaled_dot_product_attention",
    "overhead": "What a call costs the host",
    "selection": "Shapes that no table was tuned on",
    "fresh": "Calls with new lengths, beside the same batch repeated",
}

SPREAD: dict[str, Any] = {"linewidth": 1.3, "zorder": 2}

# What names of attnreg's rows end in, where they don't have its own.
OF_ATTNREG = ("registered", "active", "use_backend()", "backend=")

# Past these a ratio is drawn at the edge: one bad choice must not flatten all others.
LEAST, MOST = 0.8, 8.0
RATIO = "time over that of the best, log scale"


def draw(name: str, results: Any, path: Path, known: Mapping[str, str] | None = None) -> None:
    """Write the picture of a measurement, as PNG or SVG by its suffix; `known` describes the machine."""
    known = known or machine()
    where = known.get("gpu", known["processor"])
    title = f"{TITLES[name]}\n{where}, torch {known['torch']}"
    if "seed" in results:
        _draw_losses(results["rows"], title, path)
    elif name == "selection":
        _draw_ratios(_ratios(results["rows"]), title, path)
    elif name == "fresh":
        _draw_fresh(results["rows"], title, path)
    elif name == "overhead":
        _draw_times(*_costs(results), title, path)
    elif len(_each(results["rows"], "panel")) == 1:
        _draw_few_speeds(results["rows"], results["matmul_teraflops"], title, path)
    else:
        _draw_speeds(results["rows"], results["matmul_teraflops"], title, path)


# Speeds


def _draw_speeds(rows: Sequence[Mapping[str, Any]], ceiling: float, title: str, path: Path) -> None:
    """Draw a line for each side, from case to case, below the ceiling in TFLOP/s; all axes have one scale.

    Rows have `panel`, `case`, `step`, `side` and `teraflops`. The second line of a case, if there is one,
    names a panel of its own, and steps are columns.
    """
    steps, sides = _each(rows, "step"), colours_of(_each(rows, "side"))
    panels = list(dict.fromkeys((row["panel"], row["case"].partition("\n")[2]) for row in rows))
    most = 1.06 * max(ceiling, *(row["teraflops"] for row in rows))
    figure = new_figure(1.6 * len(panels) + 1.8)
    grid = figure.subplots(len(panels), len(steps), squeeze=False, sharey=True)
    for number, (line, (panel, second)) in enumerate(zip(grid, panels, strict=True)):
        for axes, step in zip(line, steps, strict=True):
            here = [
                row
                for row in rows
                if (row["panel"], row["case"].partition("\n")[2], row["step"]) == (panel, second, step)
            ]
            _speed_lines(axes, here, sides, ceiling)
            named = ", ".join(filter(None, (panel, second)))
            dress(axes, f"{step}\n{named}" if number == 0 else named)
            axes.set_ylim(0, most)
    figure.supylabel("TFLOP/s (higher is better)", color=INK, fontsize=SMALL)
    add_legend(figure, last="matmul")
    save(figure, f"{title}; lines: fastest to slowest round", path)


def _speed_lines(
    axes: Axes, rows: Sequence[Mapping[str, Any]], sides: Mapping[str, str], ceiling: float
) -> None:
    cases = [case.partition("\n")[0] for case in _each(rows, "case")]
    for number, (side, colour) in enumerate(sides.items()):
        drawn = [row for row in rows if row["side"] == side]
        at = [cases.index(row["case"].partition("\n")[0]) for row in drawn]
        speeds = [row["teraflops"] for row in drawn]
        # The first marks are the largest, so that they show behind others.
        size = max(8.0 - number, 3.0)
        axes.plot(at, speeds, f"{MARKS[number]}-", color=colour, label=side, markersize=size, linewidth=1.0)
        axes.vlines(at, *zip(*map(_slowest_and_fastest, drawn), strict=True), color=colour, **SPREAD)
    _ceiling(axes.axhline, ceiling)
    axes.set_xticks(range(len(cases)), [case.replace(" x ", " x\n") for case in cases])
    axes.margins(x=0.06)


def _slowest_and_fastest(row: Mapping[str, Any]) -> tuple[float, float]:
    """Return the TFLOP/s of the slowest and of the fastest round."""
    fast, slow = row.get("fastest_and_slowest", (row["milliseconds"],) * 2)
    return row["teraflops"] * row["milliseconds"] / slow, row["teraflops"] * row["milliseconds"] / fast


def _ceiling(line: Any, ceiling: float) -> None:
    line(
        ceiling, color=INK, linestyle="--", linewidth=1.1, label=f"matmul, as measured: {ceiling:.3g} TFLOP/s"
    )


def _draw_few_speeds(rows: Sequence[Mapping[str, Any]], ceiling: float, title: str, path: Path) -> None:
    """Draw a bar with its value for each side: a column of axes for each case, a line for each step."""
    steps, cases = _each(rows, "step"), _each(rows, "case")
    sides = colours_of(_each(rows, "side"))
    names = list(sides)[::-1]
    across = min(len(cases), 2)
    down = -(-len(cases) // across) * len(steps)
    figure = new_figure((0.24 * len(names) + 0.75) * down + 1.1)
    grid = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True)
    places = [(step, case) for step in steps for case in cases]
    for axes in grid.flat[len(places) :]:
        axes.set_visible(False)
    for axes, (step, case) in zip(grid.flat, places, strict=False):
        here = {row["side"]: row for row in rows if (row["step"], row["case"]) == (step, case)}
        drawn = [name for name in names if name in here]
        speeds = [here[name]["teraflops"] for name in drawn]
        ends = [_slowest_and_fastest(here[name]) for name in drawn]
        bars = axes.barh([names.index(name) for name in drawn], speeds, 0.72, color=[sides[n] for n in drawn])
        label_bars(axes, bars, "{:.0f}")
        axes.hlines([names.index(name) for name in drawn], *zip(*ends, strict=True), color=INK, **SPREAD)
        _ceiling(axes.axvline, ceiling)
        dress(axes, f"{case}, {step}".replace("\n", ", "), grid="x")
        axes.set_yticks(range(len(names)), names)
        axes.tick_params(axis="y", length=0)
        axes.set_xlim(0, 1.08 * max(ceiling, *(row["teraflops"] for row in rows)))
    for axes in grid[-1]:
        axes.set_xlabel("TFLOP/s (higher is better)", color=INK, fontsize=SMALL)
    add_legend(figure)
    save(figure, f"{title}; lines at the ends of bars: slowest to fastest round", path)


# Ratios


def _ratios(rows: Sequence[Mapping[str, Any]]) -> dict[str, Ratios]:
    """Return each strategy's ratio to the best of a case, by direction and case.

    The best is the best fixed order of backends, through the same front.
    """
    by_direction: dict[str, Ratios] = {}
    for row, direction in itertools.product(rows, (FORWARD, BACKWARD)):
        measured = row["directions"].get(direction, {"front": ()})
        if CHOSEN not in measured["front"]:
            continue
        times = dict(measured["front"])
        if measured["called_directly"]:
            times[DIRECT] = min(measured["called_directly"].values())
        best = min(time for name, time in times.items() if name.startswith(FIXED))
        ratios = by_direction.setdefault(direction, {})
        ratios[row["case"]] = {name: time / best for name, time in times.items()}
    return by_direction


def _draw_ratios(directions: Mapping[str, Ratios], title: str, path: Path) -> None:
    """Draw a column for each direction: the share of cases up to each ratio, and below it all cases.

    The cases whose worse direction was chosen best come first.
    """
    rows = [row for ratios in directions.values() for row in ratios.values()]
    names = colours_of(dict.fromkeys(name for row in rows for name in row))
    chosen: dict[str, float] = {}
    for ratios in directions.values():
        for case, row in ratios.items():
            chosen[case] = max(chosen.get(case, 0.0), row[CHOSEN])
    cases = sorted(chosen, key=chosen.__getitem__)
    heights = (2.6, 0.165 * len(cases) + 0.9)
    figure = new_figure(sum(heights) + 1.3)
    halves: Any = figure.subfigures(2, 1, height_ratios=heights)
    curves = halves[0].subplots(1, len(directions), squeeze=False)[0]
    dots = halves[1].subplots(1, len(directions), squeeze=False, sharey=True)[0]
    for left, right, (direction, ratios) in zip(curves, dots, directions.items(), strict=True):
        by_way = {name: [row[name] for row in ratios.values() if name in row] for name in names}
        _cumulative(left, by_way, names, f"{direction}, {len(ratios)} shapes")
        _ratio_marks(right, [ratios.get(case, {}) for case in cases], names)
        dress(right, f"{direction}, each shape", RATIO, grid="both")
        _ratio_axis(right, LEAST, MOST)
        right.set_yticks(range(len(cases)), cases)
        right.set_ylim(len(cases) - 0.4, -0.6)
        right.axvline(1.0, color=INK, linewidth=1.0)
    add_legend(figure, axes=dots)
    save(figure, title, path)


def _ratio_marks(axes: Axes, rows: Sequence[Mapping[str, float]], colours: Mapping[str, str]) -> None:
    for (name, colour), mark in zip(colours.items(), MARKS, strict=False):
        drawn = {number: row[name] for number, row in enumerate(rows) if name in row}
        shown = [min(max(ratio, LEAST), MOST) for ratio in drawn.values()]
        style: dict[str, Any] = {"markersize": 6, "zorder": 5} if name == CHOSEN else {"markersize": 4.5}
        axes.plot(shown, [*drawn], mark, linestyle="none", color=colour, label=name, **style)


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
    dress(axes, heading, RATIO, "share of shapes up to it", grid="both")
    _ratio_axis(axes, 0.97, 2.5)
    axes.set_ylim(0.0, 1.01)


def _ratio_axis(axes: Axes, low: float, high: float) -> None:
    axes.set_xscale("log")
    axes.set_xlim(low * (0.97 if low == LEAST else 1.0), high * (1.08 if high == MOST else 1.0))
    ticks = (0.8, 1, 1.15, 1.5, 2, 2.5) if high < MOST else (LEAST, 1, 1.5, 2, 3, 5, MOST)
    axes.set_xticks([tick for tick in ticks if low <= tick <= high])
    axes.xaxis.set_major_formatter(FuncFormatter(_ratio))
    axes.xaxis.set_minor_locator(NullLocator())


def _ratio(value: float, place: Any) -> str:
    at_the_edge = f"≥ {value:g}" if value >= MOST else f"≤ {value:g}"
    return at_the_edge if value in (LEAST, MOST) else f"{value:g}"


def _draw_losses(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Draw which share of random shapes loses at most so much: axes for each step."""
    steps = [step for step in (FORWARD, BOTH) if losses(rows, step)]
    figure = new_figure(4.4)
    for axes, step in zip(figure.subplots(1, len(steps), squeeze=False)[0], steps, strict=True):
        by_way = losses(rows, step)
        shapes = max(map(len, by_way.values()))
        _cumulative(axes, by_way, colours_of(by_way), f"{step}, {shapes} random shapes")
    add_legend(figure)
    save(figure, title, path)


# Times


def _costs(results: Mapping[str, Any]) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, Any]]]:
    """Return microseconds by question and side, from results of a CPU or a GPU, and quartiles where known."""
    titles = {key: title for title, (key, *_) in QUESTIONS.items()}
    costs: dict[str, dict[str, float]] = {}
    spread: dict[str, dict[str, Any]] = {}
    for part, rows in results.items():
        if part == "quartiles":
            continue
        if isinstance(rows, list):
            costs[titles.get(part, part)] = {row["name"]: row["microseconds"] for row in rows}
            continue
        for side, steps in rows.items():
            for step, microseconds in steps.items():
                costs.setdefault(f"{part}: {step}", {})[side] = microseconds
                ends = results.get("quartiles", {}).get(part, {}).get(side, {}).get(step)
                spread.setdefault(f"{part}: {step}", {})[side] = ends
    return costs, spread


def _draw_times(
    parts: Mapping[str, Mapping[str, float]], spread: Mapping[str, Mapping[str, Any]], title: str, path: Path
) -> None:
    """Draw microseconds: a mark with its value for each side; all axes have one logarithmic scale.

    A question has a line of axes, one for each of its steps.
    """
    lines: dict[str, list[str]] = {}
    for part in parts:
        lines.setdefault(part.partition(":")[0], []).append(part)
    ends = [time for sides in parts.values() for time in sides.values()]
    heights = [0.21 * max(len(parts[part]) for part in line) + 0.95 for line in lines.values()]
    figure = new_figure(sum(heights) + 0.9)
    rows = figure.add_gridspec(len(lines), 1, height_ratios=heights)
    for number, line in enumerate(lines.values()):
        cells = rows[number].subgridspec(1, len(line))
        names = list(dict.fromkeys(name for part in line for name in parts[part]))[::-1]
        for column, part in enumerate(line):
            axes = figure.add_subplot(cells[column])
            _time_marks(axes, names, parts[part], spread.get(part, {}))
            dress(axes, part.replace(": ", "\n"), "µs, log scale", grid="x")
            axes.set_xscale("log")
            axes.set_xlim(0.8 * min(ends), 2.5 * max(ends))
            wide = max(ends) > 100 * min(ends)
            axes.xaxis.set_major_locator(LogLocator(subs=(1.0,) if wide else (1.0, 3.0)))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.set_yticks(range(len(names)), names if column == 0 else [""] * len(names))
            axes.set_ylim(-0.6, len(names) - 0.4)
            axes.tick_params(axis="y", length=0)
    known = any(ends for sides in spread.values() for ends in sides.values())
    note = "lines: the middle half of the rounds" if known else "medians; the file has no spread"
    save(figure, f"{title} (lower is better; {note})", path)


def _time_marks(
    axes: Axes, names: Sequence[str], times: Mapping[str, float], spread: Mapping[str, Any]
) -> None:
    for number, name in enumerate(names):
        if name not in times:
            continue
        colour = OURS if "attnreg" in name or name.endswith(OF_ATTNREG) else NEUTRAL
        axes.plot(times[name], number, "o", color=colour, markersize=5.5)
        if ends := spread.get(name):
            axes.hlines(number, *ends, color=colour, **SPREAD)
        last = max(times[name], *(spread.get(name) or (0,)))
        shown = f"{times[name]:.1f}" if times[name] < 100 else f"{times[name]:.0f}"
        axes.annotate(
            shown, (last, number), (5, 0), textcoords="offset points", va="center",
            fontsize=SMALL, color=INK,
        )  # fmt: skip


def _draw_fresh(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Draw milliseconds: for each side a mark for each stream, with a line to its 95th percentile."""
    panels: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        panels.setdefault(f"{row['case']}, {row['step']}", []).append(row)
    counts = [len(_each(panel, "side")) for panel in panels.values()]
    figure = new_figure(0.27 * sum(counts) + 0.8 * len(counts) + 1.2)
    grid = figure.subplots(len(panels), 1, squeeze=False, height_ratios=[count + 1 for count in counts])
    for axes, (heading, here) in zip(grid[:, 0], panels.items(), strict=True):
        sides = _each(here, "side")[::-1]
        for number, stream in enumerate(_each(rows, "stream")):
            drawn = [row for row in here if row["stream"] == stream]
            colour = NEUTRAL if number == 0 else COLOURS[number - 1]
            at = [sides.index(row["side"]) + 0.12 - 0.12 * number for row in drawn]
            times, high = ([row[key] for row in drawn] for key in ("milliseconds", "p95"))
            axes.hlines(at, times, high, color=colour, linewidth=1.2)
            axes.plot(times, at, MARKS[number], color=colour, markersize=5, linestyle="none", label=stream)
        axes.set_xscale("log")
        axes.set_yticks(range(len(sides)), sides)
        axes.set_ylim(-0.6, len(sides) - 0.4)
        dress(axes, heading, grid="x")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_locator(NullLocator())
    add_legend(figure)
    save(figure, f"{title}\nms, log scale (lower is better); lines end at the 95th percentile", path)


def _each(rows: Iterable[Mapping[str, Any]], key: str) -> list[str]:
    return list(dict.fromkeys(row[key] for row in rows))
