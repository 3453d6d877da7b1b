"""Promises about timed calls: all of them in a program that asks for a report, none in any other."""

import errno
import json
import os
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

import attnreg
from attnreg.core.aten import bypassed
from attnreg.core.contract.spec import AttentionSpec, Device
from attnreg.core.dispatch import planning, stats_file, timed
from attnreg.tools.report import lines

QUERY = torch.randn(1, 2, 8, 16)
FLASH_KERNEL = "torch's flash_attention kernel"


@pytest.fixture
def reported(monkeypatch, tmp_path):
    """Ask for a report; return a function that writes the line of this process and returns it."""
    file = tmp_path / "report.jsonl"
    monkeypatch.setenv("ATTNREG_REPORT", str(file))
    timed._plans.clear()
    timed.forget()
    attnreg.reset_stats()
    attnreg.reload()

    def read():
        stats_file.write()
        (line,) = file.read_text().splitlines()
        return json.loads(line)

    yield read
    monkeypatch.delenv("ATTNREG_REPORT")
    attnreg.reload()
    timed.follow(False)
    timed.forget()


@pytest.mark.usefixtures("compiled_routers")
def test_every_call_is_timed_whatever_the_call_cache_would_keep(reported):
    with attnreg.register_backend("math"):
        for _ in range(5):
            F.scaled_dot_product_attention(QUERY, QUERY, QUERY)
        packed, offsets = torch.randn(8, 2, 16), torch.tensor([0, 3, 8], dtype=torch.int32)
        for _ in range(4):
            attnreg.varlen_attn(packed, packed, packed, offsets, offsets, 5, 5)
    line = reported()
    dense, of_packed = line["report"]["plans"]
    assert (dense["calls"], dense["timed"]) == (5, 4)
    assert (of_packed["calls"], of_packed["timed"]) == (4, 3)
    assert {row["source"] for row in (dense, of_packed)} == {"register_backend('math')"}
    assert line["calls"] == {"math": {"forward": 9, "backward": 0}}
    assert dense["decided_us"] > 0.0 < dense["first_us"]


@pytest.mark.usefixtures("routers")
def test_calls_past_the_most_rows_are_in_no_other_row(reported, monkeypatch):
    monkeypatch.setattr(timed, "MOST_ROWS", 1)
    with attnreg.register_backend("math"):
        for length in (8, 8, 8, 30, 30, 30, 60):
            query = torch.randn(1, 2, length, 16)
            F.scaled_dot_product_attention(query, query, query)
    (row,) = reported()["report"]["plans"]
    assert row["calls"] == 3


@pytest.mark.usefixtures("routers")
def test_a_forked_process_has_the_calls_of_its_inherited_plans_and_none_of_its_parents(reported):
    for _ in range(3):
        F.scaled_dot_product_attention(QUERY, QUERY, QUERY)
    stats_file._forget_the_parents()  # as in the child, whose plans are its parent's
    for _ in range(5):
        F.scaled_dot_product_attention(QUERY, QUERY, QUERY)
    (row,) = reported()["report"]["plans"]
    assert row["calls"] == 5


