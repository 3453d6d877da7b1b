"""Promises of `attnreg bench selection`: which shapes are drawn at random, and how losses are summed up."""

import contextlib
import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch
from support.command_line import invoke
from support.known import know

from attnreg.backends import math as math_backend
from attnreg.tools.bench import compare, selection
from attnreg.tools.bench.compare import SideTimer
from attnreg.tools.bench.selection import (
    ADAPTIVE,
    ALL,
    BY_DEVICE,
    BY_HOST,
    CHOSEN,
    ORDER,
    losses,
    percentile,
    summary,
    worst_of,
)
from attnreg.tools.bench.shapes import BOTH, FORWARD, drawn, flops
from attnreg.tools.measure.timing import Timer


def test_a_seed_and_a_number_are_always_the_same_shape_and_others_are_others():
    found = [drawn(7, number, "cuda") for number in range(300)]
    assert found == [drawn(7, number, "cuda") for number in range(300)]
    assert len({shape.name for shape in found + [drawn(8, number, "cuda") for number in range(300)]}) > 590


def test_shapes_on_a_gpu_are_of_every_kind_and_within_their_bounds():
    found = [drawn(1, number, "cuda") for number in range(1000)]
    assert {shape.name.split()[0] for shape in found} == {"dense", "packed", "decode"}
    assert {shape.dims[0] for shape in found} == {64, 96, 128}
    assert {shape.heads[0] // shape.heads[1] for shape in found} == {1, 4, 8}
    lengths = [length for shape in found for length in shape.lens_k]
    assert 180 <= min(lengths) < 200
    assert 9000 < max(lengths) <= 11_600
    assert max(flops(shape, FORWARD) for shape in found) <= 6e11
    assert any(length % 2 for length in lengths)


def row_of(number, bound, **times):
    """Return a row of a shape: the rounds of each way, by step."""
    middle = {step: {way: sorted(rounds)[1] for way, rounds in ways.items()} for step, ways in times.items()}
    return {
        "number": number, "case": f"case {number}", "ran": {CHOSEN: {FORWARD: "A", BOTH: "A + B"}},
        "bound": {FORWARD: bound, BOTH: bound}, "rounds": times, "microseconds": middle,
    }  # fmt: skip


def rounds(chosen, order, **backends):
    return {CHOSEN: chosen, ORDER: order} | {f"always {name}": found for name, found in backends.items()}


def twice_in_the_second(time):
    return [time, 2 * time, time]


ROWS = []
for number, (time, bound) in enumerate([(10.0, BY_HOST), (11.0, BY_DEVICE), (13.0, BY_DEVICE)]):
    chosen, ten, twenty, thirty = map(twice_in_the_second, (time, 10.0, 20.0, 30.0))
    both = {BOTH: rounds(thirty, thirty, B=thirty)} if number else {}
    ROWS.append(row_of(number, bound, **{FORWARD: rounds(chosen, twenty, A=ten, B=twenty)}, **both))


def test_a_loss_is_the_time_over_that_of_the_best_backend_of_the_shape():
    assert losses(ROWS, FORWARD)[CHOSEN] == [1.0, 1.1, 1.3]
    assert losses(ROWS, FORWARD)["always B"] == [2.0, 2.0, 2.0]
    assert losses(ROWS, FORWARD, BY_HOST)[CHOSEN] == [1.0]
    assert losses(ROWS, BOTH) == {CHOSEN: [1.0, 1.0], ORDER: [1.0, 1.0], "always B": [1.0, 1.0]}


def test_a_loss_is_taken_in_each_round_as_a_host_is_slow_for_all_ways():
    slow_twice = rounds([20.0, 21.0, 10.5], [9.0] * 3, A=[20.0, 10.0, 10.0])
    assert losses([row_of(0, BY_HOST, **{FORWARD: slow_twice})], FORWARD)[CHOSEN] == [1.05]


def test_a_time_is_the_least_of_several_bursts(monkeypatch):
    timer, bursts = Timer(), iter([0.5, 3.0, 1.0, 2.0])  # the first says how many calls a burst has
    monkeypatch.setattr(timer, "back_to_back", lambda run, calls: next(bursts))
    monkeypatch.setattr(compare, "timer_for", lambda device: timer)
    side = SimpleNamespace(sets=[SimpleNamespace(q=torch.zeros(1))], within=contextlib.nullcontext)
    assert SideTimer(side, [(FORWARD, lambda: None, 1)], 1.0, 5, bursts=3).measure() == {FORWARD: 1.0}


def test_losses_are_summed_up_by_step_bound_and_way():
    found = {(one["step"], one["bound"], one["way"]): one for one in summary(ROWS)}
    whole = found[FORWARD, ALL, CHOSEN]
    assert (whole["shapes"], whole["median"], whole["p90"], whole["worst"]) == (3, 1.1, 1.3, 1.3)
    assert whole["mean"] == pytest.approx(3.4 / 3)
    assert whole["above"] == pytest.approx(1 / 3)
    assert found[FORWARD, BY_DEVICE, CHOSEN]["mean"] == pytest.approx(1.2)
    assert (FORWARD, BY_HOST, CHOSEN) in found
    assert found[BOTH, ALL, ORDER]["shapes"] == 2


def test_percentiles_are_values_that_were_measured():
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [percentile(values, percent) for percent in (1, 20, 21, 50, 90, 100)] == [1, 1, 2, 3, 5, 5]


def test_the_worst_say_what_ran_and_what_is_best():
    (first, *_), (both, *_) = worst_of(ROWS, FORWARD), worst_of(ROWS, BOTH)
    assert first == {
        "number": 2, "case": "case 2", "loss": 1.3, "ran": "A", "best": "A", "microseconds": 10.0
    }  # fmt: skip
    assert (both["best"], both["ran"]) == ("B", "A + B")
    many = [ROWS[0] | {"number": number} for number in range(30)]
    assert len(worst_of(many, FORWARD)) == 10


@pytest.mark.slow
def test_the_command_measures_saves_draws_and_repeats_a_seed(tmp_path, monkeypatch):
    monkeypatch.setattr(selection, "SECONDS", 1e-4)
    out, plot = tmp_path / "found.json", tmp_path / "losses.png"
    given = ("--device", "cpu", "--backend", "cpu,math", "--random", "2", "--seed", "1", "--rounds", "1")
    done = invoke("bench", "selection", *given, "--out", str(out), "--plot", str(plot))
    assert done.exit_code == 0, done.output
    assert "2 shapes of seed 1" in done.output
    found = json.loads(out.read_text())["results"]
    assert [row["case"] for row in found["rows"]] == [drawn(1, number, "cpu").name for number in range(2)]
    row = found["rows"][0]
    assert set(row["ran"]["always math"].values()) == {"math"}
    assert set(row["ran"]["always cpu"].values()) == {"cpu"}
    assert row["ran"]["always cpu"].keys() == row["microseconds"].keys()
    ways = {CHOSEN, ADAPTIVE, ORDER, "always cpu", "always math"}
    assert {one["way"] for one in found["summary"]} == ways
    assert set(row["ran"][ADAPTIVE].values()) == {"cpu"}
    # Each round is there, of which the median counts: here the only one.
    for step, times in row["microseconds"].items():
        assert row["rounds"][step] == {way: [time] for way, time in times.items()}
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_shape_that_the_host_bounds_is_measured_thrice_as_often_and_all_rounds_count(monkeypatch, tmp_path):
    monkeypatch.setattr(selection, "SECONDS", 1e-4)
    monkeypatch.setattr(selection, "_bound", lambda side, backward, step: BY_HOST)
    given = ("--device", "cpu", "--backend", "cpu,math", "--random", "1", "--seed", "1", "--rounds", "1")
    done = invoke("bench", "selection", *given, "--out", str(tmp_path / "found.json"))
    assert "1 shape of seed 1\n" in done.output
    (row,) = json.loads((tmp_path / "found.json").read_text())["results"]["rows"]
    for step, times in row["microseconds"].items():
        for way, time in times.items():
            assert (len(row["rounds"][step][way]), sorted(row["rounds"][step][way])[1]) == (3, time)


@pytest.mark.slow
def test_a_backend_that_is_wrong_is_left_out_and_the_others_are_measured(fake, monkeypatch):
    monkeypatch.setattr(selection, "SECONDS", 1e-4)
    backend = fake("mine", priority=-1).backend
    right = backend.load()
    wrong = right._replace(forward=lambda *given: tuple(x * 2 for x in right.forward(*given)))
    know(monkeypatch, dataclasses.replace(backend, load=lambda: wrong), math_backend.BACKEND)
    given = ("--device", "cpu", "--backend", "mine,math", "--random", "1", "--seed", "1", "--rounds", "1")
    found = json.loads(invoke("bench", "selection", *given, "--json").stdout)
    (row,) = found["results"]["rows"]
    assert set(row["ran"]["always math"].values()) == {"math"}
    assert "always mine" not in row["ran"]
    assert any("always mine: WRONG" in line for line in found["left_out"])


@pytest.mark.parametrize("command", ["sdpa", "varlen", "overhead"])
def test_only_selection_draws_its_shapes(command):
    done = invoke("bench", command, "--random", "3")
    assert done.exit_code == 2
    assert "No such option: --random" in done.output


def test_a_seed_without_random_is_an_error():
    done = invoke("bench", "selection", "--seed", "1")
    assert done.exit_code == 2
    assert "--seed: got no --random, expected it" in done.output
