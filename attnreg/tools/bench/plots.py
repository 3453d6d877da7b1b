"""Pictures of what was measured: TFLOP/s under a ceiling, ratios from case to case, microseconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from attnreg.tools.bench.losses import losses
from attnreg.tools.bench.overhead_cpu import QUESTIONS
from attnreg.tools.bench.report import machine
from attnreg.tools.bench.shapes import BACKWARD, BOTH, FORWARD
from attnreg.tools.bench.summary import CHOSEN, DIRECT, FIXED

# By title: the cases, and for each strategy a ratio for each case.
Panels = dict[str, tuple[list[str], dict[str, list[float | None]]]]

TITLES = {
    "varlen": "Packed sequences through varlen_attn",
    "sdpa": "Dense calls through scaled_dot_product_attention",
    "overhead": "What a call costs the host",
    "selection": "Shapes that no table was tuned on",
    "fresh": "Calls with new lengths, beside the same batch repeated",
}

# Greys for torch, then Okabe and Ito's palette: distinct for every kind of colour vision. What attnreg
# chooses, and each backend, has the same colour in every picture.
GREYS = ("#404040", "#8C8C8C", "#D0D0D0")
COLOURS = ("#D55E00", "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#F0E442")
OF_BACKENDS = dict(zip(("FA2", "FA4", "cuDNN", "cpu", "math"), COLOURS[1:], strict=False))
MARKS = "osD^vP*X<>"
INK, FAINT = "#333333", "#D9D9D9"
# The first strategy is a line in front of the others' marks.
FIRST: dict[str, Any] = {"markersize": 6.5, "linestyle": "-", "linewidth": 1.6, "zorder": 5}
OTHERS: dict[str, Any] = {"markersize": 5, "linestyle": "none", "zorder": 3}

# What names of attnreg's rows end in, where they don't have its own.
OURS = ("registered", "active", "use_backend()", "backend=")

# Past these a ratio is drawn at the edge: one bad choice must not flatten all others.
LEAST, MOST = 0.8, 8.0


def draw(name: str, results: Any, path: Path, known: Mapping[str, str] | None = None) -> None:
    """Write the picture of a measurement, as PNG or SVG by its suffix; `known` describes the machine."""
    known = known or machine()
    where = known.get("gpu", known["processor"])
    title = f"{TITLES[name]}, {where}, torch {known['torch']}"
    if "seed" in results:
        _draw_losses(results["rows"], f"{title}, seed {results['seed']}", path)
    elif name == "selection":
        _draw_ratios(_panels(results["rows"]), title, path)
    elif name == "fresh":
        _draw_fresh(results["rows"], title, path)
    elif name == "overhead":
        _draw_times(_costs(results), title, path)
    else:
        _draw_speeds(results["rows"], results["matmul_teraflops"], title, path)


def _panels(rows: Sequence[Mapping[str, Any]]) -> Panels:
    """Return for each direction its cases, the best choice first, and each strategy's ratios to the best.

    The best is the best fixed order of backends, through the same front.
    """
    panels = {}
    for direction in (FORWARD, BACKWARD):
        ratios = {}
        for row in rows:
            measured = row["directions"].get(direction, {"front": ()})
            if CHOSEN not in measured["front"]:
                continue
            times = dict(measured["front"])
            if measured["called_directly"]:
                times[DIRECT] = min(measured["called_directly"].values())
            best = min(time for name, time in times.items() if name.startswith(FIXED))
            ratios[row["case"]] = {name: time / best for name, time in times.items()}
        cases = sorted(ratios, key=lambda case, ratios=ratios: ratios[case][CHOSEN])  # type: ignore[misc]
        names = dict.fromkeys(name for by_strategy in ratios.values() for name in by_strategy)
        if cases:
            title = f"{direction}: time over that of the best backend through the same front"
            panels[title] = (cases, {name: [ratios[case].get(name) for case in cases] for name in names})
    return panels


def _costs(results: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return microseconds by question and side, from results of a CPU or a GPU."""
    titles = {key: title for title, (key, *_) in QUESTIONS.items()}
    costs: dict[str, dict[str, float]] = {}
    for part, rows in results.items():
        if isinstance(rows, list):
            costs[titles.get(part, part)] = {row["name"]: row["microseconds"] for row in rows}
            continue
        for side, steps in rows.items():
            for step, microseconds in steps.items():
                costs.setdefault(f"{part}: {step}", {})[side] = microseconds
    return costs


