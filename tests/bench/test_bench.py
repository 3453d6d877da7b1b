"""Promises of `attnreg bench`: right before fast, a ratio is what it says, and nothing is left changed."""

import contextlib
import importlib.util
import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from matplotlib.image import imread
from typer.testing import CliRunner

import attnreg
from attnreg import _registry, aten, cli, tuning
from attnreg.bench import cases, contexts, figures, fronts, overhead_gpu, selection, sides, strategies
from attnreg.bench.compare import wrong_backend
from attnreg.bench.inputs import Batch
from attnreg.bench.joined import joined
from attnreg.bench.overhead_gpu import ALONE
from attnreg.bench.report import Job
from attnreg.bench.shapes import BACKWARD, BOTH, FORWARD, decode, dense, packed, ragged
from attnreg.bench.summary import BY_HAND, CHOSEN, FIXED, SAME_FRONT, TORCH, aims, gains, ratios, summary
from attnreg.bench.timing import calls_for, interleaved, median_ratio
from attnreg.bench.truth import Truth
from attnreg.contract.spec import Device
from attnreg.errors import ConfigError
from attnreg.selection import policy
from attnreg.selection.sources import Sources
from attnreg.torchlib import captured
from attnreg.tuning.grids import grid
from attnreg.tuning.kinds import kind_of, size_of
from attnreg.tuning.table import load

CPU = torch.device("cpu")
COMMANDS = ("varlen", "sdpa", "overhead", "selection")
SHIPPED = Path(tuning.__file__).parent / "shipped"


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def a_hundred_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def bench(monkeypatch):
    """Run a command on this CPU in its smallest form: shapes that take microseconds."""
    small = [dense(2, 24, 2, 2, 16, True, "float32"), ragged(3, 20, 2, 1, 16, False, "float32"),
             decode(2, 1, 40, 2, 2, 16, "float32")]  # fmt: skip
    monkeypatch.setattr(cases, "SMALL", small)
    monkeypatch.setattr(
        "attnreg.bench.varlen.pull_request", lambda _: [packed([9, 16], 2, 2, 16, True, "float32")]
    )
    monkeypatch.setattr(
        "attnreg.bench.sdpa.sdpa_grid", lambda _: [dense(2, 24, 4, 2, 16, True, "float32")] * 2
    )
    monkeypatch.setattr("attnreg.bench.compare.SECONDS", 1e-4)
    monkeypatch.setattr("attnreg.bench.strategies.SECONDS", 1e-4)
    for module in ("varlen", "sdpa"):
        monkeypatch.setattr(f"attnreg.bench.{module}.matmul_rate", lambda *_: 1e12)

    def run(*arguments):
        given = [*arguments, "--device", "cpu"]
        return CliRunner().invoke(cli.app, ["bench", *given], obj=[])

    return run


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


def row_of(case, group, front, by_hand, direction=FORWARD):
    found = {"by_hand": by_hand, "front": front, "ratios": ratios(by_hand, front)}
    return {"case": case, "group": group, "directions": {direction: found}}


# What the commands measure


def test_varlen_times_each_backend_by_name_and_counts_flops(measured):
    found = measured("varlen")
    rows = {(row["step"], row["side"]): row for row in found["rows"]}
    assert {side for _, side in rows} == {
        "SDPA, padded", "SDPA, padded, mask", "attnreg, default", "attnreg, cpu", "attnreg, math",
    }  # fmt: skip
    for (step, side), row in rows.items():
        flops = 4 * 16 * 2 * (9 * 9 + 16 * 16) / 2 * (3.5 if step == BOTH else 1)
        assert row["teraflops"] == pytest.approx(flops / (row["milliseconds"] / 1e3) / 1e12)
        assert row["of_matmul_rate"] == pytest.approx(row["teraflops"])
        assert row["relative_error"] < 1e-5 and row["yardstick"] == "SDPA, padded, mask"
        named = side.removeprefix("attnreg, ")
        assert row["ran"] == dict.fromkeys(("forward", "backward"), {"default": "cpu"}.get(named, named)) or (
            side.startswith("SDPA") and set(row["ran"].values()) == {"torch"}
        )


