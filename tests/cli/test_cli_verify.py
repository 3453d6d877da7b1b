"""Promises of `attnreg verify`: what is wrong is found, counted and shown, and stops nothing else."""

import math
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.command_line import broken_loader, rows, words

import attnreg
from attnreg.core.torchlib import building
from attnreg.core.torchlib.libraries import LEVELS
from attnreg.errors import BuildError
from attnreg.testing import kit

QUICK = ("verify", "--device", "cpu", "--case", "heads 4:")  # two dense cases and two packed ones


def test_verify_passes_the_backends_of_this_machine(call):
    assert list(rows(call(*QUICK, "--json"))) == attnreg.list_backends()
    result = call(*QUICK, "--backend", "math")
    assert result.exit_code == 0
    assert "math on cpu, bfloat16" in result.output
    (line,) = (line for line in result.output.splitlines() if line.startswith("  heads 4:2 "))
    *numbers, state = line.split()[2:]
    assert state == "right"
    assert all(0 <= float(number) < 2 for number in numbers)
    assert len(numbers) == 5


@pytest.mark.parametrize(
    ("has_tiles", "used"), [(1, "AVX-512, AMX for bfloat16"), (0, "AVX-512"), (None, None)]
)
def test_verify_says_which_compiled_kernel_ran_and_with_which_instructions(
    call, monkeypatch, has_tiles, used
):
    def library():
        if has_tiles is None:
            raise BuildError("it isn't there")
        return SimpleNamespace(attnreg_has_tiles=lambda: has_tiles)

    state = building.Status("prebuilt AVX-512" if used else "off", Path("/x.so"), "" if used else "it is off")
    monkeypatch.setattr(building, "status", lambda library: state)
    monkeypatch.setattr(building, "loaded_cpu_kernel", library)
    monkeypatch.setattr(building.libraries, "machine_level", lambda: LEVELS[0])
    command = ("verify", "--device", "cpu", "--case", "heads 4:2", "--backend", "cpu,math")
    shown = f"prebuilt AVX-512; instructions: {used}; /x.so" if used else "none: it is off"
    assert f"Compiled kernel cpu {shown} Summary" in words(call(*command))
    found = rows(call(*command, "--json"))
    assert found["cpu"]["compiled"]["instructions"] == used and found["math"]["compiled"] is None


def test_verify_marks_what_is_wrong_and_finishes_the_others(call, fake, plugins, kernels):
    def double(*arguments):
        out, lse = kernels.forward(*arguments)
        return out * 2, lse

    def nan_gradient(*arguments):
        return tuple(grad * math.nan for grad in kernels.backward(*arguments))

    def crash(*arguments):
        raise RuntimeError("CUDA error: an illegal memory access\nCompile with TORCH_USE_CUDA_DSA")

    plugins(
        doubled=fake("doubled", load=lambda: kernels._replace(forward=double)).backend,
        nan=fake("nan", load=lambda: kernels._replace(backward=nan_gradient)).backend,
        crashes=fake("crashes", load=lambda: kernels._replace(forward=crash)).backend,
        sound=fake("sound").backend,
    )
    named = (*QUICK, "--backend", "doubled,nan,crashes,sound")
    result = call(*named, "--json")
    assert result.exit_code == 1
    found = rows(result)
    for name in ("doubled", "nan", "crashes"):
        assert (found[name]["right"], found[name]["wrong"]) == (0, 4)
    assert (found["sound"]["right"], found["sound"]["wrong"]) == (4, 0)
    assert found["doubled"]["worst"]["ratio"] > 2
    assert not found["doubled"]["rows"][0]["errors"]["out"]["passed"]
    assert found["doubled"]["rows"][0]["errors"]["lse"]["passed"]
    assert found["nan"]["rows"][0]["errors"]["dq"] == {
        **found["nan"]["rows"][0]["errors"]["dq"], "passed": False, "error": None, "ratio": None
    }  # fmt: skip
    raised_at = f"test_cli_verify.py:{crash.__code__.co_firstlineno + 1}: "
    expected = f"{raised_at}RuntimeError: CUDA error: an illegal"
    assert found["crashes"]["rows"][0]["failure"].startswith(expected)
    table = call(*named)
    assert table.exit_code == 1
    assert "NaN" in table.output
    assert sum(line.endswith("WRONG") for line in table.output.splitlines()) == 12
    assert "TORCH_USE_CUDA_DSA" not in table.output  # the rest of a message is for the JSON