def test_a_line_that_a_full_disk_cuts_off_is_said_and_spoils_no_other(tmp_path, monkeypatch, caplog):
    file, full, write = tmp_path / "stats.jsonl", [], os.write

    def write_half(descriptor, data):
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        full.append(True)
        return write(descriptor, data[: len(data) // 2])

    line = {"program": "train.py", "pid": 1} | attnreg.stats().to_dict()
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", write_half)
        stats_file._append(file, line)
    assert "can't be written: [Errno 28] No space left on device" in caplog.text
    for pid in (2, 3):
        stats_file._append(file, line | {"pid": pid})
    caplog.clear()
    assert [process["pid"] for process in lines.read([file]).processes] == [2, 3]
    (warning,) = caplog.messages
    assert warning == f"{file}:1: left out: the line of a process is cut off, as on a full disk"


@pytest.mark.usefixtures("routers")
def test_without_the_variable_no_plan_times_its_calls():
    with attnreg.register_backend("math"):
        F.scaled_dot_product_attention(QUERY, QUERY, QUERY)
        assert [plan.turn for plan in timed_plans()] == [None]


def timed_plans():
    from attnreg.core.dispatch.state import state

    return state().plans()


@pytest.mark.usefixtures("routers")
def test_torchs_own_kernel_is_timed_under_its_name_of_the_stats_where_nothing_asks_for_a_backend(reported):
    out = [F.scaled_dot_product_attention(QUERY, QUERY, QUERY) for _ in range(2)]
    explained = attnreg.explain(QUERY, QUERY, QUERY)
    line = reported()
    (row,) = line["report"]["plans"]
    assert (row["backend"], row["calls"], row["timed"]) == (FLASH_KERNEL, 2, 1)
    assert row["source"] == planning.NOTHING_ASKS
    assert line["calls"] == {FLASH_KERNEL: {"forward": 2, "backward": 0}}
    assert explained.unasked == bypassed.ROUTED["cpu", SDPBackend.FLASH_ATTENTION].kernel == FLASH_KERNEL
    assert explained.answer.startswith(f"{FLASH_KERNEL}, because nothing asks for a backend; attnreg itself")
    torch.testing.assert_close(out[0], out[1], rtol=0, atol=0)


@pytest.mark.usefixtures("routers")
def test_a_backend_that_is_asked_for_in_a_block_has_its_own_name_in_a_report(reported):
    with attnreg.use_backend("cpu"):
        F.scaled_dot_product_attention(QUERY, QUERY, QUERY)
    (row,) = reported()["report"]["plans"]
    assert (row["backend"], row["source"]) == ("cpu", "use_backend('cpu')")


@pytest.mark.usefixtures("routers")
def test_masks_are_counted_with_their_padding_and_run_as_given(reported):
    visible = torch.ones(2, 1, 1, 8, dtype=torch.bool)
    visible[1, ..., 2:] = False
    query = torch.randn(2, 2, 8, 16)
    with attnreg.register_backend("math"):
        F.scaled_dot_product_attention(query, query, query, visible)
        F.scaled_dot_product_attention(query, query, query, torch.rand(8, 8) > 0.5)
    line = reported()
    rows = {row["seen"]: row for row in line["report"]["masks"]}
    assert rows.pop("padded keys") == {"seen": "padded keys", "count": 1, "queries": 1.0, "keys": 0.625}
    ((unknown, row),) = rows.items()
    assert (row["queries"], row["count"]) == (0.0, 1) and unknown
    assert line["masks"] == []  # none was to be recognised
    assert [plan["spec"].get("bias") for plan in line["report"]["plans"]] == [True]


def test_a_call_that_raises_counts_nothing():
    plan = timed.TimedPlan(spec(), "forward", "FA2", "someone")
    with pytest.raises(ZeroDivisionError):
        plan.timed(lambda: 1 / 0, QUERY)
    assert plan.calls == 0 and plan.timed(lambda: "out", QUERY) == "out" and plan.calls == 1


def spec():
    sizes = {"batch": 1, "max_q": 8, "max_k": 8, "heads_q": 2, "heads_k": 2, "head_dim": 16, "head_dim_v": 16}
    return AttentionSpec(device=Device("cuda", (9, 0)), dtype="float16", **sizes)


class Event:
    """An event of a GPU that has been passed once `done`."""

    def __init__(self, at):
        self.at, self.done = at, False

    def query(self):
        return self.done

    def synchronize(self):
        self.done = True

    def elapsed_time(self, after):
        return after.at - self.at


def test_on_a_gpu_some_calls_are_timed_by_events_that_are_read_later(monkeypatch):
    made, host_s = [], 1e-5

    def between_events(run, device, busy_s):
        made.append((Event(0.0), Event(0.25)))
        return run(), made[-1], host_s

    monkeypatch.setattr(timed, "between_events", between_events)
    plan, query = (
        timed.TimedPlan(spec(), "forward", "FA2", "someone"),
        SimpleNamespace(is_cuda=True, device=0),
    )
    ran = [plan.timed(lambda: 1, query) for _ in range(40)]
    assert (len(ran), plan.calls) == (40, 40)
    assert len(made) == timed.TIMED_AT_FIRST - 1 + 1  # all but the first, and the 32nd
    assert plan.times[0] == 0  # the device hasn't passed any event
    host_s = 1.0  # so slow a host leaves the device waiting: the events say nothing
    for _ in range(24):
        plan.timed(lambda: 1, query)
    row = plan.to_dict()
    assert (row["calls"], row["timed"], row["shortest_us"], row["longest_us"]) == (64, 16, 250.0, 250.0)
