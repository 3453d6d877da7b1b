"""Promises of `attnreg warmup`: each call runs once on each backend, and what isn't run has a reason."""

import json

import pytest
import torch
from support.command_line import words

from attnreg.contract.capabilities import Range

WARMUP = ("warmup", "--device", "cpu", "--q", "2,64,4,32")


def calls_of(result):
    return json.loads(result.stdout)["calls"]


def test_warmup_runs_both_directions_of_all_that_run_here_once_each(call, ran):
    result = call(*WARMUP, "--json")
    assert result.exit_code == 0
    found = calls_of(result)
    assert {(row["backend"], row["direction"]) for row in found} == {
        (name, direction) for name in ("cpu", "math") for direction in ("forward", "backward")
    }
    assert all(row["state"] == "ran" and 0 <= row["seconds"] < 60 and not row["reason"] for row in found)
    assert ran() == {}  # the counters are for the calls of programs


@pytest.mark.parametrize("varlen", [(), ("--varlen",)])
@pytest.mark.parametrize(
    ("dtype", "dtypes"), [("bf16", (torch.bfloat16, torch.float32)), ("float64", (torch.float64,) * 2)]
)
def test_warmup_calls_the_kernels_with_what_the_options_say(call, fake, plugins, varlen, dtype, dtypes):
    mine = fake("mine")
    plugins(mine=mine.backend)
    result = call(
        *(*WARMUP, "--kv", "2,48,2,32", "--backend", "mine", "--head-dim-v", "16", "--window", "8,-1"),
        *("--causal", "--deterministic", "--dtype", dtype, *varlen),
    )
    assert result.exit_code == 0, result.output
    ((query, key, value, forward),) = mine.forwards
    ((grad, *inputs, out, lse, backward),) = mine.backwards
    rows_q, rows_k = ((128,), (96,)) if varlen else ((2, 64), (2, 48))
    assert (query.shape, key.shape, value.shape) == ((*rows_q, 4, 32), (*rows_k, 2, 32), (*rows_k, 2, 16))
    assert [x.shape for x in inputs] == [x.shape for x in (query, key, value)]
    assert grad.shape == out.shape == (*rows_q, 4, 16)
    assert lse.shape == ((4, 128) if varlen else (2, 4, 64))
    assert (query.dtype, lse.dtype) == dtypes
    assert (forward.max_q, forward.max_k, forward.window, forward.deterministic) == (64, 48, (8, 0), True)
    assert forward.scale == 32**-0.5
    assert backward.window == forward.window
    if varlen:
        assert forward.cu_seqlens_q.tolist() == [0, 64, 128]
        assert forward.cu_seqlens_k.tolist() == [0, 48, 96]
        assert forward.cu_seqlens_q.dtype == torch.int32
    else:
        assert forward.cu_seqlens_q is None


def test_warmup_pads_head_dims_as_calls_do(call, fake, plugins):
    mine = fake("mine", **dict.fromkeys(("head_dim", "head_dim_v"), Range(8, 64, 8)))
    plugins(mine=mine.backend)
    result = call(*WARMUP[:3], "--q", "2,64,4,29", "--head-dim-v", "13", "--backend", "mine", "--json")
    assert [row["state"] for row in calls_of(result)] == ["ran", "ran"]
    for query, key, value in (mine.forwards[0][:3], mine.backwards[0][1:4]):
        assert (query.shape, key.shape, value.shape) == ((2, 64, 4, 32), (2, 64, 4, 32), (2, 64, 4, 16))


def test_warmup_takes_several_calls_and_dtypes(call):
    options = ("--q", "1,8,4,32", "--kv", "2,64,4,32", "--kv", "1,16,2,32", "--dtype", "fp32,bf16")
    result = call(*WARMUP, *options, "--backend", "MATH", "--no-backward", "--json")
    assert result.exit_code == 0
    assert [(row["backend"], row["direction"]) for row in calls_of(result)] == [("math", "forward")] * 4
    assert [row["call"].split(" · ")[::3] for row in calls_of(result)] == [
        ["query (2, 64, 4, 32)", "float32"],
        ["query (2, 64, 4, 32)", "bfloat16"],
        ["query (1, 8, 4, 32)", "float32"],
        ["query (1, 8, 4, 32)", "bfloat16"],
    ]


def test_warmup_prints_a_table_for_each_call_and_says_what_was_not_run(call, fake, plugins, kernels):
    def crash(*arguments):
        raise RuntimeError("ptxas fatal\nmore about it")

    plugins(
        crashes=fake("crashes", load=lambda: kernels._replace(backward=crash)).backend,
        absent=fake("absent", unavailable=lambda: "not installed").backend,
        picky=fake("picky", dtypes=("float16",)).backend,
        elsewhere=fake("elsewhere", devices=("cuda",)).backend,
    )
    result = call(*WARMUP)
    assert result.exit_code == 1  # one failed
    assert words(result).startswith("query (2, 64, 4, 32) · key (2, 64, 4, 32)")
    assert "on cpu" in words(result)
    lines = [line.split(maxsplit=3) for line in result.output.splitlines()]
    assert ["backend", "direction", "seconds"] in lines
    assert ["crashes", "backward", "-", "RuntimeError: ptxas fatal"] in lines
    assert ["picky", "forward", "-", "not run: dtype must be float16, got bfloat16"] in lines
    assert "absent forward - not run: can't load here: not installed" in words(result)
    assert any(line[:2] == ["math", "backward"] and float(line[2]) >= 0 for line in lines)
    assert "elsewhere" not in result.output
    states = {(row["backend"], row["direction"]): row["state"] for row in calls_of(call(*WARMUP, "--json"))}
    assert states["crashes", "forward"] == "ran"
    assert states["crashes", "backward"] == "failed"
    assert states["absent", "forward"] == "refused"


def test_warmup_is_1_when_nothing_could_be_run_or_a_backend_that_was_named(call, fake, plugins):
    plugins(picky=fake("picky", dtypes=("float16",)).backend)
    assert call(*WARMUP, "--backend", "picky").exit_code == 1
    assert call(*WARMUP, "--backend", "math,picky").exit_code == 1
    assert call(*WARMUP, "--backend", "FA2").exit_code == 1
    assert call(*WARMUP).exit_code == 0
