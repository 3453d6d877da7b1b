"""Promises of `attnreg tune --check`: what may ship passes, and what is wrong with a table is said."""

import dataclasses
import json
from pathlib import Path

import pytest
from support.command_line import invoke
from support.tuned import point, spec_with, table, took

from attnreg.core import registry
from attnreg.core.times import tables
from attnreg.core.times.points import Measured
from attnreg.core.times.table import load
from attnreg.tools.tuning import review

H200, H100 = (tables.SHIPPED / name for name in ("nvidia-h200.json", "nvidia-h100-80gb-hbm3.json"))
VERSIONS = {
    "torch": "2.11.0", "attnreg": "0.1.0", "compute_capability": "9.0", "cuda": "13.0",
    "backends": {"FA2": "2.11.0", "FA4": "4.0"},
}  # fmt: skip
LENGTHS = (256, 512, 1024, 2048)


def measured(times=lambda length: {"FA2": 3.0 * length, "FA4": 1.0 * length**1.05}, **changes):
    points = [point(spec_with(length), **times(length)) for length in LENGTHS]
    return table(*points, **{**VERSIONS, **changes})


def reviewed(found, shipped=()):
    return review.review(found, registry.entries(), shipped)


def problems(found, shipped=()):
    return reviewed(found, shipped).problems


@pytest.fixture
def checked(tmp_path):
    """Return a function that checks a table, or a text, by the command; returns its exit code and data."""

    def check(found):
        file = tmp_path / "contributed.json"
        file.write_text(found) if isinstance(found, str) else found.save(file)
        result = invoke("tune", "--check", file, "--json")
        return result.exit_code, json.loads(result.stdout)

    return check


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "points", "losses", "outliers"),
    [
        (H200, "1028", {"forward": (1.007, 1.4), "backward": (1.005, 1.27)}, set()),
        (H100, "1018", {"forward": (1.008, 1.42), "backward": (1.007, 1.29)}, set()),
    ],
    ids=lambda one: one.stem if isinstance(one, Path) else "",
)
def test_a_table_that_ships_passes_with_the_losses_of_the_docs(
    checked, monkeypatch, file, points, losses, outliers
):
    monkeypatch.setattr(tables, "SHIPPED", H200.parent)
    code, data = checked(load(file))
    assert (code, data["problems"], data["points"]) == (0, [], points)
    rounded = {name: (round(one["mean"], 3), round(one["worst"], 2)) for name, one in data["losses"].items()}
    assert rounded == losses
    assert data["shipped"][file.name] == data["losses"]
    assert set(data["shipped"]) == {H200.name, H100.name}
    assert {one["backend"] for one in data["outliers"]} == outliers


def test_a_loss_is_what_the_others_choice_takes_over_the_fastest():
    swapped = {256: {"FA2": 1.0, "FA4": 2.0}}
    found = reviewed(measured(lambda n: swapped.get(n, {"FA2": 4.0 * n / 256, "FA4": 2.0 * n / 256})))
    loss = found.losses["forward"]
    # The others say FA4 at 256, too.
    assert (loss.points, loss.worst) == (4, 2.0)
    assert "256 x 256" in loss.where
    assert loss.mean == pytest.approx(2.0 ** (1 / 4))
    assert found.always["forward"]["FA2"].worst == 2.0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"torch": ""}, "environment.torch: got nothing"),
        ({"cuda": ""}, "environment.cuda: got nothing"),
        ({"compute_capability": "", "cuda": ""}, "environment.threads: got nothing"),
        ({"backends": {"FA2": "2.11.0"}}, "environment.backends.FA4: got nothing, expected the version"),
        ({"backends": {**VERSIONS["backends"], "FA9": "1"}}, "backends: got 'FA9', expected some of "),
    ],
)
def test_what_the_table_does_not_say_of_its_machine_is_a_problem(changes, said):
    assert problems(measured()) == ()
    (problem,) = problems(measured(**changes))
    assert problem.startswith(said)


def test_too_few_points_of_a_kind_and_none_to_choose_by_are_problems():
    found = measured()
    (problem,) = problems(dataclasses.replace(found, points=found.points[1:]))
    assert problem.endswith("forward: got 3 points, expected 4 or more")
    wrong = measured(lambda n: {"FA2": float(n), "FA4": Measured(wrong="out")})
    assert "points: got none with times of two backends" in problems(wrong)[0]


def test_times_that_their_neighbours_do_not_predict_are_listed_and_too_many_are_a_problem():
    found = reviewed(measured(lambda n: {"FA2": 3.0 * n, "FA4": 40.0 * n if n == 512 else 1.0 * n}))
    assert ("FA4", 40.0 * 512) in [(one.backend, one.measured) for one in found.outliers]
    assert any("times are more than 3 times off" in problem for problem in found.problems)


def test_choices_that_lose_far_more_than_those_of_shipped_tables_are_a_problem():
    good = reviewed(measured())
    swapped = {256: {"FA2": 1.0, "FA4": 2.0}}
    bad = measured(lambda n: swapped.get(n, {"FA2": 4.0 * n / 256, "FA4": 2.0 * n / 256}))
    (problem,) = (one for one in problems(bad, [good]) if "choices" in one)
    assert problem.startswith(
        "forward: its choices take 1.189 of the fastest backend's time, expected at most"
    )
    assert problems(measured(), [good]) == ()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"gpu_us": 0}, "gpu_us: got 0, expected more"),
        ({"gpu_us": -1.0}, "gpu_us: got -1.0, expected a number of 0 or more"),
        ({"gpu_us": float("nan")}, "gpu_us: got nan, expected a number of 0 or more"),
        ({"wrong": "out"}, "backends.FA2.error: unknown key"),  # wrong, and with times to be chosen by
    ],
)
def test_a_file_that_no_table_may_be_is_one_problem_with_its_place(checked, change, said):
    data = measured(lambda n: {"FA2": took(3.0 * n), "FA4": took(1.0 * n)}).to_dict()
    data["points"][1]["backends"]["FA2"] |= change
    code, found = checked(json.dumps(data))
    assert code == 1
    (problem,) = found["problems"]
    assert "contributed.json: points[1].backends.FA2" in problem and said in problem


@pytest.mark.parametrize("option", ["--grid quick", "--sinks", "--fresh", "--no-backward", "--backend FA2"])
def test_nothing_is_measured_beside_a_check(option):
    result = invoke("tune", "--check", H200, *option.split())
    assert result.exit_code
    assert f"--check: got {option.split()[0]} as well, expected it alone" in result.output


def test_the_table_for_people_names_losses_outliers_and_problems(tmp_path):
    file = tmp_path / "few.json"
    found = measured(lambda n: {"FA2": 3.0 * n, "FA4": 40.0 * n if n == 512 else 1.0 * n})
    found.save(file)
    result = invoke("tune", "--check", file)
    assert result.exit_code == 1
    for text in ("chosen by", "always FA4", "Far from what neighbours predict", "problem"):
        assert text in " ".join(result.output.split())