def test_sdpa_times_torch_the_choice_and_each_backend(measured):
    rows = measured("sdpa", "--backend", "math")["rows"]
    assert {row["side"] for row in rows} == {"torch SDPA", CHOSEN, "attnreg, math"}
    assert {row["ran"]["forward"] for row in rows if row["side"] == "attnreg, math"} == {"math"}
    assert {row["times_yardstick"] for row in rows if row["side"] == "torch SDPA"} == {1.0}
    assert {row["step"] for row in rows} == {FORWARD, BOTH}


def test_overhead_keeps_the_names_of_what_was_measured_before(measured):
    found = measured("overhead")
    recorded = json.loads((Path(__file__).parents[2] / "docs/results/overhead.json").read_text())["results"]
    for part, rows in recorded.items():
        assert [row["name"] for row in found[part]] == [row["name"] for row in rows]
    for rows in found.values():
        assert all(row["microseconds"] > 0 for row in rows) and 1.0 in {row["ratio"] for row in rows}


def test_a_gpus_overhead_is_that_of_each_front_and_side(monkeypatch, routers):
    monkeypatch.setattr(overhead_gpu, "CALLS", 1)
    job = Job(CPU, ("cpu",), rounds=1)
    found = overhead_gpu.measure(job)
    steps = {"forward, no grad", "forward, grad", BOTH}
    assert {front: set(sides) for front, sides in found.results.items()} == {
        "varlen_attn": {"attnreg", "attnreg, cpu", f"attnreg, {ALONE}"},  # torch's own is a GPU's
        "SDPA": {"torch", "attnreg", "attnreg, cpu", f"torch, {ALONE}", f"attnreg, {ALONE}"},
    }
    assert all(set(one) == steps for sides in found.results.values() for one in sides.values())
    assert [line.partition(":")[0] for line in job.left_out] == [
        "varlen 2x128 h8 d64, torch",
        f"varlen 2x128 h8 d64, torch, {ALONE}",
        "varlen 2x128 h8 d64, aten op, C++ autograd",
    ]
    assert len(found.told) == 6 and all("aim" in line for line in found.told)


@pytest.mark.parametrize(
    ("taken", "torchs", "told"),
    [
        (20.0, 100.0, "attnreg, forward, grad: 20.0 µs, aim 30: reached; 0.20 of torch's, aim 0.36: reached"),
        (31.0, 80.0, "attnreg, forward, grad: 31.0 µs, aim 30: MISSED; 0.39 of torch's, aim 0.36: MISSED"),
        (31.0, 100.0, "attnreg, forward, grad: 31.0 µs, aim 30: MISSED; 0.31 of torch's, aim 0.36: reached"),
        (20.0, None, "attnreg, forward, grad: 20.0 µs, aim 30: reached"),
    ],
)
def test_an_aim_is_a_number_and_a_share_of_torchs(taken, torchs, told):
    assert overhead_gpu._aim("attnreg", "forward, grad", taken, torchs) == told


def test_autograd_in_the_callers_thread_is_so_for_as_long_as_a_side_is_measured():
    enabled = torch._C._is_multithreading_enabled
    assert enabled()
    with contexts.in_the_callers_thread(contextlib.nullcontext):
        assert not enabled()
    assert enabled()


