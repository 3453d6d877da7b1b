"""Promises of `attnreg warmup`: each kind runs once on each backend, and what isn't run has a reason."""

import json

import pytest
import torch
from support.command_line import words
from support.tuned import spec_with

import attnreg
from attnreg.core.contract.capabilities import Range
from attnreg.core.times import traces

DIRECTIONS = ("forward", "backward")
KINDS = ("warmup", "--device", "cpu")
WARMUP = (*KINDS, "--q", "2,64,4,32")


@pytest.fixture
def trace(tmp_path):
    """Return a function that writes a recording: specs, each with how often its directions ran."""

    def write(*counted):
        file = tmp_path / "trace.jsonl"
        traces.merge(
            file,
            {
                (spec, direction): n
                for spec, both in counted
                for direction, n in zip(DIRECTIONS, both, strict=True)
            },
        )
        return file

    return write


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


# Kinds without lengths


def test_kinds_without_lengths_are_the_product_of_heads_head_dims_and_dtypes(call, fake, plugins):
    mine = fake("mine")
    plugins(mine=mine.backend)
    options = ("--heads", "4,2", "--heads", "6,6", "--head-dim", "16,32", "--dtype", "fp32,bf16")
    further = ("--varlen", "--causal", "--window", "4096,-1", "--no-backward")
    result = call(*KINDS, *options, *further, "--backend", "mine", "--json")
    assert result.exit_code == 0, result.output
    assert {(row["backend"], row["direction"], row["state"]) for row in calls_of(result)} == {
        ("mine", "forward", "ran")
    }
    assert [(str(q.dtype), tuple(q.shape), k.shape[1]) for q, k, *_ in mine.forwards] == [
        (f"torch.{dtype}", (1024, heads_q, dim), heads_k)
        for heads_q, heads_k in ((4, 2), (6, 6))
        for dim in (16, 32)
        for dtype in ("float32", "bfloat16")
    ]
    assert {one.window for *_, one in mine.forwards} == {(128, 0)}
    assert mine.backwards == []


def test_a_kind_without_lengths_runs_both_directions_with_the_options_that_describe_it(call, fake, plugins):
    mine = fake("mine")
    plugins(mine=mine.backend)
    described = ("--heads", "4,2", "--head-dim", "16", "--head-dim-v", "8", "--deterministic")
    result = call(*KINDS, *described, "--q", "1,8,4,16", "--backend", "mine")
    assert result.exit_code == 0, result.output
    exact, (query, _, value, forward) = mine.forwards
    assert exact[0].shape == (1, 8, 4, 16)
    assert (query.shape, value.shape) == ((2, 512, 4, 16), (2, 512, 2, 8))
    assert forward.deterministic and len(mine.backwards) == 2
    assert "query (2, 512, 4, 16)" in words(result)


@pytest.mark.parametrize("paged", [False, True])
def test_a_step_of_decoding_with_a_cache_runs_forward_alone_where_it_has_pages(call, fake, plugins, paged):
    mine = fake("mine", seqused_k=True, page_size=Range(1))
    plugins(mine=mine.backend)
    step = *KINDS, "--q", "3,1,4,16", "--kv", "3,64,2,16", "--dtype", "fp32", "--varlen", "--seqused-k"
    pages = ("--paged", "16") if paged else ()
    result = call(*step, *pages, "--backend", "mine")
    assert result.exit_code == 0, result.output
    ((query, key, _, forward),) = mine.forwards
    assert (query.shape, forward.max_q, forward.max_k) == ((3, 4, 16), 1, 64)
    assert key.shape[1:] == ((16, 2, 16) if paged else (2, 16))
    assert forward.seqused_k.tolist() == [64] * 3 and (forward.block_table is not None) == paged
    assert len(mine.backwards) == (0 if paged else 1)
    assert "seqused_k" in words(result) and ("pages of 16" in words(result)) == paged


# Recorded kinds


def test_each_kind_of_a_recording_runs_once_on_the_backends_that_would_run_its_calls(
    call, fake, plugins, trace, monkeypatch
):
    mine, other = fake("mine", dtypes=("bfloat16",)), fake("other")
    plugins(mine=mine.backend, other=other.backend)
    monkeypatch.setenv("ATTNREG_BACKEND", "mine,other")
    attnreg.reload()
    file = trace(
        (spec_with(300, varlen=True), (3, 2)),
        (spec_with(900, varlen=True), (1, 0)),
        (spec_with(64, dtype="float32"), (5, 0)),
    )
    result = call(*KINDS, "--from", file, "--json")
    assert result.exit_code == 0, result.output
    assert [(row["backend"], row["direction"], row["state"]) for row in calls_of(result)] == [
        ("mine", "forward", "ran"),
        ("mine", "backward", "ran"),
        ("other", "forward", "ran"),
    ]
    assert [x[0].shape for x in mine.forwards] == [(528, 4, 64)]
    assert [x[0].shape for x in other.forwards] == [(2, 64, 4, 64)]
    assert (len(mine.backwards), len(other.backwards)) == (1, 0)


