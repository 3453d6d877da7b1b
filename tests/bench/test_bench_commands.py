"""Promises of `attnreg bench`: right before fast, what it prints and writes, nothing left changed."""

import dataclasses
import importlib.util
import json
import math

import pytest
import torch
from matplotlib.image import imread
from support.command_line import invoke, words

import attnreg
from attnreg.core import aten, registry
from attnreg.core.policy import current as policy
from attnreg.core.times.tables import SHIPPED
from attnreg.tools.bench import selection
from attnreg.tools.bench.report import Job
from attnreg.tools.bench.selection import ADAPTIVE, ALL, CHOSEN, ORDER, TORCH
from attnreg.tools.bench.shapes import BOTH, FORWARD, decode, dense, packed

COMMANDS = ("varlen", "sdpa", "overhead", "selection", "fresh")
OF_A_GPU = str(SHIPPED / "nvidia-h200.json")
ANOTHER_KIND = f"--table: {OF_A_GPU}: it is of another kind of device than cpu"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def bench(monkeypatch):
    """Run a command on this CPU in its smallest form: shapes that take microseconds."""
    small = [dense(2, 24, 2, 2, 16, True, "float32"), packed([20, 7, 3], 2, 1, 16, False, "float32"),
             decode(2, 1, 40, 2, 2, 16, "float32")]  # fmt: skip
    for name, value in {
        "selection.COUNTS": (3, 3),
        "selection.drawn": lambda seed, number, device: small[number],
        "varlen.pull_request": lambda _: [packed([9, 16], 2, 2, 16, True, "float32")],
        "sdpa.sdpa_grid": lambda _: [dense(2, 24, 4, 2, 16, True, "float32")] * 2,
        "compare.SECONDS": 1e-4,
        "selection.SECONDS": 1e-4,
        "varlen.matmul_rate": lambda *_: 1e12,
        "sdpa.matmul_rate": lambda *_: 1e12,
        "fresh.turns.EACH": 2,
        "fresh.turns.FIRST": 2,
        "fresh.turns.CHECKED": 1,
    }.items():
        monkeypatch.setattr(f"attnreg.tools.bench.{name}", value)
    monkeypatch.setenv("COLUMNS", "100")
    return lambda *arguments: invoke("bench", *arguments, "--device", "cpu")


@pytest.fixture
def measured(bench):
    """Run a command and return its results."""

    def run(*arguments):
        ended = bench(*arguments, "--quick", "--rounds", "1", "--json")
        assert ended.exit_code == 0, ended.output
        found = json.loads(ended.stdout)
        assert found["machine"]["torch"] == torch.__version__
        return found["results"]

    return run


def test_varlen_times_each_backend_by_name_and_counts_flops(measured):
    found = measured("varlen")
    assert found["lengths"] == [9, 16]
    torchs, ours = {"forward": "torch", "backward": "torch"}, {"default": "cpu", "cpu": "cpu", "math": "math"}
    rows = {(row["step"], row["side"]): row for row in found["rows"]}
    sides = {"SDPA, padded": torchs, "SDPA, padded, mask": torchs}
    sides |= {f"attnreg, {name}": {"forward": ran, "backward": ran} for name, ran in ours.items()}
    assert {side for _, side in rows} == sides.keys()
    for (step, side), row in rows.items():
        flops = 4 * 16 * 2 * (9 * 9 + 16 * 16) / 2 * (3.5 if step == BOTH else 1)
        assert row["teraflops"] == pytest.approx(flops / (row["milliseconds"] / 1e3) / 1e12)
        assert row["of_matmul_rate"] == pytest.approx(row["teraflops"])
        assert 0 < row["error"] <= 1 and row["yardstick"] == "SDPA, padded, mask"
        assert row["ran"] == sides[side]


def test_sdpa_times_torch_the_choice_and_each_backend(measured):
    rows = measured("sdpa", "--backend", "math")["rows"]
    assert {row["side"] for row in rows} == {"torch SDPA", CHOSEN, "attnreg, math"}
    assert {row["ran"]["forward"] for row in rows if row["side"] == "attnreg, math"} == {"math"}
    assert {row["times_yardstick"] for row in rows if row["side"] == "torch SDPA"} == {1.0}
    assert {row["step"] for row in rows} == {FORWARD, BOTH}


def groups(rows):
    return [row["case"].partition(" ")[0] for row in rows]