def test_selection_divides_what_it_measured(measured):
    found = measured("selection")
    assert [row["group"] for row in found["rows"]] == ["dense", "varlen", "decode"]
    for row in found["rows"]:
        wanted = {FORWARD} if row["group"] == "decode" else {FORWARD, BACKWARD, BOTH}
        assert set(row["directions"]) == wanted
        assert row["ran"]["always math"][FORWARD] == "math" and row["ran"][CHOSEN][FORWARD] == "cpu"
        for one in row["directions"].values():
            assert set(one["by_hand"]) == {"cpu", "math"}
            fixed = min(one["front"]["always cpu"], one["front"]["always math"])
            for name, time in one["front"].items():
                assert one["ratios"][SAME_FRONT][name] == pytest.approx(time / fixed)
                best = min(one["by_hand"].values())
                assert one["ratios"][BY_HAND][name] == pytest.approx(time / best)
    means = [r for r in found["summary"] if (r["group"], r["direction"]) == ("dense", FORWARD)]
    dense_row = found["rows"][0]["directions"][FORWARD]["ratios"]
    assert {(r["yardstick"], r["strategy"]): r["mean"] for r in means} == pytest.approx(
        {(yardstick, name): ratio for yardstick, named in dense_row.items() for name, ratio in named.items()}
    )
    assert {aim["aim"] for aim in found["aims"]} == {1.02, 1.15, 1.10} and found[
        "table"
    ] == "the default order, as no table is in force"


def test_a_side_that_is_wrong_is_left_out_and_said_so(bench, fake):
    recorder = fake("halved")
    whole = recorder.backend.load()
    wrong = attnreg.Backend(
        name="halved", forward=recorder.backend.forward, backward=recorder.backend.backward,
        load=lambda: attnreg.Kernels(lambda *a: tuple(x / 2 for x in whole.forward(*a)), whole.backward),
    )  # fmt: skip
    with attnreg.register_backend(wrong):
        ended = bench("varlen", "--quick", "--rounds", "1", "--backend", "halved,math", "--json")
    found = json.loads(ended.stdout)
    assert {row["side"] for row in found["results"]["rows"]} >= {"attnreg, math"}
    assert "attnreg, halved" not in {row["side"] for row in found["results"]["rows"]}
    assert any("attnreg, halved: WRONG, relative error" in line for line in found["left_out"])


def test_a_side_that_ran_another_backend_is_told_apart():
    assert wrong_backend("FA4", {"forward": "FA4", "backward": "FA4"}) == ""
    assert wrong_backend("FA4", {"forward": "FA4", "backward": "FA2"}) == "ran FA4 (forward), FA2 (backward)"
    assert wrong_backend("FA4", {"forward": "FA4", "backward": "torch"}, backward=False) == ""


# What it prints, writes and answers


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


def test_an_svg_is_one_too(bench, tmp_path):
    ended = bench("selection", "--quick", "--rounds", "1", "--plot", str(tmp_path / "found.svg"))
    assert ended.exit_code == 0 and "<svg" in (tmp_path / "found.svg").read_text()


def test_what_a_spent_budget_left_is_said_and_the_rest_kept(bench, monkeypatch, tmp_path):
    spent, out = iter([False, True]), tmp_path / "found.json"
    monkeypatch.setattr(Job, "late", property(lambda job: next(spent)))
    ended = bench("selection", "--rounds", "1", "--budget", "60s", "--out", str(out))
    assert ended.exit_code == 0 and "2 of 3 cases: the time was spent" in ended.stdout
    kept = json.loads(out.read_text())
    assert len(kept["results"]["rows"]) == 1 and kept["left_out"] == ["2 of 3 cases: the time was spent"]


def test_where_nothing_was_measured_nothing_can_run(bench):
    ended = bench("selection", "--rounds", "1", "--budget", "0.000001s", "--json")
    assert ended.exit_code == 1 and "the time was spent" in ended.stderr
    assert json.loads(ended.stdout)["error"]["type"] == "BackendUnavailableError"


def test_what_was_done_before_ctrl_c_is_kept(bench, monkeypatch, tmp_path):
    measured, out = selection._row, tmp_path / "found.json"

    def interrupted(shape, job):
        if shape.varlen:
            raise KeyboardInterrupt
        return measured(shape, job)

    monkeypatch.setattr(selection, "_row", interrupted)
    ended = bench("selection", "--rounds", "1", "--out", str(out))
    assert ended.exit_code == 130 and str(out) in ended.stderr.replace("\n", "")
    assert [row["group"] for row in json.loads(out.read_text())["results"]["rows"]] == ["dense"]
    ended = bench("selection", "--rounds", "1", "--json")
    assert (ended.exit_code, ended.stderr) == (130, "")
    assert [row["group"] for row in json.loads(ended.stdout)["results"]["rows"]] == ["dense"]