def _draw_speeds(rows: Sequence[Mapping[str, Any]], ceiling: float, title: str, path: Path) -> None:
    """Draw rows with `panel`, `case`, `step`, `side` and `teraflops`, below the ceiling in TFLOP/s.

    A panel for each step; where the rows name panels of their own, steps are columns.
    """
    panels, steps = _each(rows, "panel"), _each(rows, "step")
    sides = _colours(_each(rows, "side"))
    down, across = (len(steps), 1) if len(panels) == 1 else (len(panels), len(steps))
    most = max(len(_each([row for row in rows if row["panel"] == panel], "case")) for panel in panels)
    width = min(max(10.0, 0.22 * most * len(sides) + 2), 16.0) / (1 if across == 1 else 1.6)
    figure = Figure(figsize=(width * across, 3.6 * down + 1.2), dpi=120, layout="constrained")
    grid = figure.subplots(down, across, squeeze=False).flat
    for axes, (panel, step) in zip(grid, [(p, s) for p in panels for s in steps], strict=True):
        here = [row for row in rows if (row["panel"], row["step"]) == (panel, step)]
        _bars(axes, here, sides, ceiling)
        _dressed(axes, ", ".join(filter(None, (panel, step))), "TFLOP/s (higher is better)")
    _save_with_legend(figure, title, path)


def _bars(axes: Axes, rows: Sequence[Mapping[str, Any]], sides: Mapping[str, str], ceiling: float) -> None:
    speeds = {(row["case"], row["side"]): row["teraflops"] for row in rows}
    cases, width = _each(rows, "case"), 0.84 / len(sides)
    for place, (side, colour) in enumerate(sides.items()):
        at = [number - 0.42 + width * (place + 0.5) for number in range(len(cases))]
        axes.bar(
            at, [speeds.get((case, side), 0.0) for case in cases], width * 0.92, color=colour, label=side
        )
    label = f"matmul, as measured: {ceiling:.3g} TFLOP/s"
    axes.axhline(ceiling, color=INK, linestyle="--", linewidth=1.2, label=label)
    axes.set_ylim(0, 1.08 * max(ceiling, *speeds.values()))
    axes.set_xlim(-0.6, len(cases) - 0.4)
    axes.set_xticks(range(len(cases)), cases, fontsize=8)


def _draw_ratios(panels: Panels, title: str, path: Path) -> None:
    """Draw ratios to the best: for each panel its cases along the axis, and a mark for each strategy."""
    names = _colours(dict.fromkeys(name for _, series in panels.values() for name in series))
    most = max(len(cases) for cases, _ in panels.values())
    size = (min(max(9.0, 0.24 * most + 3), 24.0), 5.2 * len(panels) + 0.8)
    figure = Figure(figsize=size, dpi=120, layout="constrained")
    for axes, (heading, (cases, series)) in zip(
        figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels.items(), strict=True
    ):
        for number, (name, ratios) in enumerate(series.items()):
            known = {place: ratio for place, ratio in enumerate(ratios) if ratio is not None}
            shown = [min(max(ratio, LEAST), MOST) for ratio in known.values()]
            style = FIRST if number == 0 else OTHERS
            axes.plot([*known], shown, MARKS[number % len(MARKS)], label=name, color=names[name], **style)
        axes.axhline(1.0, color=INK, linewidth=1.0)
        _dressed(axes, heading, "ratio, log scale (lower is better)")
        axes.set_yscale("log")
        top = max(ratio for series_ in series.values() for ratio in series_ if ratio is not None)
        axes.set_ylim(LEAST * 0.97, min(max(top * 1.1, 1.3), MOST * 1.1))
        axes.set_yticks(
            [tick for tick in (0.8, 0.9, 1, 1.15, 1.5, 2, 3, 4, 6, 8) if tick <= axes.get_ylim()[1]]
        )
        axes.yaxis.set_major_formatter(FuncFormatter(_ratio))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_xticks(
            range(len(cases)), cases, rotation=60, ha="right", rotation_mode="anchor", fontsize=7.5
        )
        axes.set_xlim(-0.7, len(cases) - 0.3)
        axes.grid(axis="x", color=FAINT, linewidth=0.4)
    _save_with_legend(figure, title, path)


