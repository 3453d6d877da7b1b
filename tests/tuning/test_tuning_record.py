"""Promises of recording: each distinct call once with its count, at the price of a counter."""

import json
import os
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.processes import Forked, forked
from support.sdpa import attend
from support.tuned import spec_with

import attnreg
from attnreg.core.dispatch import counters, trace
from attnreg.core.dispatch.state import state
from attnreg.core.times import traces
from attnreg.core.times.traces import spec_from, spec_to
from attnreg.core.torchlib import locks
from attnreg.errors import ConfigError

pytestmark = pytest.mark.usefixtures("routers")


def counts(file):
    return {one.spec.max_q: (one.forward, one.backward) for one in traces.read(file)}


def test_each_distinct_call_is_written_once_with_how_often_it_ran(tmp_path):
    file = tmp_path / "trace.jsonl"
    with attnreg.record(file):
        for _ in range(3):
            attend(8)
        attend(24, grad=True)
        attend(24, grad=True)
    attend(8)
    assert counts(file) == {8: (3, 0), 24: (2, 2)}
    assert len(file.read_text().splitlines()) == 2
    spec = traces.read(file)[1].spec
    assert (spec.heads_q, spec.dtype, spec.needs_backward, str(spec.device)) == (2, "float32", True, "cpu")


def test_a_packed_call_is_recorded_with_its_tokens(tmp_path, packed):
    with attnreg.record(tmp_path / "trace.jsonl"):
        attnreg.varlen_attn(*packed((5, 9)))
    (one,) = traces.read(tmp_path / "trace.jsonl")
    assert (one.spec.varlen, one.spec.batch, one.spec.tokens_q, one.spec.max_q) == (True, 2, 14, 9)
    assert (one.forward, one.backward) == (1, 0)


def test_what_runs_while_recording_is_what_ran_before(tmp_path, ran):
    query = torch.randn(1, 2, 8, 16)
    before = F.scaled_dot_product_attention(query, query, query)
    with attnreg.record(tmp_path / "trace.jsonl"):
        assert torch.equal(F.scaled_dot_product_attention(query, query, query), before)
        assert ran() == {"torch's flash_attention kernel": (1, 0)}  # as `stats` calls it without a recording
    attend()
    assert ran() == {}
    assert not state().active


def test_counts_are_added_to_those_of_the_file_and_recordings_may_nest(tmp_path):
    outer, inner = tmp_path / "outer.jsonl", tmp_path / "inner.jsonl"
    for _ in range(2):
        with attnreg.record(outer):
            attend(8)
            with attnreg.record(inner):
                attend(8)
    assert (counts(outer), counts(inner)) == ({8: (4, 0)}, {8: (2, 0)})


def test_recording_adds_one_addition_to_a_repeated_call(tmp_path):
    attnreg.register_backend("math")
    attend()
    plans = {len(plan.counters) for plan in state().plans()}
    with attnreg.record(tmp_path / "trace.jsonl"):
        attend()
        assert {len(plan.counters) for plan in state().plans()} == {n + 1 for n in plans}
    attend()
    assert {len(plan.counters) for plan in state().plans()} == plans


def test_what_was_recorded_is_written_also_if_the_block_raises(tmp_path, monkeypatch, caplog):
    def fail(*args):
        raise ConfigError("trace.jsonl: can't be written")

    with pytest.raises(ZeroDivisionError), attnreg.record(tmp_path / "trace.jsonl"):
        attend(8)
        raise ZeroDivisionError
    assert counts(tmp_path / "trace.jsonl") == {8: (1, 0)}
    # The program's own exception isn't hidden by one of the file.
    with pytest.raises(ZeroDivisionError), attnreg.record(tmp_path / "trace.jsonl"):
        attend()
        monkeypatch.setattr(trace, "merge", fail)
        raise ZeroDivisionError
    assert [record.getMessage() for record in caplog.records] == ["trace.jsonl: can't be written"]
    with pytest.raises(ConfigError, match="can't be written"), attnreg.record(tmp_path / "trace.jsonl"):
        attend()


def test_a_line_that_was_being_written_when_a_process_was_killed_is_left_out(tmp_path):
    file = tmp_path / "trace.jsonl"
    with attnreg.record(file):
        attend(8)
    file.write_text(file.read_text() + file.read_text()[:40])
    assert counts(file) == {8: (1, 0)}
    with attnreg.record(file):
        attend(8)
    assert counts(file) == {8: (2, 0)}