@pytest.mark.parametrize(
    ("given", "code", "told"),
    [
        (("varlen", "--backend", "mth"), 2, "did you mean 'math'?"),
        (("varlen", "--backend", "FA2"), 1, "--backend: FA2 serves cuda"),
        (("sdpa", "--plot", "found.pdf"), 2, "expected a file named .png or .svg"),
        (("sdpa", "--out", "/nowhere/found.json"), 2, "--out: "),
        (("selection", "--table", "/nowhere/table.json"), 2, "can't be read"),
        (("selection", "--budget", "soon"), 2, "expected a time"),
        (("overhead", "--rounds", "0"), 2, "rounds"),
        (("speed",), 2, "speed"),
    ],
)
def test_bad_input_is_answered_before_anything_is_measured(bench, given, code, told):
    ended = bench(*given)
    assert ended.exit_code == code and told in ended.stderr.replace("\n", " ")


def test_without_matplotlib_a_plot_is_refused_in_one_sentence(bench, monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    ended = bench("varlen", "--plot", str(tmp_path / "found.png"))
    assert ended.exit_code == 2
    assert ended.stderr == "attnreg: --plot needs matplotlib: pip install 'attnreg[plots]'\n"


def test_settings_and_routers_are_afterwards_as_they_were(bench, monkeypatch):
    monkeypatch.setenv("ATTNREG_DISABLE", "cpu")
    attnreg.reload()
    before, installed = policy.sources(), aten.installed()
    assert bench("selection", "--quick", "--rounds", "1", "--backend", "math").exit_code == 0
    assert (policy.sources(), aten.installed(), _registry.registrations()) == (before, installed, ())
    assert not policy._active


# What it measures by


def test_held_out_shapes_are_in_no_grid_and_in_no_table_that_ships():
    for device in (Device.parse("sm_90"), Device.parse("cpu")):
        kept = {(kind_of(spec, FORWARD), size_of(spec)) for spec in grid("full", device)}
        for file in SHIPPED.glob("*.json"):
            kept |= {(point.kind._replace(direction=FORWARD), point.size) for point in load(file).points}
        shapes = [shape.spec(device) for shape in cases.held_out(device.type)]
        assert not kept & {(kind_of(spec, FORWARD), size_of(spec)) for spec in shapes}
        assert len(set(shapes)) == len(shapes)


def test_held_out_shapes_vary_in_everything_early():
    shapes = cases.held_out("cuda")
    assert len(shapes) == 58
    for some in (shapes, shapes[:20]):
        assert {shape.group for shape in some} == {"dense", "varlen", "decode"}
        assert {shape.dim for shape in some} == {64, 96, 128} and {s.causal for s in some} == {True, False}
        assert {shape.heads[0] // shape.heads[1] for shape in some} >= {1, 4, 5, 8}
        assert {len(shape.lengths_q) % 2 for shape in some} == {0, 1}
    assert {max(shape.lengths_k) for shape in shapes} >= {192, 12000, 24000}
    assert cases.held_out("cuda") == shapes


def test_the_setting_of_the_pull_request():
    shapes = cases.pull_request("cuda")
    assert [(shape.dim, shape.causal) for shape in shapes] == [
        (64, False),
        (64, True),
        (128, False),
        (128, True),
    ]
    for shape in shapes:
        assert (len(shape.lengths_q), max(shape.lengths_q), shape.heads) == (8, 2048, (16, 16))
        assert all(length % 64 == 0 for length in shape.lengths_q) and shape.dtype == "bfloat16"
    assert {sum(shape.lengths_q) for shape in cases.sdpa_grid("cuda")} == {16384}


def test_flops_are_four_for_each_pair_and_dimension():
    shape = packed([3, 5], 2, 2, 8, causal=False)
    assert shape.flops(FORWARD) == 4 * 8 * 2 * (9 + 25)
    assert shape.flops(BACKWARD) == 2.5 * shape.flops(FORWARD) and shape.flops(BOTH) == 3.5 * shape.flops(
        FORWARD
    )
    assert packed([3, 5], 2, 2, 8, causal=True).flops(FORWARD) == shape.flops(FORWARD) / 2


@pytest.mark.parametrize(
    "shape",
    [
        dense(2, 9, 4, 2, 8, True, "float32"),
        ragged(3, 12, 4, 1, 8, True, "float32"),
        decode(2, 3, 11, 2, 2, 8, "float32"),
    ],
)
def test_the_truth_is_what_attention_is(shape):
    batch = Batch(shape, CPU)
    with attnreg.use_backend("math"):
        out = batch.with_attnreg(*batch.front_sets[0].inputs())
        grads = torch.autograd.grad(out, batch.front_sets[0].inputs(), batch.front_sets[0].grad)
    for everything in (False, True):
        truth = Truth(shape, batch.sets[0], everything)
        right = batch.contract((out, *grads))
        assert truth.error(right) < 1e-5 and truth.error(right[:1]) < 1e-5
        for number in range(4):
            wrong = [x.roll(1, 0) if n == number else x for n, x in enumerate(right)]
            assert truth.error(wrong) > 0.1, number
        assert math.isnan(truth.error([right[0] * torch.nan]))


def test_settings_that_cannot_be_read_are_set_aside_and_cannot_be_read_afterwards(monkeypatch):
    monkeypatch.setenv("ATTNREG_BACKEND", "nobody's")
    for _ in range(2):
        with pytest.raises(ConfigError, match="nobody's"):
            policy.sources()
        with contexts.untouched():
            assert policy.current().preferences == ()


def test_settings_are_in_force_again_after_they_were_set_aside(monkeypatch):
    monkeypatch.setenv("ATTNREG_BACKEND", "math")
    before = policy.sources()
    with contexts.untouched():
        assert policy.sources() == Sources()
    assert policy.sources() is before
    assert policy.sources().environment.backend == ("math",)


def test_a_strategy_is_what_its_name_says(routers):
    batch = Batch(dense(2, 16, 2, 2, 16, True, "float32"), CPU)
    job = Job(CPU, ("cpu", "math"), rounds=1)
    found = {}
    with contexts.untouched():
        for name, side in strategies.strategies(batch, job).items():
            attnreg.reset_stats()
            side.results()
            found[name] = sides.ran()["backward"]
    assert found == {
        CHOSEN: "cpu", "attnreg, order": "cpu", "always cpu": "cpu", "always math": "math", TORCH: "torch",
    }  # fmt: skip


# What it makes of figures


@pytest.mark.parametrize("wanted", ["python", "compiled"])
def test_what_fronts_take_is_measured_of_each_backend_with_each_kind_of_router_there(
    wanted, compiled_routers, monkeypatch
):
    aten.restore()
    monkeypatch.setattr(compiled_routers, "_wanted", lambda: wanted)
    monkeypatch.setattr(fronts, "LAYERS", 2)
    monkeypatch.setattr(fronts, "SHAPES", (packed([5, 3], 2, 2, 8, False), dense(2, 5, 2, 2, 8, False)))
    aten.ensure()
    found = fronts.host_costs(torch.device("cpu"), ["cpu", "math"], rounds=1)
    assert [one.place for one in found] == [
        (name, varlen, direction, compiled)
        for compiled in ((False, True) if wanted == "compiled" else (False,))
        for varlen in (True, False)
        for name in ("cpu", "math")
        for direction in ("forward", "backward")
    ]
    assert captured.compiled is (wanted == "compiled")
    aten.restore()
    aten._kept_out = False
    assert all(one.host_us > 0 for one in found if one.direction == "forward")
    assert policy.sources() == Sources()


def test_calls_of_one_graph_have_the_gradients_of_each(routers):
    batch = Batch(packed([5, 3], 2, 2, 8, False, "float32"), CPU, sets=3)
    found = sides.layers_backward(sides.layers(batch.with_attnreg, batch.sets), batch.sets)
    alone = [x for one in batch.sets for x in sides.forward_backward(batch.with_attnreg, one)]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, alone, strict=True))
    assert len({x.data_ptr() for x in found}) == 9


