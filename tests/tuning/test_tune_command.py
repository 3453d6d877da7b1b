"""Promises of the command `attnreg tune`."""

import dataclasses
import json
import re

import pytest
import torch
from support.command_line import invoke, words
from support.tuned import off_by, raising, spec_with, watched

import attnreg
from attnreg.backends import math as math_backend
from attnreg.core import registry
from attnreg.core.contract.spec import Device
from attnreg.core.policy import current as policy
from attnreg.core.registry.entry import Entry
from attnreg.core.times import traces
from attnreg.core.times.kinds import MANY, SHARED
from attnreg.core.times.points import Front
from attnreg.core.times.table import load
from attnreg.core.torchlib import captured
from attnreg.tools.bench import fronts
from attnreg.tools.cli.tune import host_rows
from attnreg.tools.tuning.checks import DeviceLostError

SMALL = spec_with(32)


@pytest.fixture
def tune(tmp_path, monkeypatch):
    """Run `attnreg tune` on the CPU with a table in the test's folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def call(*options, out="table.json"):
        return invoke("tune", "--device", "cpu", *(["--out", out] if out else []), *options)

    return call


@pytest.fixture
def backends(monkeypatch, entry, clock):
    """Know a slow, a fast and a wrong backend, on the clock of the test."""
    made = {
        "slow": entry("slow", 3.0, priority=9),
        "fast": entry("fast", 1.0, priority=5),
        "off": entry("off", 0.1, change=off_by(0.5)),
        "math": Entry("math", "a test", math_backend.BACKEND),
    }
    monkeypatch.setattr(registry, "_entries", made)
    monkeypatch.setattr("attnreg.tools.measure.timing.timer_for", lambda device: clock)
    registry.changed()
    return made


SHAPE = ("--q", "2,32,4,64")


@pytest.mark.parametrize(
    ("options", "lengths"),
    [
        ((), {32}),
        (("--budget", "1h"), {32, 40, 48}),
        (("--budget", "1h", "--grid", "quick"), {32}),
        (("--budget", "1h", *SHAPE), {32}),
    ],
)
def test_time_that_the_quick_grid_leaves_goes_to_the_full_one(tune, backends, monkeypatch, options, lengths):
    grids = {"quick": [SMALL], "full": [spec_with(40), SMALL, spec_with(48)]}
    monkeypatch.setattr("attnreg.tools.tuning.workload.grid", lambda name, device: grids[name])
    result = tune(*options, "--json", "--no-backward", "--backend", "slow,fast")
    found = json.loads(result.stdout)
    assert {point["max_q"] for point in found["points"]} == lengths
    assert (found["end"], found["calls"], found["left"]) == ("finished", 1, 0)


@pytest.mark.parametrize("variable", ["ATTNREG_CONFIG", pytest.param("ATTNREG_LOCK", marks=pytest.mark.slow)])
def test_tune_makes_the_table_that_settings_name_already(tune, backends, monkeypatch, tmp_path, variable):
    (tmp_path / "settings.toml").write_text('tuned = "table.json"\ndisabled = ["fast"]\n')
    (tmp_path / "lock.json").write_text("no lock")
    monkeypatch.setenv(variable, {"ATTNREG_CONFIG": "settings.toml", "ATTNREG_LOCK": "lock.json"}[variable])
    monkeypatch.setattr(policy, "_sources", None)
    assert tune(*SHAPE, "--no-backward").exit_code == 0
    (point, *_) = json.loads((tmp_path / "table.json").read_text())["points"]
    measured = {"slow", "off", "math", *(["fast"] if variable == "ATTNREG_LOCK" else [])}
    assert point["backends"].keys() == measured  # what is disabled isn't run, whatever else is wrong


def test_tune_takes_no_unknown_backend_from_settings(tune, backends, monkeypatch, tmp_path):
    (tmp_path / "settings.toml").write_text('disabled = ["fats"]\n')
    monkeypatch.setenv("ATTNREG_CONFIG", "settings.toml")
    monkeypatch.setattr(policy, "_sources", None)
    result = tune(*SHAPE)
    assert result.exit_code == 2
    assert "got 'fats', expected one of" in result.stderr
    assert "did you mean 'fast'?" in result.stderr


@pytest.fixture
def measured_fronts(monkeypatch):
    """Return the backends whose host times `attnreg tune` measures, as it asks for them."""
    asked_of = []

    def host_costs(device, names, *, as_used):
        asked_of.append((device.type, names, as_used))
        return [Front(name, False, "forward", 9.0, recorded=False, shape=MANY + SHARED) for name in names]

    monkeypatch.setattr("attnreg.tools.bench.fronts.host_costs", host_costs)
    return asked_of


def test_tune_measures_host_times_of_those_backends_only_that_the_table_lacks_them_for(
    session, entry, monkeypatch, measured_fronts, python_routers
):
    made = session(entry("a"), entry("b"))
    fronts.measure(made)  # a CPU is its own host
    made.device = torch.device("cuda")
    few = Front("a", False, "forward", 8.0, recorded=False, shape=MANY + SHARED)
    made.fronts = (few,)
    fronts.measure(made)
    fronts.measure(made)
    assert measured_fronts == [("cuda", ["b"], False)]
    made.fronts += (Front("a", False, "backward", 30.0, shape=MANY + SHARED),)
    made.fronts += (Front("a", False, "backward", 29.0, compiled=True),)
    assert host_rows(made.fronts) == [
        ("a", "SDPA", "Python", MANY + SHARED, "-", "30.0", "8.0"),
        ("b", "SDPA", "Python", MANY + SHARED, "-", "-", "9.0"),
        ("a", "SDPA", "compiled", MANY, "-", "29.0", "-"),
    ]
    # Those anew of which only calls of many queries were timed, as in older tables.
    made.fronts = (few._replace(shape=MANY), few._replace(backend="b"))
    fronts.measure(made)
    assert measured_fronts[1:] == [("cuda", ["a"], False)]
    # With the call cache those anew of which one kind is missing; if there is little time, the kind in use.
    monkeypatch.setattr(captured, "call_cache_in_use", True)
    made.fronts = few, few._replace(backend="b", compiled=True)
    fronts.measure(made, hurried=True)
    made.fronts = few, few._replace(compiled=True), few._replace(backend="b", compiled=True)
    fronts.measure(made)
    assert measured_fronts[2:] == [("cuda", ["a"], True), ("cuda", ["b"], False)]


def test_tune_on_a_cpu_makes_a_table_that_then_decides_and_prints_it(tune, backends, tmp_path, routers):
    result = tune(*SHAPE, "--backend", "slow,fast,off")
    assert result.exit_code == 0, result.output
    text = words(result)
    assert "bfloat16, head dim 64, 1:1 heads, no mask, dense, forward" in text
    assert "B 2, 32 x 32, H 4 3000.0 µs 1000.0 µs wrong fast" in text
    head, row = [line for line in result.output.splitlines() if re.search(" fast(est)?$", line)][:2]
    assert head.index("slow") + len("slow") == row.index("3000.0 µs") + len("3000.0 µs")  # flush right
    assert "never chosen for these" in text
    assert "measured 2 points; 0 of 1 calls are left" in text
    assert f"{tmp_path / 'table.json'}, 2 points\n" in result.output  # whole, as in any pipe
    made = load(tmp_path / "table.json")
    assert len(made.points) == 2
    assert set(made.environment.backends) == {"slow", "fast", "off"}  # the versions of these alone
    spec = spec_with(32, needs_backward=True)
    assert attnreg.explain(spec).backend == "slow"
    attnreg.configure({"tuned": tmp_path / "table.json"})
    found = attnreg.explain(spec)
    assert (found.backend, found.backward.backend) == ("fast", "fast")
    assert found.forward.predicted.of("off").trouble.startswith("wrong: out of bfloat16 32 x 32")


def test_tune_measures_with_the_real_backends_and_the_real_clock(tune, tmp_path):
    result = tune("--q", "1,16,2,32", "--dtype", "fp32", "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert (data["end"], data["measured"], data["left"], data["table_points"]) == ("finished", 2, 0, 2)
    assert set(data["points"][0]["backends"]) == {"cpu", "math"}
    assert all(one["gpu_us"] > 0 for point in data["points"] for one in point["backends"].values())


def test_tune_says_why_a_backend_has_no_times_of_a_call(tune):
    call = ("--q", "1,16,2,32", "--head-dim-v", "16", "--dtype", "fp32", "--fresh")
    expected = {"cpu": "head_dim of the value must be that of the query, 32, got 16"}
    assert json.loads(tune(*call, "--json").stdout)["refused"] == expected
    text = words(tune(*call))
    assert f"Refused, shown as - backend why cpu {expected['cpu']}" in text
    assert "Refused" not in words(tune("--q", "1,16,2,32", "--dtype", "fp32", "--fresh"))


def test_tune_counts_calls_that_it_cannot_measure_apart_from_those_that_are_left(tune):
    refused = ("--q", "1,16,2,32", "--q", "1,24,2,32", "--head-dim-v", "16", "--dtype", "fp32")
    result = tune(*refused, "--backend", "cpu")
    assert result.exit_code == 1
    text = words(result)
    assert "Not measured call why query (1, 16, 2, 32)" in text
    assert "measured 0 points; 2 of 2 calls can't be measured, 0 are left" in text


def test_tune_goes_on_where_it_ended_and_begins_anew_with_fresh(tune, backends):
    def measured(*options):
        return json.loads(tune(*options, "--backend", "slow", "--json").stdout)

    assert measured(*SHAPE)["measured"] == 2
    more = measured(*SHAPE, "--q", "2,16,4,64")
    assert (more["measured"], more["table_points"]) == (2, 4)
    anew = measured(*SHAPE, "--fresh")
    assert (anew["measured"], anew["table_points"]) == (2, 2)


def test_tune_leaves_the_old_table_until_it_has_something_new(tune, backends, entry, tmp_path):
    assert tune(*SHAPE, "--backend", "fast").exit_code == 0
    before = (tmp_path / "table.json").read_bytes()
    backends["slow"] = entry("slow", change=raising(KeyboardInterrupt()))
    assert tune(*SHAPE, "--backend", "slow", "--fresh").exit_code == 130
    assert (tmp_path / "table.json").read_bytes() == before


def test_tune_takes_a_recorded_workload_that_is_measured_by_what_it_costs(tune, backends, tmp_path):
    file = tmp_path / "trace.jsonl"
    counts = {
        (spec_with(16), "forward"): 1,
        (spec_with(48), "forward"): 900,
        (spec_with(48), "backward"): 900,
    }
    traces.merge(file, counts)
    data = json.loads(tune("--from", str(file), "--backend", "slow", "--json").stdout)
    found = [(point["max_q"], point["direction"]) for point in data["points"]]
    assert found == [(48, "forward"), (48, "backward"), (16, "forward")]


def test_tune_stops_in_time_and_says_what_is_left(tune, backends, clock):
    shapes = [option for length in (16, 24, 32, 40) for option in ("--q", f"2,{length},4,64")]
    result = tune(*shapes, "--budget", "0.4s", "--backend", "slow", "--json")
    data = json.loads(result.stdout)
    assert (result.exit_code, data["end"]) == (0, "budget spent")
    assert 0 < data["left"] < data["calls"]
    assert clock.seconds <= 0.4


def test_tune_keeps_what_it_has_when_it_is_interrupted(tune, backends, entry, tmp_path):
    done = []

    def interrupt(query, *_):
        done.append(query.shape)
        if len(done) > 3 and query.shape[1] == 16:
            raise KeyboardInterrupt

    backends["slow"] = entry("slow", 3.0, change=watched(interrupt))
    result = tune(*SHAPE, "--q", "2,16,4,64", "--no-backward", "--backend", "slow", "--json")
    data = json.loads(result.stdout)
    assert (result.exit_code, data["end"], data["left"]) == (130, "interrupted", 1)
    assert [point.size.max_q for point in load(tmp_path / "table.json").points] == [32]


def test_tune_stops_with_1_when_the_gpu_is_lost(tune, backends, monkeypatch):
    def lost(*arguments):
        raise DeviceLostError("the GPU can't be used any more after X")

    monkeypatch.setattr("attnreg.tools.tuning.session.Measurement.points", lost)
    result = tune(*SHAPE)
    assert result.exit_code == 1
    assert "attnreg: the GPU can't be used any more after X; what was measured before is in" in result.stderr


WITHOUT_Q = "got no --q, expected the call that it describes"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--grid quik", "--grid: got 'quik', expected quick or full; did you mean 'quick'?"),
        ("--budget soon", "--budget: got 'soon', expected a time: 60s, 5m or 1h"),
        ("--budget 0s", "--budget: got '0s'"),
        ("--q 2,64", "--q: got '2,64', expected four whole numbers"),
        ("--from none.jsonl", "none.jsonl: can't be read: No such file"),
        ("--grid quick --dtype fp16 --causal", f"--dtype and --causal: {WITHOUT_Q}"),
        ("--window 16,0", f"--window: {WITHOUT_Q}"),
        ("--out no/such/folder.json", "--out: "),
        ("--backend maht", "no backend is named 'maht'"),
    ],
)
def test_tune_refuses_a_bad_value_before_it_measures_anything(tune, backends, options, message):
    result = tune(*options.split())
    assert result.exit_code == 2
    assert result.stderr.startswith(f"attnreg: {message}")


def test_tune_writes_over_nothing_that_is_no_table_and_over_no_trace(tune, backends, tmp_path):
    (tmp_path / "table.json").write_text('{"precious": 1}')
    assert tune(*SHAPE).exit_code == tune(*SHAPE, "--fresh").exit_code == 2
    assert (tmp_path / "table.json").read_text() == '{"precious": 1}'
    (tmp_path / "trace.jsonl").write_text("")
    for out, message in (
        ("trace.jsonl", "--out: got trace.jsonl, expected another file than that of --from"),
        ("new.json", "expected a file with at least one recorded call"),
    ):
        result = tune("--from", "trace.jsonl", "--fresh", out=out)
        assert result.exit_code == 2
        assert message in result.stderr


def test_tune_measures_no_call_of_another_device_as_its_own(tune, backends, tmp_path, caplog):
    gpu = dataclasses.replace(SMALL, device=Device("cuda", (9, 0)))
    traces.merge(tmp_path / "trace.jsonl", {(gpu, "forward"): 3})
    result = tune("--from", "trace.jsonl")
    assert result.exit_code == 2
    assert "--from: got calls on cuda, expected some on cpu, the device of --device" in result.stderr
    traces.merge(tmp_path / "trace.jsonl", {(SMALL, "forward"): 1})
    result = tune("--from", "trace.jsonl", "--backend", "slow", "--json")
    assert json.loads(result.stdout)["calls"] == 1
    assert "--from: left out 1 call on cuda, as the device is cpu" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--budget 0.001s", "the time was spent before any call was measured; give --budget more time"),
        ("--backend gone", "--backend: gone failed to load: ImportError: no"),
    ],
)
def test_tune_that_could_measure_nothing_exits_1_and_says_why(tune, backends, options, message):
    backends["gone"] = Entry("gone", "a test", cause=ImportError("no"))
    result = tune(*SHAPE, *options.split())
    assert result.exit_code == 1
    assert message in result.stderr


def test_the_table_is_named_after_the_device_unless_it_is_given_a_name(tune, backends, tmp_path):
    assert tune(*SHAPE, "--backend", "slow", out="").exit_code == 0
    assert len(list(tmp_path.glob("*.json"))) == 1
