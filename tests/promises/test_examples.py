"""Promise: each example runs as it stands and shows what it says that it shows."""

from __future__ import annotations

import json
import re
import runpy
import shlex
from pathlib import Path

import pytest
import torch
from support.processes import COMMAND, forked

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


PAGES = [EXAMPLES.parent / "README.md", *sorted((EXAMPLES.parent / "docs").glob("*.md"))]
# Programs that are whole: they import what they use.
PROGRAMS = [
    pytest.param(block, id=page.name)
    for page in PAGES
    for block in re.findall(
        r"^```python\n(import torch\n.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE
    )
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_of_a_page_runs(program):
    ended = forked(program)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_pages_have_programs():
    assert len(PROGRAMS) >= 2


# Commands with what they print: `attnreg` is this one, and "..." stands for any lines.
COMMANDS = [
    pytest.param(*block, id=page.name)
    for page in PAGES
    for block in re.findall(
        r"^```console\n\$ (.*\battnreg .*)\n((?:[^$`].*\n)+)```", page.read_text(), re.MULTILINE
    )
    if block[0].count('"') % 2 == 0  # or the command goes on in the next line
]


@pytest.mark.parametrize(("command", "shown"), COMMANDS)
def test_a_command_of_a_page_prints_what_the_page_shows(command, shown):
    words = shlex.split(command)
    first = words.index("attnreg")
    variables = dict(word.split("=", 1) for word in words[:first])
    ended = forked(COMMAND, *words[first + 1 :], **variables)
    assert ended.returncode == 0, ended.stderr
    pattern = "(?:.*\n)*?".join(map(re.escape, shown.split("  ...\n")))
    assert re.match(pattern, ended.stdout), ended.stdout


def test_pages_have_commands():
    assert COMMANDS


def test_quickstart_runs_the_backend_that_it_registers_and_says_why():
    text = printed("quickstart.py")
    assert "{'math': {'forward': 1, 'backward': 1}}" in text
    assert "math forward and backward, by register_backend('math')\n" in text


def test_quickstart_takes_ten_lines_of_code():
    code = [line for line in (EXAMPLES / "quickstart.py").read_text().splitlines() if line.strip()]
    assert len(code) <= 11  # ten and the docstring


@pytest.mark.slow
def test_varlen_training_learns_through_packed_attention():
    text = printed("varlen_training.py")
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", text)]
    assert losses[0] > 5  # a guess among 256 bytes costs 5.5
    assert losses[-1] < 1
    forwards, backwards = map(int, re.search(r"ran (\d+) forwards and (\d+) backwards", text).groups())
    assert forwards == backwards == 40


@pytest.mark.slow
def test_finetune_packed_has_the_losses_of_padded_training_step_by_step():
    text = printed("finetune_packed.py", "--steps", "2", "--layers", "2", "--context", "64")
    losses = re.findall(r"packed (\d+\.\d+)  padded (\d+\.\d+)", text)
    assert len(losses) == 3
    assert all(abs(float(packed) - float(padded)) < 1e-3 for packed, padded in losses)
    assert len(re.findall(r"^(?:packed|padded): [\d,]+ tokens/s", text, re.MULTILINE)) == 2
    assert 0 < int(re.search(r"^(\d+)% of the padded batches is padding$", text, re.MULTILINE)[1]) < 90
    assert "'forward': 6, 'backward': 6" in text  # the padded training runs without attnreg


# A process that is spawned imports torch, and an optimizer imports Dynamo: both take longer than the example.
FORKS = """
import functools, torch._dynamo, torch.multiprocessing as mp
mp.spawn = functools.partial(mp.start_processes, start_method="fork")
"""
# Runs of a file one after the other, with the exit status of each.
RUNS = """
import json, runpy, sys
file, *runs = json.loads(sys.argv[1])
for sys.argv[1:] in runs:
    print("run", *sys.argv[1:], flush=True)
    try:
        runpy.run_path(file, run_name="__main__")
    except SystemExit as ended:
        print("exit", ended.code)
"""
LOSSES = re.compile(r"loss (\d+\.\d+)  on one rank (\d+\.\d+)")


def printed_of_runs(name, *runs, before=""):
    """Run an example several times in one process; return what each run prints, and all of stderr."""
    given = [str(EXAMPLES / name), *(run.split() for run in runs)]
    ended = forked(before + RUNS, json.dumps(given))
    assert ended.returncode == 0, ended.stderr
    _, *texts = re.split(r"^run .*\n", ended.stdout, flags=re.MULTILINE)
    assert len(texts) == len(runs)
    return texts, ended.stderr


def losses_of(text, steps):
    """Return the losses that an example prints, which have to be those of one rank."""
    losses = [tuple(map(float, pair)) for pair in LOSSES.findall(text)]
    assert len(losses) == steps
    assert all(abs(together - alone) < 1e-4 for together, alone in losses)
    return [together for together, _ in losses]


@pytest.mark.slow
def test_context_parallel_has_the_losses_of_one_rank():
    """Two processes with gloo; also for few tokens, one document, and a rank without tokens."""
    trained, few, one_document, *no_tokens = printed_of_runs(
        "context_parallel.py",
        "--device cpu --tokens 900 --steps 3",
        "--device cpu --tokens 2 --steps 1",
        "--device cpu --tokens 900 --longest 900 --steps 1",
        *(f"--device cpu --tokens 1 --ranks 2 --steps 1 --method {name}" for name in ("all_to_all", "ring")),
        before=FORKS,
    )[0]
    losses = losses_of(trained, 3)
    assert losses[0] > losses[-1]
    assert few.startswith("2 documents of up to 1 tokens")
    assert one_document.startswith("1 documents of up to 900 tokens")
    for text in (few, one_document, *no_tokens):
        losses_of(text, 1)
    assert all("ranks have (1, 0)" in text or "ranks have (0, 1)" in text for text in no_tokens)


@pytest.mark.slow
def test_context_parallel_has_the_losses_of_one_rank_in_spawned_processes():
    losses_of(printed("context_parallel.py", "--tokens", "900", "--steps", "3", "--device", "cpu"), 3)


def test_context_parallel_says_what_it_expects():
    wrong = {
        "--device cuda --ranks 99": "--ranks: got 99 with cuda, expected at most the 0 GPUs that are here",
        "--tokens 0": "--tokens: got 0, expected a number from 1 on",
        "--tokens 5 --longest 6": "--longest: got 6, expected a number from 1 to 5",
        "--method rin": "invalid choice: 'rin'",
    }
    texts, errors = printed_of_runs("context_parallel.py", *wrong)
    assert texts == ["exit 2\n"] * len(wrong)
    lines = [line for line in errors.splitlines() if "error: " in line]
    assert all(said in line for said, line in zip(wrong.values(), lines, strict=True))
    assert "Traceback" not in errors


def test_my_backend_really_runs_and_what_it_cannot_goes_to_the_next():
    text = printed("my_backend.py")
    assert float(re.search(r"off by (\S+)", text)[1]) < 1e-5
    assert "{'forward': 1, 'backward': 1}" in text
    assert "reason='is_causal must be False, got True', count=1" in text


def test_my_backend_takes_under_forty_lines():
    assert len((EXAMPLES / "my_backend.py").read_text().splitlines()) < 40


@pytest.mark.slow
def test_my_backend_keeps_the_contract(one_thread, routers, no_other_lengths):
    left = runpy.run_path(str(EXAMPLES / "my_backend.py"))
    report = check_backend(left["MINE"], device="cpu")
    assert sum(not outcome.refused for outcome in report.outcomes) == 72


def test_my_backend_is_right_in_output_and_gradients(routers):
    left = runpy.run_path(str(EXAMPLES / "my_backend.py"))
    inputs = left["query"], left["key"], left["value"]
    torch.testing.assert_close(left["out"], left["expected"])
    stock = torch.autograd.grad(left["expected"].sum(), inputs)
    torch.testing.assert_close(tuple(tensor.grad for tensor in inputs), stock)