def test_a_call_of_a_graph_is_a_share_of_it(routers, monkeypatch):
    ran = []

    def clock(run, calls, device):
        ran.append(calls)
        return 6.0

    monkeypatch.setattr(strategies, "back_to_back", clock)
    batch = Batch(packed([5, 3], 2, 2, 8, False, "float32"), CPU, sets=3)
    runner = strategies.Runner.through(sides.Side(batch.with_attnreg, batch.sets, contexts.by_default), True)
    assert runner.turn(CPU) == {FORWARD: 6.0, BOTH: 2.0, BACKWARD: 2.0}
    assert ran == [2, 1] * 3


def test_what_attnreg_may_choose_is_what_it_is_compared_with(routers):
    inputs = torch.randn(3, 1, 2, 8, 16).unbind()
    for among, expected in ((("cpu", "math"), "cpu"), (("math",), "math")):
        attnreg.reset_stats()
        with contexts.settings("order", among=among)():
            torch.nn.functional.scaled_dot_product_attention(*inputs)
        assert list(attnreg.stats().calls) == [expected]


def test_a_named_table_that_is_not_true_here_is_refused_before_anything_runs(bench, tmp_path):
    table = SHIPPED / "nvidia-h200.json"
    for command in ("selection", "sdpa"):
        ended = bench(command, "--quick", "--table", str(table))
        assert ended.exit_code == 2
        assert "--table: " in ended.stderr and "it is of another kind of device than cpu" in ended.stderr


