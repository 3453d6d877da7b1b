"""`tests/flash_attention.py` on a file of tests that needs no GPU: what it counts, and what it says."""

import json
from pathlib import Path

import pytest
from support.processes import forked, python

COMMAND = Path(__file__).parents[1] / "flash_attention.py"

TESTS = """
import os
from pathlib import Path

import pytest
import torch
from flash_attn import flash_attn_func
from flash_attn.flash_attn_interface import _get_block_size_n

HERE = Path(__file__).parent
QKV = [torch.randn(1, 6, 2, 8) for _ in range(3)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.17])
@pytest.mark.parametrize("d,seqlen", [(8, 5), (8, 6)])
def test_served(d, seqlen, dropout_p, causal):
    out, lse, weights = flash_attn_func(*QKV, dropout_p, causal=causal, return_attn_probs=True)
    assert out.shape == (1, 6, 2, 8) and (weights.numel() > 0) == (dropout_p > 0.0)


def test_wrong():
    assert flash_attn_func(*QKV).shape == (1, 2, 3), "another shape"


def test_private():
    from flash_attn.flash_attn_interface import _flash_attn_forward


def test_beside_what_is_installed():
    import flash_attn.cute


def test_deadly():
    os._exit(9)


@pytest.mark.skipif(True, reason="never")
def test_skipped():
    pass


@pytest.mark.parametrize("number", range(400))
def test_many(number):
    with (HERE / os.environ["SEEN"]).open("a") as file:
        print(number, file=file)
"""


@pytest.fixture
def run(tmp_path):
    """Run the command on these tests; return it, its JSON and the numbers that `test_many` has had."""

    def run(*arguments, tests=TESTS, seen="seen"):
        (tmp_path / "tests").mkdir(exist_ok=True)
        (tmp_path / "tests" / "test_flash_attn.py").write_text(tests)
        (tmp_path / "site" / "flash_attn" / "cute").mkdir(
            parents=True, exist_ok=True
        )  # as flash-attn-4 has it
        (tmp_path / "site" / "flash_attn" / "cute" / "__init__.py").touch()
        out, numbers = tmp_path / "out.json", tmp_path / "tests" / seen
        # Without the compiled kernel, by which `cpu` takes dropout.
        variables = {"XDG_CACHE_HOME": str(tmp_path / "built")}
        variables |= {"SEEN": seen, "PYTHONPATH": str(tmp_path / "site")}
        done = python(str(COMMAND), str(tmp_path), f"--out={out}", *arguments, **variables)
        results = json.loads(out.read_text()) if out.exists() else {}
        return done, results, set(numbers.read_text().split()) if numbers.exists() else set()

    return run


@pytest.mark.slow
def test_a_test_passes_fails_is_refused_or_skipped_and_one_that_ends_the_process_stops_no_other(run):
    done, results, numbers = run("--backends=cpu,math", "--each=8")
    assert (done.returncode, done.stderr) == (0, "")
    rows = {
        name: {
            (row["test"], row["option"]): [row[one] for one in ("passed", "failed", "refused", "skipped")]
            for row in results["results"][name]["rows"]
        }
        for name in ("cpu", "math")
    }
    assert rows["cpu"] == {
        ("all", "all"): [13, 2, 5, 1],
        ("all", "causal"): [2, 0, 2, 0],
        ("all", "dropout"): [0, 0, 4, 0],
        ("test_beside_what_is_installed", "all"): [1, 0, 0, 0],
        ("test_deadly", "all"): [0, 1, 0, 0],
        ("test_many", "all"): [8, 0, 0, 0],
        ("test_private", "all"): [0, 0, 1, 0],
        ("test_served", "all"): [4, 0, 4, 0],
        ("test_served", "causal"): [2, 0, 2, 0],
        ("test_served", "dropout"): [0, 0, 4, 0],
        ("test_skipped", "all"): [0, 0, 0, 1],
        ("test_wrong", "all"): [0, 1, 0, 0],
    }
    assert rows["math"]["test_served", "dropout"] == [4, 0, 0, 0]
    assert len(numbers) == 8

    cpu = results["results"]["cpu"]
    assert cpu["refused"] == [
        {"why": "dropout_p needs the compiled kernel, which `attnreg build` makes", "tests": 4},
        {
            "why": "cannot import name '_flash_attn_forward' from 'flash_attn.flash_attn_interface'",
            "tests": 1,
        },
    ]
    assert sorted((one["id"], one["why"]) for one in cpu["failed"]) == [
        ("test_deadly", "the process ended"),
        ("test_wrong", "AssertionError: another shape"),
    ]
    assert next(row["by"] for row in cpu["rows"] if row["test"] == "test_served") == {"cpu": 4}
    assert (cpu["left_out"], cpu["errors"]) == (0, [])
    assert "| `test_served` | 4 | 0 | 4 | 0 |" in done.stdout
    assert results["results"]["sample"]["each"] == 8


@pytest.mark.slow
def test_a_greater_sample_has_the_tests_of_a_smaller_one_and_time_leaves_out_the_others(run):
    _, _, few = run("--each=8", "--processes=2", seen="few")
    _, _, more = run("--each=20", seen="more")
    assert (len(few), len(more), few - more) == (8, 20, set())
    _, results, none = run("--each=8", "--minutes=0", seen="none")
    assert (results["results"]["chosen"]["left_out"], none) == (21, set())


@pytest.mark.slow
def test_a_test_that_takes_too_long_is_ended_and_left_out(run):
    tests = "def test_first():\n    pass\n"
    tests += "def test_flash_attn_race_condition():\n    __import__('time').sleep(600)\n"
    _, results, _ = run("--minutes=0.5", "--grace=0", tests=tests)
    counts = {row["test"]: row["passed"] for row in results["results"]["chosen"]["rows"]}
    assert counts == {"all": 1, "test_first": 1}
    assert results["results"]["chosen"]["left_out"] == 1


@pytest.mark.slow
def test_a_file_that_cannot_be_imported_is_an_error(run):
    done, results, _ = run(tests="import flash_attn.no_such_module\n")
    assert done.returncode == 1
    assert "No module named 'flash_attn.no_such_module'" in results["results"]["chosen"]["errors"][0]


def test_a_file_that_is_not_there_is_an_error(tmp_path):
    done = forked(f"import runpy; runpy.run_path({str(COMMAND)!r}, run_name='__main__')", tmp_path / "none")
    assert done.returncode == 2 and "no such file, expected a checkout of flash-attention" in done.stderr