@pytest.mark.slow
def test_selection_divides_what_it_measured(measured):
    found = measured("selection")
    assert (found["seed"], groups(found["rows"])) == ("repeatable", ["dense", "packed", "decode"])
    losses = {FORWARD: [], BOTH: []}
    for row in found["rows"]:
        assert set(row["rounds"]) == ({FORWARD} if row["case"].startswith("decode") else {FORWARD, BOTH})
        assert row["ran"]["always math"][FORWARD] == "math" and row["ran"][CHOSEN][FORWARD] == "cpu"
        ways = {CHOSEN, ORDER, ADAPTIVE, "always cpu", "always math"}
        # Torch has no kernel for packed sequences on a CPU.
        assert set(row["ran"]) == ways | (set() if row["case"].startswith("packed") else {TORCH})
        for step, (times,) in ((step, zip(*rounds.values())) for step, rounds in row["rounds"].items()):  # noqa: B905
            named = dict(zip(row["rounds"][step], times, strict=True))
            losses[step].append(named[CHOSEN] / min(named["always cpu"], named["always math"]))
    means = {
        row["step"]: row["mean"] for row in found["summary"] if (row["way"], row["bound"]) == (CHOSEN, ALL)
    }
    assert means == pytest.approx({step: sum(each) / len(each) for step, each in losses.items()}, rel=1e-3)
    assert found["table"] == "the default order, as no table is in force"


def out_of_memory(_):
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("change", "limits", "why"),
    [
        (lambda x: x * 0.5, {}, "WRONG: out of sequence "),
        (lambda x: x * math.nan, {}, "WRONG: out has values that aren't finite"),
        (out_of_memory, {}, "OutOfMemoryError: CUDA out of memory"),
        (lambda x: x, {"causal": False}, "ran cpu (forward), cpu (backward); "),
    ],
    ids=["wrong", "NaN", "out of memory", "another backend"],
)
def test_a_side_that_is_wrong_fails_or_ran_another_backend_is_left_out(bench, fake, change, limits, why):
    backend = fake("mine", **limits).backend
    right = backend.load()
    changed = right._replace(forward=lambda *given: tuple(map(change, right.forward(*given))))
    with attnreg.register_backend(dataclasses.replace(backend, load=lambda: changed)):
        ended = bench("varlen", "--quick", "--rounds", "1", "--backend", "mine,math", "--json")
    found = json.loads(ended.stdout)
    sides = {row["side"] for row in found["results"]["rows"]}
    assert "attnreg, math" in sides and "attnreg, mine" not in sides
    assert any(f"attnreg, mine: {why}" in line for line in found["left_out"])


# What two of these measure is held part by part in test_bench_fresh.py and test_bench_parts.py.
@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_each_prints_a_table_saves_json_and_draws(bench, command, tmp_path):
    out, plot = tmp_path / "found.json", tmp_path / "found.png"
    ended = bench(command, "--quick", "--rounds", "1", "--out", str(out), "--plot", str(plot))
    assert ended.exit_code == 0, ended.output
    assert f"torch {torch.__version__}" in ended.stdout and "forward" in ended.stdout
    assert json.loads(out.read_text())["results"]
    picture = imread(plot)
    assert picture.shape[0] > 300 and picture.shape[1] > 600
    assert len({tuple(pixel) for pixel in picture[::5, ::5].reshape(-1, picture.shape[2]).round(2)}) > 5


@pytest.mark.slow
def test_what_a_spent_budget_left_is_said_and_the_rest_kept_and_drawn(bench, monkeypatch, tmp_path):
    spent, out, plot = iter([False, True]), tmp_path / "found.json", tmp_path / "found.svg"
    monkeypatch.setattr(Job, "late", property(lambda job: next(spent)))
    given = ("--rounds", "1", "--budget", "60s", "--out", str(out), "--plot", str(plot))
    ended = bench("selection", *given)
    assert ended.exit_code == 0 and "2 of 3 cases: the time was spent" in ended.stdout
    kept = json.loads(out.read_text())
    assert len(kept["results"]["rows"]) == 1 and kept["left_out"] == ["2 of 3 cases: the time was spent"]
    assert "<svg" in plot.read_text()


def test_where_nothing_was_measured_nothing_can_run(bench):
    ended = bench("selection", "--rounds", "1", "--budget", "0.000001s", "--json")
    assert ended.exit_code == 1 and "the time was spent" in ended.stderr
    assert json.loads(ended.stdout)["error"]["type"] == "BackendUnavailableError"