def test_a_backend_has_the_same_colour_in_every_picture():
    for names in (["torch SDPA", "attnreg, measured", "attnreg, FA2"], ["always cuDNN", "always FA2"]):
        found = figures._colours(names)
        assert found[names[-1]] == figures.OF_BACKENDS["FA2"]
        assert len(set(found.values())) == len(names)


def test_ratios_are_to_the_best_of_each_yardstick():
    front = {CHOSEN: 3.0, FIXED + "a": 4.0, FIXED + "b": 2.0, TORCH: 1.0}
    found = ratios({"a": 1.5, "b": 6.0}, front)
    assert found[BY_HAND] == {CHOSEN: 2.0, FIXED + "a": 4.0 / 1.5, FIXED + "b": 2.0 / 1.5, TORCH: 1.0 / 1.5}
    assert found[SAME_FRONT] == {CHOSEN: 1.5, FIXED + "a": 2.0, FIXED + "b": 1.0, TORCH: 0.5}
    assert ratios({}, {CHOSEN: 3.0}) == {}


def test_a_summary_has_the_geometric_mean_and_names_the_worst():
    rows = [
        row_of("one", "dense", {CHOSEN: 1.0, FIXED + "a": 4.0}, {"a": 1.0}),
        row_of("two", "varlen", {CHOSEN: 4.0, FIXED + "a": 4.0}, {"a": 1.0}),
    ]
    found = {(r["yardstick"], r["group"], r["strategy"]): r for r in summary(rows)}
    chosen = found[BY_HAND, "all", CHOSEN]
    assert chosen["mean"] == pytest.approx(2.0) and (chosen["worst"], chosen["worst_case"]) == (4.0, "two")
    assert chosen["cases"] == 2 and found[BY_HAND, "dense", CHOSEN]["cases"] == 1
    assert found[BY_HAND, "all", FIXED + "a"]["mean"] == pytest.approx(4.0)
    assert (BY_HAND, "decode", CHOSEN) not in found
    by_name = {(aim["what"], aim["aim"]): aim for aim in aims(summary(rows), [])}
    assert not by_name[f"forward, chosen / {BY_HAND}, geometric mean", 1.02]["reached"]
    assert by_name[f"forward, chosen / {SAME_FRONT}, worst", 1.15]["reached"]