def test_a_program_that_is_killed_leaves_what_ran_until_shortly_before(tmp_path, monkeypatch):
    monkeypatch.setattr(trace, "SECONDS_BEFORE", 0.01)
    monkeypatch.setattr(trace, "SECONDS_BETWEEN", 0.01)
    file = tmp_path / "trace.jsonl"
    with attnreg.record(file):
        for length, expected in ((8, {8: (1, 0)}), (24, {8: (1, 0), 24: (1, 0)})):
            attend(length)
            for _ in range(1000):
                if file.exists() and counts(file) == expected:
                    break
                time.sleep(0.01)
            assert counts(file) == expected
        (thread,) = [one for one in threading.enumerate() if one.name == "attnreg recording"]
    assert counts(file) == {8: (1, 0), 24: (1, 0)}
    thread.join(5.0)
    assert not thread.is_alive()


ROW = {"device": {"type": "cpu", "capability": None, "name": ""}, "forward": 1, "backward": 0, "spec": {}}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("hello", "Expecting value: line 1 column 1 (char 0)"),
        ("[]", "the line is no object"),
        ('{"spec": {}}', "the line has no 'device'"),
        (json.dumps(ROW | {"device": 3}), "device is no object"),
        (json.dumps(ROW | {"device": {"type": "cpu", "name": ""}}), "device has no 'capability'"),
        (
            json.dumps(ROW | {"device": ROW["device"] | {"capability": 9}}),
            "device.capability is no list or null",
        ),
        (json.dumps(ROW | {"device": ROW["device"] | {"name": []}}), "device.name is no text"),
        (json.dumps(ROW | {"forward": -1}), "counts (-1, 0)"),
        (json.dumps(ROW | {"spec": []}), "spec is no object"),
    ],
)
def test_a_file_with_something_else_in_it_is_refused_before_anything_runs(tmp_path, text, why):
    file = tmp_path / "notes.txt"
    file.write_text(text + "\n")
    message = f"notes.txt:1: got no recorded call ({why}), expected a line of `attnreg.record`"
    with pytest.raises(ConfigError) as error, attnreg.record(file):
        pytest.fail("the block must not run")
    assert str(error.value).endswith(message)
    assert file.read_text() == text + "\n"


def test_what_is_no_path_is_refused():
    with (
        pytest.raises(ConfigError, match="record: got 3, expected the path of a file"),
        attnreg.record(3),
    ):
        pytest.fail("the block must not run")


def test_a_folder_that_is_not_there_is_refused_before_anything_runs(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="can't be written"), attnreg.record(tmp_path / "no" / "x.jsonl"):
        pytest.fail("the block must not run")
    monkeypatch.setenv("ATTNREG_RECORD", str(tmp_path / "no" / "x.jsonl"))
    with pytest.raises(ConfigError, match=r"ATTNREG_RECORD: .*can't be written"):
        attnreg.reload()


