"""Promises of `attnreg bench fresh`: no lengths come twice, right before fast, what the figures become."""

import contextlib
import dataclasses
import importlib
import itertools
import json
import random
import runpy
import sys
import types
from pathlib import Path

import pytest
import torch
from support.command_line import invoke
from support.processes import forked

import attnreg
from attnreg.core.dispatch import call_cache
from attnreg.tools.bench import fresh, report
from attnreg.tools.bench.fresh import attention, turns
from attnreg.tools.bench.fresh.attention import dense_shapes, growing, packed_shapes, settings_of
from attnreg.tools.bench.fresh.turns import FreshRow, Stream, Way
from attnreg.tools.bench.report import Job
from attnreg.tools.bench.shapes import BOTH, FORWARD, trains
from attnreg.tools.cli.bench import PARTS

CPU = torch.device("cpu")
BENCHMARKS = Path(attnreg.__file__).parents[1] / "benchmarks"
TORCH, OURS = "torch's SDPA", "attnreg"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def few_calls(monkeypatch):
    for name, value in {"FIRST": 4, "CHECKED": 2, "WARM_UP": 1, "EACH": 3}.items():
        monkeypatch.setattr(turns, name, value)


def run(*arguments):
    ended = invoke("bench", "fresh", "--quick", "--rounds", "2", "--device", "cpu", "--json", *arguments)
    return ended, json.loads(ended.stdout)


def measured(*arguments):
    ended, found = run(*arguments)
    assert ended.exit_code == 0, ended.output
    return found["results"]["rows"]


def test_decoding_is_timed_with_a_cache_that_grows_and_one_that_does_not_beside_torch(compiled_routers):
    ways = {TORCH: "torch", OURS: "cpu", "attnreg, Python": "cpu"}
    ways |= {"attnreg, cpu": "cpu", "attnreg, math": "math"}
    rows = {(row["side"], row["stream"]): row for row in measured("--part", "decode")}
    assert rows.keys() == set(itertools.product(ways, ("same", "new")))
    for (side, stream), row in rows.items():
        assert row["ran"] == ways[side] and (row["part"], row["step"]) == ("decode", FORWARD)
        assert row["calls"] == 6 and len(row["first"]) == 4 and 0 <= row["error"] <= 1
        assert 0 < row["milliseconds"] <= row["p95"] <= row["slowest"]
        same, torchs = rows[side, "same"], rows[TORCH, stream]
        assert row["over_same"] == pytest.approx(row["milliseconds"] / same["milliseconds"], rel=1e-3)
        assert row["over_yardstick"] == pytest.approx(row["milliseconds"] / torchs["milliseconds"], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("options", [("varlen,decode",), ("decode", "--part", "varlen")])
def test_several_parts_are_measured_together(options):
    rows = measured("--backend", "math", "--part", *options)
    assert {row["part"] for row in rows} == {"varlen", "decode"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "case"),
    [
        ("varlen", "packed, 8 of up to 15 tokens, 2 heads of 16, causal"),
        ("dense", "dense SDPA, batch 1 to 16, 2 to 40 tokens, 2 heads of 16"),
    ],
)
def test_training_is_timed_with_a_backward_and_without(part, case):
    rows = measured("--part", part, "--backend", "math")
    assert {(row["case"], row["step"]) for row in rows} == {(case, BOTH), (case, FORWARD)}
    assert {row["ran"] for row in rows if row["side"] == "attnreg, math"} == {"math"}