def test_gains_over_torch_are_by_front_and_reach_their_aims_or_not():
    rows = [
        row_of("one", "dense", {CHOSEN: 1.0, TORCH: 2.0}, {}, BOTH),
        row_of("two", "dense", {CHOSEN: 2.0, TORCH: 1.0}, {}, BOTH),
        row_of("three", "varlen", {CHOSEN: 1.0, TORCH: 1.6}, {}, BOTH),
        row_of("four", "varlen", {CHOSEN: 1.0}, {}, BOTH),
    ]
    found = {row["group"]: row for row in gains(rows)}
    assert found["dense"]["mean"] == pytest.approx(1.0) and found["dense"]["worst"] == 0.5
    assert (found["varlen"]["mean"], found["varlen"]["cases"]) == (pytest.approx(1.6), 1)
    assert [aim["reached"] for aim in aims([], gains(rows))] == [False, True]


def test_sides_take_turns_after_a_warm_up_that_does_not_count():
    order = []
    measures = {name: lambda name=name: order.append(name) or len(order) for name in "abc"}
    found = interleaved(measures, 40)
    assert order[:3] == ["a", "b", "c"]
    rounds = [order[at : at + 3] for at in range(3, len(order), 3)]
    assert [sorted(one) for one in rounds] == [["a", "b", "c"]] * 40
    # None of the sides always follows the same one, nor has the same place.
    followed = {one + other for one, other in itertools.pairwise(order[3:])}
    assert followed >= {"ab", "ac", "ba", "bc", "ca", "cb"}
    assert all({one.index(name) for one in rounds} == {0, 1, 2} for name in "abc")
    # A case has few rounds: another one has other orders.
    assert len({tuple(order[-3:]) for _ in range(40) if interleaved(measures, 1)}) == 6
    for name, places in found.items():
        assert [order[place - 1] for place in places] == [name] * 40
    assert median_ratio([2.0, 9.0, 4.0], [1.0, 3.0, 4.0]) == 2.0
    assert [calls_for(1.0, once) for once in (5.0, 0.1, 1e-9)] == [1, 10, 200]


def test_what_bench_has_not_written_it_does_not_replace(bench, tmp_path):
    file = tmp_path / "program.py"
    file.write_text("import torch")
    ended = bench("overhead", "--quick", "--rounds", "1", "--out", str(file))
    assert ended.exit_code == 2
    assert "exists, and isn't a file that this command writes: give another file" in " ".join(
        ended.output.split()
    )
    assert file.read_text() == "import torch"


def test_functions_that_are_joined_by_the_least_autograd_are_those_that_run():
    kernels, told = _registry.find("math").kernels(), []

    def forward(*given):
        told.append("forward")
        return kernels.forward(*given)

    def backward(*given):
        told.append("backward")
        return kernels.backward(*given)

    inputs = [torch.randn(1, 5, 2, 8, requires_grad=True) for _ in "qkv"]
    grad, call = torch.randn(1, 5, 2, 8), attnreg.Call(0.5, 5, 5, (-1, 0))
    attention = joined(forward, backward, call)
    out = attention(*inputs)
    right, lse = kernels.forward(*(x.detach() for x in inputs), call)
    assert torch.equal(out, right)
    for got, wanted in zip(
        torch.autograd.grad(out, inputs, grad),
        kernels.backward(grad, *(x.detach() for x in inputs), right, lse, call),
        strict=True,
    ):
        assert torch.equal(got, wanted)
    with torch.no_grad():
        assert torch.equal(attention(*inputs), right)
    assert told == ["forward", "backward", "forward"]
    assert attnreg.stats().calls == {}