def test_a_recording_runs_on_the_backends_that_are_named_and_without_backwards_if_asked(
    call, fake, plugins, trace
):
    mine, picky = fake("mine"), fake("picky", dtypes=("float16",))
    plugins(mine=mine.backend, picky=picky.backend)
    file = trace((spec_with(64), (1, 1)), (spec_with(64, dtype="float16"), (0, 1)))
    result = call(*KINDS, "--from", file, "--backend", "mine,picky", "--no-backward", "--json")
    assert result.exit_code == 1  # one that was named can't run it
    assert [(row["backend"], row["direction"], row["state"]) for row in calls_of(result)] == [
        ("mine", "forward", "ran"),
        ("picky", "forward", "refused"),
    ]
    assert (len(mine.forwards), mine.backwards, picky.forwards) == (1, [], [])
    assert call(*KINDS, "--from", file, "--backend", "mine").exit_code == 0
    assert len(mine.backwards) == 2


def test_a_recorded_kind_that_fails_or_that_nothing_can_run_is_exit_code_1(
    call, fake, plugins, kernels, trace, monkeypatch
):
    def crash(*arguments):
        raise RuntimeError("ptxas fatal")

    plugins(crashes=fake("crashes", load=lambda: kernels._replace(forward=crash)).backend)
    file = trace((spec_with(64, dtype="float32"), (1, 0)))
    assert call(*KINDS, "--from", file).exit_code == 0
    monkeypatch.setenv("ATTNREG_BACKEND", "crashes")
    attnreg.reload()
    result = call(*KINDS, "--from", file, "--json")
    assert result.exit_code == 1
    crashed, ran = calls_of(result)
    assert (crashed["backend"], crashed["state"], crashed["reason"]) == (
        ("crashes", "failed", "RuntimeError: ptxas fatal")
    )
    assert (ran["state"], ran["prepared"]) == ("ran", False) and ran["backend"] in ("cpu", "math")
    monkeypatch.setenv("ATTNREG_STRICT", "1")
    attnreg.reload()
    result = call(*KINDS, "--from", trace((spec_with(64, dtype="float32"), (1, 0))))
    assert result.exit_code == 1
    assert "no attention backend can run this forward on cpu" in words(result)


def test_a_recording_of_another_device_or_of_nothing_is_an_error(call, trace, tmp_path):
    cuda = trace((spec_with(64, device=attnreg.Device("cuda", (9, 0))), (1, 0)))
    result = call(*KINDS, "--from", cuda)
    assert result.exit_code == 2
    assert "--from: got calls on cuda, expected some on cpu, the device of --device" in words(result)
    (tmp_path / "empty.jsonl").write_text("")
    result = call(*KINDS, "--from", tmp_path / "empty.jsonl")
    assert (result.exit_code, "with at least one recorded call" in words(result)) == (2, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "got nothing to run, expected --q, --heads and --head-dim, or --from"),
        ("--heads 4,4", "--heads: got no --head-dim, expected both"),
        ("--head-dim 64 --q 1,8,4,64", "--head-dim: got no --heads, expected both"),
        ("--heads 4 --head-dim 64", "--heads: got '4', expected two whole numbers: query heads,key heads"),
        ("--heads 4,4 --head-dim x", "--head-dim: got 'x', expected a whole number: head dim"),
        ("--heads 4,4 --head-dim 64 --kv 1,8,4,64", "--kv: got 1, expected one for each --q, 0, or none"),
        ("--heads 4,4 --head-dim 64 --window 3,-5", "--window: got '3,-5', expected numbers of keys"),
        ("--from none.jsonl --causal", "--causal: got --from alone, expected the call that it describes"),
        ("--from none.jsonl", "none.jsonl: can't be read"),
        ("--heads 4,4 --head-dim 64 --backend mth", "no backend is named 'mth'; did you mean 'math'?"),
    ],
)
def test_options_that_describe_nothing_are_errors(call, options, message):
    result = call(*KINDS, *options.split())
    assert result.exit_code == 2
    assert message in words(result)