def _draw_losses(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Draw which share of the shapes loses at most so much: a panel for each step, a line for each way."""
    steps = [step for step in (FORWARD, BOTH) if losses(rows, step)]
    figure = Figure(figsize=(6.0 * len(steps), 5.2), dpi=120, layout="constrained")
    for axes, step in zip(figure.subplots(1, len(steps), squeeze=False)[0], steps, strict=True):
        by_way = losses(rows, step)
        for name, colour in _colours(by_way).items():
            ratios = [*sorted(by_way[name]), 1e3]  # the line goes on to the edge
            shares = [min((number + 1) / len(by_way[name]), 1.0) for number in range(len(ratios))]
            width, order = (2.4, 5) if name == CHOSEN else (1.4, 3)
            axes.step(ratios, shares, where="post", label=name, color=colour, linewidth=width, zorder=order)
        heading = f"{step}, {max(map(len, by_way.values()))} shapes"
        _dressed(axes, heading, "share of the shapes that lose at most that (higher is better)")
        axes.set_xscale("log")
        axes.set_xlim(0.97, 2.5)
        axes.set_ylim(0.0, 1.01)
        axes.set_xticks([1, 1.05, 1.15, 1.3, 1.5, 2, 2.5])
        axes.xaxis.set_major_formatter(FuncFormatter(_ratio))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("time over that of the best backend, log scale", color=INK, fontsize=9)
        axes.grid(axis="x", color=FAINT, linewidth=0.6)
    _save_with_legend(figure, title, path)


def _ratio(value: float, place: Any) -> str:
    at_the_edge = f"≥ {value:g}" if value >= MOST else f"≤ {value:g}"
    return at_the_edge if value in (LEAST, MOST) else f"{value:g}"


def _draw_times(parts: Mapping[str, Mapping[str, float]], title: str, path: Path) -> None:
    """Draw microseconds as bars from left to right, a panel for each question."""
    counts = [len(sides) for sides in parts.values()]
    figure = Figure(figsize=(10, 0.36 * sum(counts) + 0.9 * len(counts) + 0.8), dpi=120, layout="constrained")
    grid = figure.subplots(len(parts), 1, squeeze=False, height_ratios=[count + 1 for count in counts])
    for axes, (part, sides) in zip(grid[:, 0], parts.items(), strict=True):
        names = list(sides)[::-1]
        colours = [COLOURS[0] if "attnreg" in name or name.endswith(OURS) else GREYS[1] for name in names]
        drawn = axes.barh(names, [sides[name] for name in names], height=0.7, color=colours)
        axes.bar_label(drawn, fmt="{:.1f}", padding=4, color=INK, fontsize=8)
        axes.set_xlim(0, 1.12 * max(sides.values()))
        _dressed(axes, f"{part}, µs (lower is better)", "")
        axes.tick_params(axis="y", length=0, labelsize=8)
        axes.grid(visible=False)
    _save(figure, title, path)


def _draw_fresh(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Draw milliseconds: for each side a mark for each stream, with a line to its 95th percentile."""
    panels: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        panels.setdefault(f"{row['case']}, {row['step']}", []).append(row)
    counts = [len(_each(panel, "side")) for panel in panels.values()]
    size = (11, 0.36 * sum(counts) + 0.95 * len(counts) + 1.2)
    figure = Figure(figsize=size, dpi=120, layout="constrained")
    grid = figure.subplots(len(panels), 1, squeeze=False, height_ratios=[count + 1 for count in counts])
    for axes, (heading, here) in zip(grid[:, 0], panels.items(), strict=True):
        sides = _each(here, "side")[::-1]
        for number, stream in enumerate(_each(rows, "stream")):
            drawn = [row for row in here if row["stream"] == stream]
            colour = GREYS[1] if number == 0 else COLOURS[number - 1]
            at = [sides.index(row["side"]) + 0.12 - 0.12 * number for row in drawn]
            times, high = ([row[key] for row in drawn] for key in ("milliseconds", "p95"))
            axes.hlines(at, times, high, color=colour, linewidth=1.2)
            axes.plot(times, at, MARKS[number], color=colour, markersize=5, linestyle="none", label=stream)
        axes.set_xscale("log")
        axes.set_yticks(range(len(sides)), sides)
        axes.set_ylim(-0.6, len(sides) - 0.4)
        _dressed(axes, heading, "")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.grid(axis="x", color=FAINT, linewidth=0.5)
    _save_with_legend(
        figure, f"{title}\nms, log scale (lower is better); lines end at the 95th percentile", path
    )


def _each(rows: Iterable[Mapping[str, Any]], key: str) -> list[str]:
    return list(dict.fromkeys(row[key] for row in rows))


def _colours(names: Iterable[str]) -> dict[str, str]:
    """Return a colour for each name: greys for torch's own, which don't go through attnreg."""
    backends = {name: name.removeprefix("attnreg, ").removeprefix("always ") for name in names}
    taken = {OF_BACKENDS[backend] for backend in backends.values() if backend in OF_BACKENDS}
    greys, colours = iter(GREYS), (colour for colour in COLOURS if colour not in taken)
    return {
        name: OF_BACKENDS.get(backend)
        or next(greys if name.startswith(("torch", "SDPA")) else colours, "#000000")
        for name, backend in backends.items()
    }


def _dressed(axes: Axes, title: str, y: str) -> None:
    axes.set_title(title, loc="left", color=INK, fontsize=10)
    axes.set_ylabel(y, color=INK, fontsize=9)
    axes.tick_params(colors=INK, labelsize=8)
    axes.grid(axis="y", color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)


def _save_with_legend(figure: Figure, title: str, path: Path) -> None:
    # A side may be missing in some panels; a line that isn't a side comes last.
    legends = [axes.get_legend_handles_labels() for axes in figure.axes]
    named = {label: handle for each in legends for handle, label in zip(*each, strict=True)}
    labels = sorted(named, key=lambda label: label.startswith("matmul"))
    figure.legend(
        [named[label] for label in labels], labels, frameon=False, ncols=min(len(labels), 5),
        loc="outside lower center", fontsize=9, labelcolor=INK,
    )  # fmt: skip
    _save(figure, title, path)


def _save(figure: Figure, title: str, path: Path) -> None:
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