@pytest.fixture
def llama(monkeypatch):
    """Return the script that measures a model of transformers."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield importlib.import_module("fresh_llama")
    for name in ("fresh_llama", "_program"):
        sys.modules.pop(name, None)


@pytest.mark.slow
def test_a_llama_is_timed_by_name_and_below_sdpa_with_new_documents_and_new_totals(
    llama, monkeypatch, tmp_path, capsys
):
    out = tmp_path / "found.json"
    arguments = ["--quick", "--rounds", "2", "--device", "cpu", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["fresh_llama.py", *arguments])
    llama.main()
    assert "a Llama of 2 layers, 64 wide, 8 packed documents, 64 tokens" in capsys.readouterr().out
    found = json.loads(out.read_text())["results"]["rows"]
    rows = {(row["side"], row["stream"]): row["ran"] for row in found}
    ways = {
        "torch's sdpa": "torch",
        "attnreg": "cpu",
        "attnreg, sdpa, measured": "cpu",
        "no attention": "torch",
    }
    assert {side: ran for (side, _), ran in rows.items()} == ways
    assert {stream for _, stream in rows} == {"same", "new", "new total"}


def test_the_cache_of_flash_attns_function_is_one_memory_and_holds_what_the_batch_says():
    rows = attention.rows(Job(CPU, ("cpu",), 1, parts=("decode",)))
    (row,) = (row for row in rows if attention.KVCACHE in row.case)
    side, drawn = row.sides[OURS], [row.streams["new"].draw() for _ in range(3)]
    assert [batch.case.max_k for batch in drawn] == [8, 9, 10]
    with side.within():
        for batch in drawn[::-1]:
            assert row.verdict(batch, side.prepared(batch)()).wrong == ""
        assert row.verdict(drawn[0], side.prepared(drawn[1])()).wrong != ""


@pytest.mark.slow
def test_no_two_new_calls_of_a_row_have_the_same_lengths_and_repeated_calls_draw_as_well():
    drawn = {"same": [], "new": []}
    job = Job(CPU, ("cpu", "math"), 2, quick=True, parts=("varlen",))
    row = attention.rows(job)[0]

    def noting(name, stream):
        return stream._replace(draw=lambda: drawn[name].append(batch := stream.draw()) or batch)

    row = dataclasses.replace(row, streams={name: noting(name, x) for name, x in row.streams.items()})
    calls = {"same": 0, "new": 0}
    for measured in turns.measured(row, job):
        calls[measured["stream"]] += measured["calls"]
    assert all(len(drawn[name]) > count > 0 for name, count in calls.items())
    sizes = [(sum(batch.case.lens_q), max(batch.case.lens_q)) for batch in drawn["new"]]
    assert len(set(sizes)) == len(sizes)


@pytest.mark.parametrize(("stream", "batches"), [("same", [0, 0, 0, 0]), ("new", [0, 1, 2, 3])])
def test_what_a_call_reads_is_read_before_it_whether_its_batch_repeats_or_not(stream, batches):
    events = []
    side = Way(lambda batch: lambda: events.append(("call", batch)) or [], contextlib.nullcontext)
    streams = {name: Stream(itertools.count().__next__, repeats=name == "same") for name in ("same", "new")}
    row = FreshRow(
        "a part", "a case", FORWARD, {"a side": side}, streams, None, lambda x: events.append(("touch", x))
    )
    turns._Turns(row, "a side", CPU).turn(stream)
    assert events == [(what, batch) for batch in batches for what in ("touch", "call")]


def test_touching_a_batch_reads_the_memory_of_the_cache_as_far_as_it_is_held(monkeypatch):
    rows = attention.rows(Job(CPU, ("cpu",), 1, parts=("decode",)))
    (row,) = (row for row in rows if attention.KVCACHE in row.case)
    side, batch, shapes = row.sides[OURS], row.streams["new"].draw(), []
    side.prepared(batch)
    summed = torch.Tensor.sum
    monkeypatch.setattr(torch.Tensor, "sum", lambda x: shapes.append((*x.shape,)) or summed(x))
    row.touch(batch)
    assert shapes == [(8, 1, 2, 16), (8, 8, 2, 16), (8, 8, 2, 16)]


def test_a_forward_alone_computes_without_a_gradient():
    rows = [row for row in attention.rows(Job(CPU, ("cpu",), 1)) if row.step == FORWARD]
    sides = [(row, side) for row in rows for side in row.sides.values()]
    for row, side in sides:
        batch = row.streams["new"].draw()
        assert batch.sets[0].q.requires_grad
        with side.within():
            (out,) = side.prepared(batch)()
        assert not out.requires_grad
    assert len(sides) > 10


def first_of(shapes, count):
    return list(itertools.islice(shapes, count))


def test_lengths_grow_by_one_come_once_and_take_about_as_long_where_they_are_many():
    grown = first_of(growing(range(600, 2000), (32, 8), 128, "bfloat16", False), 5)
    assert [shape.lens_k for shape in grown] == [(length,) * 8 for length in range(600, 605)]
    assert {shape.lens_q for shape in grown} == {(1,) * 8}
    packed = first_of(packed_shapes(4096, 16, 16, 128, True), 300)
    totals = [sum(shape.lens_q) for shape in packed]
    assert max(totals) < 1.3 * min(totals) and max(max(shape.lens_q) for shape in packed) > 4000
    assert len({(sum(shape.lens_q), max(shape.lens_q)) for shape in packed}) == 300
    sizes = [(2, length) for length in range(100, 1001)]
    dense = first_of(dense_shapes(sizes, 8, 8, 64, False), 901)
    assert sorted(shape.lens_q for shape in dense) == [(length, length) for length in range(100, 1001)]


def test_when_all_lengths_have_come_they_come_again():
    few = first_of(packed_shapes(2, 2, 2, 16, True), 100)  # 8 to 16 tokens: eight sums with a longest of 2
    assert 5 < len({sum(shape.lens_q) for shape in few}) < 10


def test_on_a_gpu_the_rows_are_those_of_programs():
    found = {setting.case: next(setting.shapes()) for setting in settings_of("cuda")}
    assert list(found) == [
        "packed, 8 of up to 256 tokens, 8 heads of 64, causal",
        "packed, 8 of up to 4096 tokens, 16 heads of 128, causal",
        "decoding, SDPA, 8 sequences, heads 32:8 of 128, 600 keys and more",
        "decoding, flash_attn_with_kvcache, 8 sequences, heads 32:8 of 128, 600 keys and more",
        "decoding, varlen_attn, 8 sequences, heads 32:8 of 128, 600 keys and more",
        "dense SDPA, batch 2, 100 to 1000 tokens, 8 heads of 64",
        "dense flash_attn_func, batch 2, 100 to 1000 tokens, 8 heads of 64",
    ]
    for case, shape in found.items():
        assert shape.dtype == "bfloat16" and shape.varlen == ("packed" in case or "varlen" in case)
        assert shape.is_causal == ("causal" in case) and trains(shape) == ("decoding" not in case)


def test_every_part_of_the_command_has_rows():
    rows = attention.rows(Job(CPU, ("cpu",), 1))
    assert {row.part for row in rows} == set(PARTS)
    for part in PARTS:
        job = Job(CPU, ("cpu",), 1, parts=(part,))
        assert {row.part for row in attention.rows(job)} == {part}


def test_the_side_in_python_runs_without_the_call_cache(compiled_routers):
    sides = attention.rows(Job(CPU, ("cpu",), 1, parts=("varlen",)))[0].sides
    with sides["attnreg"].within():
        assert call_cache.active is not None
    with sides["attnreg, Python"].within():
        assert call_cache.active is None


@pytest.mark.parametrize(
    ("right_calls", "why"),
    [(3, "attnreg, mine: WRONG: out of sequence "), (20, "attnreg, mine: after the measurement: WRONG: ")],
    ids=["in its fourth call", "later"],
)
def test_a_side_that_is_wrong_for_later_lengths_is_left_out(fake, right_calls, why):
    backend = fake("mine").backend
    right, calls = backend.load(), itertools.count(1)

    def forward(*given):
        out, lse = right.forward(*given)
        return (out if next(calls) <= right_calls else out * 0.5), lse

    changed = right._replace(forward=forward)
    with attnreg.register_backend(dataclasses.replace(backend, load=lambda: changed)):
        _, found = run("--part", "decode", "--backend", "mine,math")
    assert {row["side"] for row in found["results"]["rows"]} >= {TORCH, "attnreg, math"}
    assert "attnreg, mine" not in {row["side"] for row in found["results"]["rows"]}
    assert any(why in line for line in found["left_out"])


@pytest.mark.slow
def test_a_side_that_another_backend_runs_is_left_out(fake):
    with attnreg.register_backend(fake("mine", dtypes=("float16",)).backend):
        _, found = run("--part", "varlen", "--backend", "mine,math")
    assert "attnreg, mine" not in {row["side"] for row in found["results"]["rows"]}
    assert any("attnreg, mine: " in line for line in found["left_out"])


def test_the_packages_own_function_is_called_as_programs_call_it_and_checked(monkeypatch):
    def flash_attn_varlen_func(
        q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal
    ):  # fmt: skip
        offsets = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        return attnreg.varlen_attn(q, k, v, *offsets, is_causal=causal), None

    interface = types.SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    monkeypatch.setattr(attention, "import_module", {"flash_attn.cute.interface": interface}.__getitem__)
    for row in attention.rows(Job(CPU, ("FA4",), 1, parts=("varlen",))):
        batch, side = row.streams["new"].draw(), row.sides[attention.PACKAGE]
        with side.within():
            results = side.prepared(batch)()
        assert row.verdict(batch, results).wrong == "" and len(results) == (4 if row.step == BOTH else 1)
    assert all(attention.PACKAGE not in row.sides for row in attention.rows(Job(CPU, ("cpu",), 1)))


def test_a_row_that_breaks_is_left_out_and_the_others_kept(monkeypatch):
    def broken(row, job):
        if row.step == FORWARD:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return turns.measured(row, job)

    monkeypatch.setattr("attnreg.tools.bench.fresh.measured", broken)
    ended, found = run("--part", "varlen", "--backend", "cpu")
    assert ended.exit_code == 0 and {row["step"] for row in found["results"]["rows"]} == {BOTH}
    (line,) = found["left_out"]
    assert line.endswith("causal, forward: OutOfMemoryError: CUDA out of memory")


def test_the_documents_of_a_model_are_new_and_only_the_last_one_counts(llama):
    model, chance = llama.Model(CPU), random.Random(0)
    batches = [model.draw(chance, 256) for _ in range(20)]
    starts = {tuple((batch.inputs["position_ids"][0] == 0).nonzero().flatten().tolist()) for batch in batches}
    assert len(starts) == 20 and {len(start) for start in starts} == {llama.COUNT}
    for batch in batches:
        last = batch.last.shape[1]
        assert 16 <= last <= 48 and batch.inputs["input_ids"].shape == (1, 256)
        assert (batch.inputs["labels"] != llama.IGNORED).sum() == last - 1
        assert torch.equal(batch.inputs["input_ids"][:, -last:], batch.last)


def test_a_model_whose_last_document_sees_another_is_wrong(llama):
    model = llama.Model(CPU)
    batch = model.draw(random.Random(0), 64)
    assert model.verdict(batch, model.prepared("sdpa", batch)()).wrong == ""
    positions = torch.arange(64)[None]
    joined = batch._replace(inputs=batch.inputs | {"position_ids": positions})
    assert model.verdict(batch, model.prepared("sdpa", joined)()).wrong.startswith("logits: ")


def row(side, stream, milliseconds, over_same, over_yardstick, first=30.0):
    return {
        "part": "varlen", "case": "packed", "step": BOTH, "side": side, "stream": stream,
        "milliseconds": milliseconds, "p95": milliseconds * 2, "slowest": milliseconds * 3, "calls": 100,
        "over_same": over_same, "over_yardstick": over_yardstick, "yardstick": "torch's varlen_attn",
        "first": [first, 1.0], "error": 0.5, "ran": "FA4",
    }  # fmt: skip


ROWS = [
    row("torch's varlen_attn", "same", 0.7, 1.0, 1.0), row("torch's varlen_attn", "new", 0.74, 1.057, 1.0),
    row("attnreg", "same", 0.05, 1.0, 0.071), row("attnreg", "new", 5.7, 114.0, 7.7),
    row("attnreg, FA4", "same", 0.11, 1.0, 0.157), row("attnreg, FA4", "new", 0.35, 3.18, 0.473),
    row("attnreg, FA2", "same", 0.7, 1.0, 1.0), row("attnreg, FA2", "new", 0.75, 1.07, 1.01),
]  # fmt: skip


def test_losses_are_said_as_gains_are():
    torchs = "times torch's varlen_attn"
    assert [line.removeprefix("packed, forward + backward: ") for line in fresh.lines(ROWS)] == [
        f"attnreg, new: 114.00 times the same batch; 7.70 {torchs}: LOSES",
        f"attnreg, FA4, new: 3.18 times the same batch; 0.47 {torchs}: gains",
        f"attnreg, FA2, new: 1.07 times the same batch; 1.01 {torchs}: level",
    ]
    assert fresh.lines([row("attnreg", "new", 5.7, 2.0, None)]) == [
        "packed, forward + backward: attnreg, new: 2.00 times the same batch"
    ]


MARKDOWN = """\
| packed, forward + backward, ms | same | new | new / same | new / torch's | first call |
|---|---|---|---|---|---|
| torch's varlen_attn | 0.700 (1.40) | 0.740 (1.48) | 1.06 | 1.00 | 30.0 |
| attnreg | 0.0500 (0.100) | 5.70 (11.4) | 114.00 | 7.70 | 30.0 |
| attnreg, FA4 | 0.110 (0.220) | 0.350 (0.700) | 3.18 | 0.47 | 30.0 |
| attnreg, FA2 | 0.700 (1.40) | 0.750 (1.50) | 1.07 | 1.01 | 30.0 |"""


def test_times_have_three_digits_and_from_a_thousand_on_whole_numbers():
    times = (0.0056, 0.075, 0.1, 1.3, 42.0, 100.04, 999.6, 4854.1)
    shown = ["0.00560", "0.0750", "0.100", "1.30", "42.0", "100", "1000", "4854"]
    assert list(map(report.time_text, times)) == shown


@pytest.mark.slow
def test_a_run_becomes_the_tables_of_the_docs(tmp_path):
    run = tmp_path / "run.json"
    run.write_text(json.dumps({"machine": {}, "results": {"table": "none", "rows": ROWS}}))
    file = str(BENCHMARKS / "redraw.py")
    run_it = f"runpy.run_path({file!r}, None, '__main__')"
    redraw = f"import runpy, sys; sys.path.insert(0, {str(BENCHMARKS)!r}); {run_it}"
    done = forked(redraw, "fresh", run, "--markdown")
    assert (done.returncode, done.stdout) == (0, MARKDOWN + "\n"), done.stderr


def test_the_number_of_threads_is_afterwards_as_it_was():
    torch.set_num_threads(2)
    measured("--part", "decode", "--backend", "cpu")
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    ("last", "what"),
    [
        ((324.0, 1000.0), []),
        ((326.0, 1000.0), ["memory of the process: +36 MB since 40,000 calls"]),
        ((200.0, 1080.0), ["memory of the GPU: +80 MB since 40,000 calls"]),
    ],
)
def test_memory_may_grow_by_five_percent_and_20_mb_after_a_fifth_of_the_calls(last, what):
    script = runpy.run_path(str(BENCHMARKS / "fresh_memory.py"))
    before = [(20_000, 100.0, 10.0), (40_000, 290.0, 1000.0), (60_000, 900.0, 1000.0), (80_000, *last)]
    assert script["grown"]([script["Reading"](*one) for one in before]) == what


def test_memory_is_read_ten_times_of_calls_of_new_lengths_on_the_backend_that_is_named(capsys, fake):
    measure = runpy.run_path(str(BENCHMARKS / "fresh_memory.py"))["measure"]
    readings = measure("cpu", "math", 20, ["packed", "dense"])
    assert [reading.calls for reading in readings] == list(range(2, 21, 2))
    assert all(reading.process > 10 and reading.gpu == 0 for reading in readings)
    another = fake("mine", dtypes=("float16",)).backend
    with pytest.raises(SystemExit, match="expected 20 calls of mine in each direction"):
        measure("cpu", another, 20, ["packed"])
    assert capsys.readouterr().out.count(" calls: ") == 20