def test_verify_counts_what_a_backend_refuses_and_gives_its_reasons(call, fake, plugins):
    plugins(
        dense=fake("dense", varlen=False).backend, forward_only=fake("forward_only", backward=False).backend
    )
    named = (*QUICK, "--backend", "dense,forward_only")
    found = rows(call(*named, "--json"))
    assert (found["dense"]["right"], found["dense"]["skipped"]) == (2, 2)
    skipped = [row for row in found["dense"]["rows"] if row["state"] == "skipped"]
    assert skipped[0]["reasons"] == ["input must be dense, got packed"]
    assert skipped[0]["errors"] == {}
    assert found["forward_only"]["rows"][0]["errors"].keys() == {"out", "lse"}
    assert found["forward_only"]["rows"][0]["reasons"] == ["has no backward"]
    assert found["dense"]["refused"] == {"input must be dense": 2}
    assert found["forward_only"]["refused"] == {"has no backward": 4}
    lines = call(*named).output.splitlines()
    skipped, counts = (line.split() for line in lines if line.startswith("  dense  "))
    assert skipped == ["dense", "2", "input", "must", "be", "dense"]
    assert counts[:4] == ["dense", "2", "0", "2"]


def test_verify_fails_a_backend_that_refuses_what_it_declares(call, fake, plugins, monkeypatch):
    plugins(shy=fake("shy", refuses=lambda spec: (f"batch must be 0, got {spec.batch}",)).backend)
    few = [check for check in kit.Conformance("math", "cpu").checks if "heads " in str(check)]
    monkeypatch.setattr(kit, "checks_for", lambda *given: few)
    result = call("verify", "--device", "cpu", "--backend", "shy", "--json")
    assert result.exit_code == 1
    found = rows(result)["shy"]
    assert (found["right"], found["wrong"]) == (0, 0)
    said = "its forward declares dense, but never ran it: batch must be 0, got 2"
    assert found["never_ran"][0].startswith(said)
    assert (
        call(*QUICK, "--backend", "shy").exit_code == 0
    )  # some cases alone needn't have all that is declared


@pytest.mark.parametrize(
    ("program", "form"), [("bin/attnreg", "attnreg"), ("attnreg/__main__.py", "python -m attnreg")]
)
def test_verify_says_how_to_repeat_what_is_wrong(call, fake, plugins, kernels, monkeypatch, program, form):
    monkeypatch.setattr(sys, "argv", [program])

    def ignores_scale(q, k, v, call):
        return kernels.forward(q, k, v, call._replace(scale=0.125))

    # As a third party's backend did, and passed, when the only scales were 0 and below.
    wrong = fake("wrong", any_scale=False, load=lambda: kernels._replace(forward=ignores_scale)).backend
    plugins(wrong=wrong)
    result = call("verify", "--device", "cpu", "--backend", "wrong", "--case", "scale", "--json")
    assert result.exit_code == 1
    found = {row["case"]: row for row in rows(result)["wrong"]["rows"]}
    assert {name for name, row in found.items() if row["state"] == "wrong"} == {
        "scale 0.3",
        "packed scale 0.3",
    }
    assert found["scale 0.3"]["repeat"] == (
        f"{form} verify --backend wrong --device cpu --dtype bfloat16 --seed 0 --case 'scale 0.3'"
    )
    assert found["scale 0"]["repeat"] == ""


def test_verify_passes_over_what_cannot_run_and_fails_if_it_was_named(call, fake, plugins, monkeypatch):
    monkeypatch.setenv("ATTNREG_DISABLE", "unwanted")
    plugins(
        absent=fake("absent", unavailable=lambda: "not installed").backend,
        crashes=fake("crashes", load=broken_loader).backend,
        plugin=ImportError("no such symbol"),
        unwanted=fake("unwanted").backend,
        elsewhere=fake("elsewhere", devices=("cuda",)).backend,
    )
    result = call(*QUICK, "--json")
    assert result.exit_code == 0
    reasons = {name: row["reason"] for name, row in rows(result).items()}
    assert reasons["absent"] == "can't load here: not installed"
    assert reasons["crashes"].startswith("failed to load: ImportError: libcuda.so")
    assert reasons["plugin"] == "failed to load: ImportError: no such symbol"
    assert reasons["unwanted"] == "is disabled by ATTNREG_DISABLE"
    assert reasons["elsewhere"].startswith("runs on cuda only, and the device is cpu")
    assert "absent - - - - not run: can't load here: not installed" in words(call(*QUICK))
    for named in ("absent,math", "absent"):
        assert call(*QUICK, "--backend", named).exit_code == 1


