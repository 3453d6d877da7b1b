"""Promises of the pictures of benchmarks: one style, readable at page width, from committed files."""

import importlib.util
import itertools
import json
import sys
from pathlib import Path

import pytest
from matplotlib.text import Text

from attnreg.tools import drawing
from attnreg.tools.bench import plots

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"


@pytest.fixture(scope="module")
def redraw():
    """Return the script that draws the pictures of docs/results/."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        spec = importlib.util.spec_from_file_location("redraw", ROOT / "benchmarks" / "redraw.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    for name in ("context_parallel_simulated", "_runs"):
        sys.modules.pop(name, None)


@pytest.fixture
def saved(monkeypatch):
    """Keep figures in the place of writing them: title, figure, path."""
    figures = []
    keep = lambda figure, title, path: figures.append((title, figure, path))  # noqa: E731
    monkeypatch.setattr(plots, "save", keep)
    monkeypatch.setattr(drawing, "save", keep)
    return figures


@pytest.mark.slow
def test_every_picture_of_the_docs_is_drawn_from_a_committed_file_and_readable(redraw, saved, tmp_path):
    redraw.redraw_all(tmp_path)
    assert {path.name for *_, path in saved} == {file.name for file in RESULTS.glob("*.png")}
    for title, figure, path in saved:
        assert figure.get_size_inches()[0] == drawing.PAGE, path
        texts = [text for text in figure.findobj(Text) if text.get_text()]
        assert min(text.get_fontsize() for text in texts) >= 9, path
        assert max(map(len, title.splitlines())) < 90, path
        assert all(axes.get_title(loc="left") for axes in figure.axes if axes.get_visible())


def axes_of(saved):
    ((_, figure, _),) = saved
    return {axes.get_title(loc="left"): axes for axes in figure.axes if axes.get_visible()}


def test_small_multiples_have_one_scale(redraw, saved):
    for name, run, limits in (
        ("sdpa", "sdpa_gpu", "get_ylim"),
        ("overhead", "overhead_compiled_gpu", "get_xlim"),
    ):
        saved.clear()
        document = redraw.read(RESULTS / f"{run}.json")
        plots.draw(name, document["results"], Path("x.png"), document["machine"])
        assert len({getattr(axes, limits)() for axes in axes_of(saved).values()}) == 1


def test_a_backend_that_runs_nothing_of_a_panel_is_drawn_in_the_others(redraw, saved):
    document = redraw.read(RESULTS / "sdpa_gpu.json")
    rows = [row for row in document["results"]["rows"] if row["panel"].startswith("head dim 64")]
    panel = "head dim 64, 32:32 heads"
    whole = [row for row in rows if (row["panel"], row["side"]) == (panel, "attnreg, FA2")]
    rows += [row | {"side": "attnreg, efficient"} for row in whole]
    plots.draw("sdpa", document["results"] | {"rows": rows}, Path("x.png"), document["machine"])
    drawn = {
        heading
        for heading, axes in axes_of(saved).items()
        if "attnreg, efficient" in [line.get_label() for line in axes.lines]
    }
    assert drawn == {f"forward\n{panel}", f"forward + backward\n{panel}"}


def test_choices_are_drawn_as_shares_of_shapes(redraw, saved):
    document = redraw.read(RESULTS / "selection_gpu.json")
    plots.draw("selection", document["results"], Path("x.png"), document["machine"])
    found = axes_of(saved)
    assert [*found] == ["forward, 58 shapes", "forward + backward, 44 shapes"]
    chosen = next(line for line in found["forward, 58 shapes"].lines if line.get_label() == plots.CHOSEN)
    assert chosen.get_ydata()[57] == 1.0 and sorted(chosen.get_xdata()) == list(chosen.get_xdata())


def test_what_a_call_costs_has_its_spread_where_the_file_has_it(saved):
    sides = {"torch": {"forward": 20.0}, "attnreg": {"forward": 30.0}}
    results = {"SDPA": sides, "quartiles": {"SDPA": {"attnreg": {"forward": [28.0, 33.0]}}}}
    machine = json.loads((RESULTS / "sdpa_gpu.json").read_text())["machine"]
    plots.draw("overhead", results, Path("x.png"), machine)
    (axes,) = axes_of(saved).values()
    assert "the middle half of the rounds" in saved[0][0]
    (drawn,) = (path.vertices.tolist() for lines in axes.collections for path in lines.get_paths())
    assert drawn == [[28.0, 0.0], [33.0, 0.0]]
    assert [text.get_text() for text in axes.texts] == ["30.0", "20.0"]


def test_a_case_of_calls_with_new_lengths_stands_once_and_its_times_have_three_digits(redraw, saved):
    document = redraw.read(RESULTS / "fresh_varlen_h200.json")
    plots.draw("fresh", document["results"], Path("x.png"), document["machine"])
    ((title, figure, _),) = saved
    assert title.splitlines()[2] == "lower is better; lines end at the 95th percentile"
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "packed, 8 of up to 256 tokens, 8 heads of 64, causal\nforward + backward",
        "\nforward",
        "packed, 8 of up to 4096 tokens, 16 heads of 128, causal\nforward + backward",
        "\nforward",
    ]
    shown = {text.get_text() for axes in figure.axes for text in axes.texts}
    assert {"1.33", "1.35", "0.0373", "0.505"} <= shown


@pytest.mark.slow
def test_labels_of_times_that_differ_much_do_not_touch_and_long_titles_fit(monkeypatch, tmp_path):
    figures = []
    monkeypatch.setattr(
        plots, "save", lambda figure, *rest: (figures.append(figure), drawing.save(figure, *rest))
    )
    sides = {"attnreg": dict.fromkeys(("forward, no grad", "forward, grad", "forward + backward"), 2.4)}
    sides |= {"attnreg, math, use_backend()": dict.fromkeys(sides["attnreg"], 4806.0)}
    machine = {
        "processor": "AMD EPYC 7R13 Processor of a name that is longer than most, " * 2,
        "torch": "2.13.0",
    }
    plots.draw("overhead", {"varlen_attn": sides, "SDPA": sides}, tmp_path / "x.png", machine)
    (figure,) = figures
    assert {text.get_text() for axes in figure.axes for text in axes.texts} == {"2.40", "4806"}
    for axes in figure.axes:
        low, high = axes.get_xlim()
        labels = [label for label in axes.get_xticklabels() if low < label.get_position()[0] < high]
        ends = [label.get_window_extent() for label in labels]
        assert [label.get_text() for label in labels][-2:] == ["1000", "10k"]
        assert all(one.x1 + 5 < other.x0 for one, other in itertools.pairwise(ends))
    assert all(text.get_window_extent().x1 <= figure.bbox.x1 for text in figure.texts)