def test_the_variable_records_until_the_settings_are_read_without_it(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNREG_RECORD", str(tmp_path / "trace.jsonl"))
    attnreg.reload()
    assert state().policy.only_recording
    attend(8)
    monkeypatch.delenv("ATTNREG_RECORD")
    attnreg.reload()
    attend(8)
    assert counts(tmp_path / "trace.jsonl") == {8: (1, 0)}


def test_a_block_that_asks_for_cpu_gets_its_corrections_of_torchs_kernel_also_while_recording(tmp_path):
    query, key = torch.randn(1, 8, 33, 64), torch.randn(1, 8, 33, 64)

    def negative():
        return F.scaled_dot_product_attention(query, key, key, is_causal=True, scale=-1.0)

    with attnreg.record(tmp_path / "x.jsonl"):
        assert state().policy.only_recording
        assert negative().isnan().any()  # torch's own kernel, to which recording alone changes nothing
        with attnreg.use_backend("cpu"):
            expected = torch.softmax(
                (-query @ key.mT).masked_fill(torch.ones(33, 33).triu(1) > 0, -torch.inf), -1
            )
            torch.testing.assert_close(negative(), expected @ key)


SCRIPT = """
import attnreg
import torch
import torch.nn.functional as F
query = torch.randn(1, 2, 8, 16)
for _ in range(3):
    F.scaled_dot_product_attention(query, query, query)
"""


def test_an_unchanged_program_is_recorded_by_the_variable_and_processes_add_up(tmp_path):
    file = tmp_path / "trace.jsonl"
    running = [Forked(SCRIPT, ATTNREG_RECORD=str(file)) for _ in "ab"]
    assert [process.stdout.read() + process.kill() for process in running] == ["", ""]
    assert counts(file) == {8: (6, 0)}
    assert len(file.read_text().splitlines()) == 1


FORKING = """
import multiprocessing
import torch
import torch.nn.functional as F

def work(length):
    F.scaled_dot_product_attention(*torch.randn(3, 1, 2, length, 16).unbind())

work(8)
for length in (8, 24):
    worker = multiprocessing.get_context("fork").Process(target=work, args=(length,))
    worker.start()
    worker.join()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_what_forked_workers_ran_is_recorded_too_and_what_their_parent_ran_once(tmp_path):
    file = tmp_path / "trace.jsonl"
    done = forked(FORKING, ATTNREG_RECORD=str(file))
    assert done.returncode == 0, done.stderr
    assert counts(file) == {8: (2, 0), 24: (1, 0)}


def test_calls_beyond_the_most_that_a_file_holds_are_left_out_and_that_is_logged_once(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(trace, "MOST_SPECS", 2)
    with attnreg.record(tmp_path / "trace.jsonl"):
        for length in (8, 16, 24, 32):
            attend(length)
    assert set(counts(tmp_path / "trace.jsonl")) == {8, 16}
    assert caplog.text.count("trace.jsonl: has 2 distinct calls, more are not recorded") == 1


def test_every_spec_comes_back_from_its_line():
    for spec in (
        spec_with(),
        spec_with(
            window=(4, 0), varlen=True, tokens_q=300, dropout=0.1, page_size=16, num_splits=2, bias=True
        ),
    ):
        assert spec_from(json.loads(json.dumps(spec_to(spec))), spec.device) == spec


# What goes wrong with the file

AT_MOST_4_KB = """
import resource, sys
from pathlib import Path
import attnreg
from attnreg.errors import ConfigError
from attnreg.core.times import traces
file = Path(sys.argv[1])
counts = {(one.spec, "forward"): 1 for one in traces.read(file)}
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    traces.merge(file, counts)
except ConfigError as error:
    print(error)
"""


def test_a_disk_that_is_full_leaves_the_file_as_it_was(tmp_path):
    file = tmp_path / "trace.jsonl"
    traces.merge(file, {(spec_with(batch=n), "forward"): n for n in range(1, 101)})
    before = file.read_text()
    done = forked(AT_MOST_4_KB, file)
    assert done.stdout == f"{file}: can't be written: File too large\n", done.stderr
    assert file.read_text() == before and len(traces.read(file)) == 100
    assert list(tmp_path.iterdir()) == [file]  # nor is a temporary file or a lock left


def test_a_file_that_cannot_be_written_is_one_warning_and_what_was_counted_is_kept(
    tmp_path, monkeypatch, caplog
):
    with attnreg.record(tmp_path / "trace.jsonl"):
        attend(8)
        with monkeypatch.context() as patch:
            patch.setattr(trace, "merge", lambda *_: fail_with("trace.jsonl: can't be written"))
            for _ in range(3):
                trace._write(trace._recordings[0])
        attend(8)
    assert [record.getMessage() for record in caplog.records] == ["trace.jsonl: can't be written"]
    assert counts(tmp_path / "trace.jsonl") == {8: (2, 0)}


def fail_with(message):
    raise ConfigError(message)


def test_a_lock_that_another_process_keeps_is_not_waited_for_without_end(tmp_path):
    file = tmp_path / "trace.jsonl"
    traces.merge(file, {(spec_with(), "forward"): 1})
    held = locks.lock_file(tmp_path / ".trace.jsonl.lock")
    # What reads the file, as `import torch` does, needs no lock: it is replaced whole.
    traces.check_writable(file)
    with pytest.raises(ConfigError, match=rf"can't be written: process {os.getpid()} has kept .* locked"):
        traces.merge(file, {(spec_with(), "forward"): 1}, seconds=0.02)
    locks.release(held)
    traces.merge(file, {(spec_with(), "forward"): 1})
    (one,) = traces.read(file)
    assert one.forward == 2


def test_a_signal_handler_that_writes_a_recording_while_it_is_written_counts_each_call_once(
    tmp_path, monkeypatch
):
    """Its thread holds the lock of what writes, and waits for what the handler does."""
    real, places = trace.merge, [(spec_with(max_q=length), "forward") for length in (8, 24)]
    recording = trace.Recording(tmp_path / "trace.jsonl", {place: counters.Counter() for place in places})
    interrupted = []

    def merge(path, counts, seconds):
        if not interrupted:
            interrupted.append(path)
            recording.counted[places[1]].value += 1
            recording.write()  # as the handler's `reload()` may do
        real(path, counts, seconds)

    monkeypatch.setattr(trace, "merge", merge)
    recording.counted[places[0]].value += 1
    recording.write()
    assert counts(recording.path) == {8: (1, 0), 24: (1, 0)}
    recording.write()
    assert interrupted == [recording.path] and counts(recording.path) == {8: (1, 0), 24: (1, 0)}


def test_a_process_that_can_have_no_more_threads_records_all_the_same(tmp_path, monkeypatch):
    def fail(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    with attnreg.record(tmp_path / "trace.jsonl"):
        attend(8)
    assert counts(tmp_path / "trace.jsonl") == {8: (1, 0)}


def test_the_thread_waits_less_for_a_lock_than_the_end_of_the_program_does(tmp_path, monkeypatch):
    for name in ("SECONDS_BEFORE", "SECONDS_BETWEEN"):
        monkeypatch.setattr(trace, name, 0.01)
    waits, merged = {}, threading.Event()

    def merge(path, counts, seconds):
        waits[threading.current_thread() is threading.main_thread()] = seconds
        merged.set()
        raise ConfigError("locked")

    monkeypatch.setattr(trace, "merge", merge)
    with pytest.raises(ConfigError, match="locked"), attnreg.record(tmp_path / "trace.jsonl"):
        attend(8)
        assert merged.wait(60.0)
    # In two seconds and a half a process adds to as large a file as there is.
    assert 2.5 < waits[False] < 5.0 <= waits[True]


def test_waiting_for_a_thread_that_writes_is_part_of_the_time_that_the_end_waits(tmp_path, monkeypatch):
    now, waits = iter((100.0, 103.0)), []
    monkeypatch.setattr(trace.time, "monotonic", lambda: next(now))  # three seconds until it has the lock
    monkeypatch.setattr(trace, "merge", lambda path, counts, seconds: waits.append(seconds))
    recording = trace.Recording(tmp_path / "trace.jsonl", {(spec_with(), "forward"): counters.Counter()})
    recording.counted[spec_with(), "forward"].value = 1
    recording.write(10.0)
    assert waits == [7.0]


def test_importing_torch_waits_for_no_lock_and_the_end_says_in_one_line_that_it_did(tmp_path):
    program = """
        import fcntl, sys, traceback
        locked = []
        def seen(event, _):
            if event == "fcntl.flock":
                locked.append(traceback.format_stack(limit=5))
        sys.addaudithook(seen)
        import attnreg, torch
        from attnreg import _autoload
        from attnreg.core.dispatch import counters, trace
        from attnreg.core.dispatch.state import state
        trace._write.__defaults__ = (0.05,)
        _autoload.activate()
        state()
        assert locked == [], locked
        x = torch.ones(1, 1, 4, 8)
        torch.nn.functional.scaled_dot_product_attention(x, x, x)
        assert locked == [], locked
    """
    file = tmp_path / "trace.jsonl"
    held = locks.lock_file(tmp_path / ".trace.jsonl.lock")
    done = forked(textwrap.dedent(program), ATTNREG_RECORD=str(file))
    locks.release(held)
    assert done.returncode == 0, done.stderr
    locked = f"process {os.getpid()} has kept {tmp_path}/.trace.jsonl.lock locked for 0.05 s"
    assert done.stderr == f"{file}: can't be written: {locked}\n"


def test_threads_that_add_to_one_file_lose_nothing(tmp_path, hasty):
    file = tmp_path / "trace.jsonl"

    def add(batch):
        for _ in range(10):
            traces.merge(file, {(spec_with(batch=batch), "forward"): 1, (spec_with(), "backward"): 1})

    threads = [threading.Thread(target=add, args=(batch,)) for batch in (3, 4, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    added = {one.spec.batch: (one.forward, one.backward) for one in traces.read(file)}
    assert added == {spec_with().batch: (0, 30)} | dict.fromkeys((3, 4, 5), (10, 0))
    assert list(tmp_path.iterdir()) == [file]


def test_a_device_is_not_replaced_by_a_file():
    with pytest.raises(ConfigError, match="/dev/null: can't be written: isn't a regular file"):
        traces.check_writable(Path(os.devnull))


def test_calls_run_where_the_variable_names_a_file_that_cannot_be_written(tmp_path, monkeypatch, caplog, ran):
    monkeypatch.setenv("ATTNREG_RECORD", str(tmp_path / "no" / "x.jsonl"))
    monkeypatch.setenv("ATTNREG_BACKEND", "math")
    for _ in range(3):
        attend(8)
    assert ran() == {"math": (3, 0)}
    said = f"calls are not recorded: ATTNREG_RECORD: {tmp_path}/no/x.jsonl: can't be written: "
    assert [record.getMessage() for record in caplog.records] == [f"{said}No such file or directory"]


def test_calls_that_no_router_saw_are_named_once_at_the_end(tmp_path, caplog):
    q = torch.randn(1, 2, 16, 8)
    with attnreg.record(tmp_path / "trace.jsonl"):
        F.scaled_dot_product_attention(q, q, q)
        F.scaled_dot_product_attention(q, q, q, dropout_p=0.1)
        F.scaled_dot_product_attention(q, q, q, dropout_p=0.1)
    assert [one.getMessage().partition(" lacks ")[2] for one in caplog.records] == [
        "calls that attnreg never saw: 2 that torch's math kernel ran (dropout_p must be 0 on a CPU, got 0.1)"
    ]
    caplog.clear()
    with attnreg.record(tmp_path / "trace.jsonl"):
        F.scaled_dot_product_attention(q, q, q)
    assert not caplog.records
