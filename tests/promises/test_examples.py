"""Promise: each example runs as it stands and shows what it says that it shows."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch
from support.processes import forked

from attnreg.testing import check_backend

EXAMPLES = Path(__file__).parents[2] / "examples"


def printed(name, *arguments, before=""):
    """Run an example in a process of its own, as its reader would, and return what it prints."""
    file = str(EXAMPLES / name)
    ended = forked(f"{before}\nimport runpy; runpy.run_path({file!r}, run_name='__main__')", *arguments)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_every_example_is_tested_here():
    here = Path(__file__).read_text()
    assert [path.name for path in EXAMPLES.glob("*.py") if f'"{path.name}"' not in here] == []


def test_quickstart_runs_the_backend_that_it_registers_and_says_why():
    text = printed("quickstart.py")
    assert "{'math': {'forward': 1, 'backward': 1}}" in text
    assert "forward on cpu: math, by register_backend('math')" in text


def test_quickstart_takes_ten_lines_of_code():
    code = [line for line in (EXAMPLES / "quickstart.py").read_text().splitlines() if line.strip()]
    assert len(code) <= 11  # ten and the docstring


def test_varlen_training_learns_through_packed_attention():
    text = printed("varlen_training.py")
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", text)]
    assert losses[0] > 5  # a guess among 256 bytes costs 5.5
    assert losses[-1] < 1
    forwards, backwards = map(int, re.search(r"ran (\d+) forwards and (\d+) backwards", text).groups())
    assert forwards == backwards == 40


def test_finetune_packed_has_the_losses_of_padded_training_step_by_step():
    text = printed("finetune_packed.py", "--steps", "2", "--layers", "2", "--context", "64")
    losses = re.findall(r"packed (\d+\.\d+)  padded (\d+\.\d+)", text)
    assert len(losses) == 3
    assert all(abs(float(packed) - float(padded)) < 1e-3 for packed, padded in losses)
    assert len(re.findall(r"^(?:packed|padded): [\d,]+ tokens/s", text, re.MULTILINE)) == 2
    assert 0 < int(re.search(r"^(\d+)% of the padded batches is padding$", text, re.MULTILINE)[1]) < 90
    assert "'forward': 6, 'backward': 6" in text  # the padded training runs without attnreg


# Each process that is spawned imports torch, which takes longer than the example.
FORKS = """
import functools, torch.multiprocessing as mp
mp.spawn = functools.partial(mp.start_processes, start_method="fork")
"""


@pytest.mark.parametrize("before", [FORKS, pytest.param("", marks=pytest.mark.slow)], ids=["fork", "spawn"])
def test_context_parallel_has_the_losses_of_one_rank(before):
    """Two processes with gloo."""
    given = ("--tokens", "900", "--steps", "3", "--device", "cpu")
    text = printed("context_parallel.py", *given, before=before)
    losses = re.findall(r"loss (\d+\.\d+)  on one rank (\d+\.\d+)", text)
    assert len(losses) == 3
    assert all(abs(float(together) - float(alone)) < 1e-4 for together, alone in losses)
    assert losses[0][0] > losses[-1][0]


@pytest.mark.parametrize("given", [("--tokens", "2"), ("--tokens", "900", "--longest", "900")], ids=" ".join)
def test_context_parallel_takes_few_tokens_and_one_document(given):
    text = printed("context_parallel.py", *given, "--steps", "1", "--device", "cpu", before=FORKS)
    expected = "2 documents of up to 1 tokens" if given[1] == "2" else "1 documents of up to 900 tokens"
    assert text.startswith(expected)
    together, alone = re.search(r"loss (\d+\.\d+)  on one rank (\d+\.\d+)", text).groups()
    assert abs(float(together) - float(alone)) < 1e-4


@pytest.mark.parametrize("method", ["all_to_all", "ring"])
def test_context_parallel_runs_where_a_rank_has_no_tokens(method):
    given = "--tokens", "1", "--ranks", "2", "--method", method, "--steps", "1", "--device", "cpu"
    assert re.search(r"loss \d+\.\d+  on one rank", printed("context_parallel.py", *given, before=FORKS))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ("--device", "cuda", "--ranks", "99"),
            "--ranks: got 99 with cuda, expected at most the 0 GPUs that are here",
        ),
        (("--tokens", "0"), "--tokens: got 0, expected a number from 1 on"),
        (("--tokens", "5", "--longest", "6"), "--longest: got 6, expected a number from 1 to 5"),
        (("--method", "rin"), "invalid choice: 'rin'"),
    ],
    ids=str,
)
def test_context_parallel_says_what_it_expects(given, said):
    file = str(EXAMPLES / "context_parallel.py")
    ended = forked(f"import runpy; runpy.run_path({file!r}, run_name='__main__')", *given)
    assert ended.returncode == 2
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr


def test_my_backend_really_runs_and_what_it_cannot_goes_to_the_next():
    text = printed("my_backend.py")
    assert float(re.search(r"off by (\S+)", text)[1]) < 1e-5
    assert "{'forward': 1, 'backward': 1}" in text
    assert "reason='is_causal must be False, got True', count=1" in text


def test_my_backend_takes_under_forty_lines():
    assert len((EXAMPLES / "my_backend.py").read_text().splitlines()) < 40


def test_my_backend_keeps_the_contract(one_thread, routers, few_lengths):
    left = runpy.run_path(str(EXAMPLES / "my_backend.py"))
    report = check_backend(left["MINE"], device="cpu")
    assert sum(not outcome.refused for outcome in report.outcomes) == 72


def test_my_backend_is_right_in_output_and_gradients(routers):
    left = runpy.run_path(str(EXAMPLES / "my_backend.py"))
    inputs = left["query"], left["key"], left["value"]
    torch.testing.assert_close(left["out"], left["expected"])
    stock = torch.autograd.grad(left["expected"].sum(), inputs)
    torch.testing.assert_close(tuple(tensor.grad for tensor in inputs), stock)