def test_without_a_backend_or_a_yardstick_that_runs_nothing_is_measured(bench, monkeypatch):
    monkeypatch.setattr("attnreg.tools.bench.varlen.checked", lambda *_: {})
    ended = bench("varlen", "--quick", "--rounds", "1")
    assert ended.exit_code == 1
    assert "are the yardsticks, and neither runs here" in words(ended)
    monkeypatch.setenv("ATTNREG_STRICT", "1")
    monkeypatch.setenv("ATTNREG_DISABLE", "cpu,math")
    attnreg.reload()
    ended = bench("selection", "--quick", "--rounds", "1")
    assert (ended.exit_code, ended.stderr) == (1, "attnreg: no backend can be measured on cpu\n")


def test_what_was_done_before_ctrl_c_is_kept(bench, monkeypatch, tmp_path):
    measured, out = selection._row, tmp_path / "found.json"

    def interrupted(shape, job, **options):
        if shape.varlen:
            raise KeyboardInterrupt
        return measured(shape, job, **options)

    monkeypatch.setattr(selection, "_row", interrupted)
    ended = bench("selection", "--rounds", "1", "--out", str(out))
    assert ended.exit_code == 130 and str(out) in ended.stderr.replace("\n", "")
    assert groups(json.loads(out.read_text())["results"]["rows"]) == ["dense"]
    ended = bench("selection", "--rounds", "1", "--json")
    assert (ended.exit_code, ended.stderr) == (130, "")
    assert groups(json.loads(ended.stdout)["results"]["rows"]) == ["dense"]


@pytest.mark.parametrize(
    ("given", "code", "message"),
    [
        (("varlen", "--backend", "mth"), 2, "did you mean 'math'?"),
        (("varlen", "--backend", "FA2"), 1, "--backend: FA2 runs on cuda only"),
        (("sdpa", "--plot", "found.pdf"), 2, "expected a file named .png or .svg"),
        (("sdpa", "--out", "/nowhere/found.json"), 2, "--out: "),
        (("selection", "--table", "/nowhere/table.json"), 2, "can't be read"),
        (("selection", "--quick", "--table", OF_A_GPU), 2, ANOTHER_KIND),
        (("sdpa", "--quick", "--table", OF_A_GPU), 2, ANOTHER_KIND),
        (("selection", "--budget", "soon"), 2, "expected a time"),
        (("overhead", "--rounds", "0"), 2, "rounds"),
        (("fresh", "--part", "packed"), 2, "--part: got 'packed', expected all or some of varlen, decode"),
        (("fresh", "--part", "varlen,decod"), 2, "did you mean 'decode'?"),
        (("fresh", "--part", "varlen,"), 2, "expected names separated by commas"),
        (("fresh", "--quick", "--table", OF_A_GPU), 2, ANOTHER_KIND),
        (("speed",), 2, "speed"),
    ],
)
def test_bad_input_is_an_error_before_anything_is_measured(bench, given, code, message):
    ended = bench(*given)
    assert ended.exit_code == code and message in ended.stderr.replace("\n", " ")


def test_without_matplotlib_a_plot_is_refused_in_one_sentence(bench, monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    ended = bench("varlen", "--plot", str(tmp_path / "found.png"))
    assert ended.exit_code == 2
    assert ended.stderr == "attnreg: --plot needs matplotlib: pip install 'attnreg[plots]'\n"


@pytest.mark.slow
def test_settings_and_routers_are_afterwards_as_they_were(bench, monkeypatch):
    monkeypatch.setenv("ATTNREG_DISABLE", "cpu")
    attnreg.reload()
    monkeypatch.setattr(selection, "COUNTS", (1, 1))
    before, installed = policy.sources(), aten.installed()
    assert bench("selection", "--quick", "--rounds", "1", "--backend", "math").exit_code == 0
    assert (policy.sources(), aten.installed(), registry.registrations()) == (before, installed, ())
    assert not policy._active


def test_what_bench_has_not_written_it_does_not_replace(bench, tmp_path):
    file = tmp_path / "program.py"
    file.write_text("import torch")
    ended = bench("overhead", "--quick", "--rounds", "1", "--out", str(file))
    assert ended.exit_code == 2
    assert "exists, and isn't a file that this command writes: give another file" in words(ended)
    assert file.read_text() == "import torch"