@pytest.mark.parametrize(
    ("has_gpu", "why"),
    [
        (False, "runs on cuda only, and the device is cpu; torch finds no GPU here"),
        (True, "runs on cuda only, and the device is cpu"),
    ],
)
def test_verify_of_a_backend_of_another_device_says_why_it_runs_nothing(
    call, fake, plugins, monkeypatch, has_gpu, why
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    plugins(elsewhere=fake("elsewhere", devices=("cuda",)).backend, sound=fake("sound").backend)
    alone = call(*QUICK, "--backend", "elsewhere")
    assert (alone.exit_code, words(alone)) == (1, f"Not run backend why elsewhere {why}")
    with_another = call(*QUICK, "--backend", "elsewhere,sound")
    assert with_another.exit_code == 1
    summary = words(with_another).partition("Summary ")[2]
    assert f"elsewhere - - - - not run: {why}" in summary and "sound 4 0 0 " in summary


def test_verify_takes_the_backends_dtypes_and_cases_that_are_named(call):
    result = call(*QUICK, "--backend", "MATH", "--backend", "math", "--dtype", "fp32,fp64", "--json")
    assert list(rows(result)) == ["math"]
    dtypes = [row["dtype"] for row in rows(result)["math"]["rows"]]
    assert dtypes == ["float32"] * 4 + ["float64"] * 4


def wrong_heads(kernels):
    """Return kernels that give query head h the key head h % heads."""

    def forward(q, k, v, call):
        across = [head % k.shape[-2] for head in range(q.shape[-2])]
        return kernels.forward(q, k[..., across, :], v[..., across, :], call)

    return kernels._replace(forward=forward)


def test_verify_says_where_each_case_is_wrong_and_its_command_repeats_that_case_alone(
    call, fake, plugins, kernels
):
    plugins(across=fake("across", backward=False, load=lambda: wrong_heads(kernels)).backend)
    result = call(*QUICK, "--backend", "across")
    lines = result.output.splitlines()
    at = lines.index(
        "WRONG: across, heads 4:2, bfloat16: q (2, 65, 4, 64), k and v (2, 129, 2, 64), window=(-1, 0)"
    )
    assert lines[at + 1].startswith("  out: error ")
    assert "; first out[0, 0, 1, 0] (sequence 0, row 0, head 1, dim 0): got " in lines[at + 1]
    assert "; heads 1-2 of 4; every row of a sequence sees a key" in lines[at + 1]
    repeats = [line.removeprefix("  repeat: ") for line in lines if line.startswith("  repeat: ")]
    assert len(repeats) == 2  # with one key head, or as many, nothing is exchanged
    for command, case in zip(repeats, ("heads 4:2", "packed heads 4:2"), strict=True):
        program, *arguments = shlex.split(command)
        again = call(*arguments, "--json")
        assert (program, again.exit_code) == ("attnreg", 1)
        (row,) = rows(again)["across"]["rows"]
        assert (row["case"], row["state"]) == (case, "wrong")
        assert f"  out: error {row['errors']['out']['error']:.3g}, " in result.output


def test_verify_quiet_prints_nothing_but_what_is_wrong(call, fake, plugins, kernels):
    plugins(
        across=fake("across", backward=False, load=lambda: wrong_heads(kernels)).backend,
        sound=fake("sound").backend,
        absent=fake("absent", unavailable=lambda: "not installed").backend,
    )
    right = call(*QUICK, "--backend", "sound", "--quiet")
    assert (right.exit_code, right.stdout) == (0, "")
    wrong = call(*QUICK, "--backend", "sound,across", "-q")
    assert wrong.exit_code == 1
    assert [line for line in wrong.stdout.splitlines() if line[:1].strip()] == [
        line for line in wrong.stdout.splitlines() if line.startswith("WRONG: across, ")
    ]
    missing = call(*QUICK, "--backend", "absent", "--quiet")
    assert (missing.exit_code, missing.stdout) == (1, "absent not run: can't load here: not installed\n")


@pytest.mark.slow
def test_verify_prints_at_most_forty_lines_for_a_backend_that_is_right(call, fake, plugins, monkeypatch):
    narrow = dict.fromkeys(("window", "bias", "alibi", "dropout", "softcap", "grad_lse", "num_splits"), False)
    plugins(sound=fake("sound", varlen=False, gqa=False, page_size=None, **narrow).backend)
    few = [check for check in kit.Conformance("math", "cpu").checks if sum(check.case.lens_k) < 130]
    monkeypatch.setattr(kit, "checks_for", lambda *given: few)
    result = call("verify", "--device", "cpu", "--backend", "sound", "--case", "1")
    assert result.exit_code == 0
    assert len(result.output.splitlines()) <= 40
    assert "further reasons, which --verbose shows" in words(result)
    assert "Right cases aren't shown: --verbose prints them." in result.output
    shown = call("verify", "--device", "cpu", "--backend", "sound", "--case", "length", "--verbose")
    assert sum(line.endswith("  right") for line in shown.output.splitlines()) > 8
