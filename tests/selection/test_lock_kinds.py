"""Promises of a lockfile by kinds: one backend for each range of lengths, whatever lengths come later."""

import json

import pytest
import torch
from support.command_line import broken_loader, invoke, words
from support.known import know, replace
from support.policies import put_in_force
from support.sdpa import attend

import attnreg
from attnreg.backends import math as math_backend
from attnreg.core import registry
from attnreg.core.contract.lengths import Cut, Lengths
from attnreg.core.contract.spec import Device
from attnreg.core.policy import lockfile, ranges
from attnreg.core.policy.lockfile import LockInForce
from attnreg.core.times.points import Malformed
from attnreg.errors import UnsupportedInputError

pytestmark = pytest.mark.usefixtures("routers")

MOST = 64  # the longest query of "short"


def short_cuts(spec):
    return (Cut.of("max_q", at=MOST + 1),)


def short_refuses(spec):
    return ("the query is too long",) if spec.max_q > MOST else ()


@pytest.fixture(autouse=True)
def known(monkeypatch, fake):
    """Know a fake for short queries and one for the rest, and math."""
    limits = {"devices": ("cpu", "cuda")}
    made = [
        fake("short", priority=900, refuses=short_refuses, cuts=short_cuts, **limits).backend,
        fake("rest", priority=800, **limits).backend,
    ]
    return know(monkeypatch, *made, math_backend.BACKEND)


@pytest.fixture
def lock(tmp_path, ran):
    """Record what `run` runs, and lock it; returns the file."""

    def make(run, *options):
        trace, out = tmp_path / "trace.jsonl", tmp_path / "lock.json"
        with attnreg.record(trace):
            run()
        done = invoke("lock", "--from", trace, "--out", out, *options)
        assert done.exit_code == 0, done.output
        ran()
        return out

    return make


def rows_of(file):
    return [
        (row["backend"], row["direction"], row.get("lengths")) for row in json.loads(file.read_text())["rows"]
    ]


def train(packed, *batches, window=(-1, -1)):
    """Run forward and backward of packed batches, each a tuple of the lengths of its sequences."""
    for lengths in batches:
        attnreg.varlen_attn(*packed(lengths), window_size=window).sum().backward()


def decode(*lengths):
    """Run a single query after each number of keys."""
    for length in lengths:
        query, key = torch.randn(1, 2, 1, 16), torch.randn(1, 2, length, 16)
        torch.nn.functional.scaled_dot_product_attention(query, key, key)


# Programs with new lengths


def test_packed_training_with_other_documents_in_each_step_is_locked(lock, packed, ran, monkeypatch):
    file = lock(lambda: train(packed, (5, 9), (30, 2, 7), (100, 4)))
    assert rows_of(file) == [
        ("short", "forward", {"max_q": [None, MOST]}),
        ("rest", "forward", {"max_q": [MOST + 1, None]}),
        ("short", "backward", {"max_q": [None, MOST]}),
        ("rest", "backward", {"max_q": [MOST + 1, None]}),
    ]
    looked_up, expected = [], LockInForce.expected
    monkeypatch.setattr(LockInForce, "expected", lambda *given: looked_up.append(given) or expected(*given))
    put_in_force(file, monkeypatch)
    train(packed, (3, 11), (MOST, 8))
    assert ran() == {"short": (2, 2)}
    before = len(looked_up)
    train(packed, (17, 4, 40), (9,), (12, 12))
    assert ran() == {"short": (3, 3)}
    assert len(looked_up) <= before + 3  # a batch of one sequence is a class of its own, others are known
    train(packed, (MOST + 1, 3), (200,))
    assert ran() == {"rest": (2, 2)}


def test_a_batch_that_is_shorter_than_the_window_has_the_row_of_the_window(lock, packed, ran, monkeypatch):
    file = lock(lambda: train(packed, (30, 9), window=(7, 0)))
    put_in_force(file, monkeypatch)
    train(packed, (20, 25), (6, 3), (8, 8), (1, 1), (40, 2), window=(7, 0))
    assert ran() == {"short": (5, 5)}
    with pytest.raises(
        UnsupportedInputError, match=r"nearest: rows\[\d\], \w+, with window \(7, 0\) \(here \(-1, 0\)\)"
    ):
        train(packed, (20, 25), window=(-1, 0))  # another mask, unless the window reaches all keys


def test_calls_with_other_numbers_of_ranges_are_locked_on_either_side_of_a_limit(
    lock, packed, fake, ran, monkeypatch
):
    replace("short", fake("short", priority=900, key_ranges=True, ranges=attnreg.Range(0, 4)).backend)
    replace("rest", fake("rest", priority=800, key_ranges=True).backend)

    def attend_in(*counts):
        query, key, value, *lengths = packed((5, 9), grad=False)
        for count in counts:
            ranges = torch.tensor([0, 9], dtype=torch.int32).expand(14, count, 2)
            attnreg.varlen_attn(query, key, value, *lengths, key_ranges=ranges)

    file = lock(lambda: attend_in(2, 7))
    assert rows_of(file) == [
        ("short", "forward", {"ranges": [None, 4]}),
        ("rest", "forward", {"ranges": [5, None]}),
    ]
    put_in_force(file, monkeypatch)
    attend_in(9, 1, 4, 5, 3)
    assert ran() == {"short": (3, 0), "rest": (2, 0)}


def test_a_cache_that_outgrows_the_recording_is_locked(lock, ran, monkeypatch):
    file = lock(lambda: decode(5, 6, 7))
    put_in_force(file, monkeypatch)
    decode(8, 9, 300, 5000)
    assert ran() == {"short": (4, 0)}


def test_ranges_end_where_the_recorded_backends_change_if_no_cut_says_where(lock, fake, ran, monkeypatch):
    def refuses(spec):  # a limit that no cut names
        return ("too long",) if spec.max_k > 100 else ()

    replace("short", fake("short", priority=900, refuses=refuses).backend)
    file = lock(lambda: [attend(length) for length in (8, 40, 150, 400)])
    assert [lengths for _, _, lengths in rows_of(file)] == [{"max_q": [None, 63]}, {"max_q": [64, None]}]
    put_in_force(file, monkeypatch)
    for length in (9, 63, 64, 1000):
        attend(length)
    assert ran() == {"short": (2, 0), "rest": (2, 0)}
    assert "right on cpu, 2 rows" in words(invoke("lock", "--check", file))


def test_lengths_that_the_recorded_backend_cannot_run_have_no_row_and_the_error_names_the_nearest(
    lock, ran, monkeypatch
):
    file = lock(lambda: attend(8))
    put_in_force(file, monkeypatch)
    attend(MOST)
    assert ran() == {"short": (1, 0)}
    with pytest.raises(UnsupportedInputError) as error:
        attend(MOST + 5)
    message = str(error.value).splitlines()
    assert len(message) == 3
    assert message[1] == f"  nearest: rows[0], short, with max_q up to {MOST} (here {MOST + 5})"


def test_a_range_may_be_of_a_sum_of_lengths(lock, packed, fake, ran, monkeypatch):
    def refuses(spec):
        return ("more queries than keys",) if spec.max_q > spec.max_k else ()

    def cuts(spec):
        return (Cut.beyond("max_q", "max_k"),)

    replace("short", fake("short", priority=900, refuses=refuses, cuts=cuts).backend)

    def run(*pairs):
        for lengths_q, lengths_k in pairs:
            attnreg.varlen_attn(*packed(lengths_q, lengths_k, grad=False))

    file = lock(lambda: run(((5, 9), (5, 9)), ((20, 3), (7, 2))))
    assert rows_of(file) == [
        ("short", "forward", {"max_q - max_k": [None, 0]}),
        ("rest", "forward", {"max_q - max_k": [1, None]}),
    ]
    put_in_force(file, monkeypatch)
    run(((30, 1), (30, 4)), ((31, 1), (30, 4)))
    assert ran() == {"short": (1, 0), "rest": (1, 0)}


def test_each_kind_has_rows_of_its_own(lock, ran, monkeypatch):
    def run():
        attend(8)
        attend(8, grad=True)

    with attnreg.register_backend("math"):
        file = lock(run)
    data = json.loads(file.read_text())
    kinds = [
        (row["direction"], row["spec"].get("needs_backward", False), row["backend"]) for row in data["rows"]
    ]
    assert kinds == [("forward", False, "math"), ("forward", True, "math"), ("backward", True, "math")]
    put_in_force(file, monkeypatch)
    attend(900)
    attend(90, grad=True)
    assert ran() == {"math": (2, 1)}


def test_a_backward_has_a_row_though_an_option_is_its_forwards_alone(lock, packed, ran, monkeypatch):
    def run(*lengths):
        attnreg.varlen_attn(*packed(lengths), num_splits=2).sum().backward()

    for options in ((), ("--exact",)):
        put_in_force(lock(lambda: run(5, 9), *options), monkeypatch)
        run(5, 9)
        assert ran() == {"short": (1, 1)}
        monkeypatch.delenv("ATTNREG_LOCK")
        attnreg.reload()


# Exact lengths


def test_exact_rows_are_for_the_recorded_lengths_alone(lock, ran, monkeypatch):
    file = lock(lambda: [attend(8), attend(24)], "--exact")
    assert rows_of(file) == [("short", "forward", None)] * 2
    put_in_force(file, monkeypatch)
    for _ in range(3):
        attend(8)
    attend(24)
    assert ran() == {"short": (4, 0)}
    with pytest.raises(UnsupportedInputError, match=r"nearest: rows\[0\], short, with max_q 8 \(here 9\)"):
        attend(9)


def test_rows_of_both_sorts_may_be_in_one_file_and_the_exact_one_counts(lock, ran, monkeypatch):
    file = lock(lambda: attend(8))
    data = json.loads(file.read_text())
    exact = {key: value for key, value in data["rows"][0].items() if key != "lengths"}
    data["rows"].append({**exact, "backend": "rest"})
    file.write_text(json.dumps(data))
    put_in_force(file, monkeypatch)
    for length in (8, 9, 8, 10):
        attend(length)
    assert ran() == {"rest": (2, 0), "short": (2, 0)}


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([], "rows[0].lengths: got [], expected ranges of lengths"),
        ({"max": [1, 2]}, "rows[0].lengths.max: got an unknown length, expected batch, max_q, max_k"),
        ({"max_q-max_k": [1, 2]}, "rows[0].lengths.max_q-max_k: got an unknown length"),
        ({"max_q": [1]}, "rows[0].lengths.max_q: got [1], expected [lowest, highest], whole numbers or null"),
        ({"max_q": [True, 2]}, "rows[0].lengths.max_q: got [True, 2], expected [lowest, highest]"),
    ],
)
def test_wrong_ranges_are_errors_that_name_the_key(lock, lengths, message):
    file = lock(lambda: attend(8))
    data = json.loads(file.read_text())
    data["rows"][0]["lengths"] = lengths
    file.write_text(json.dumps(data))
    assert message in words(invoke("check", file))


def test_a_range_reads_as_it_was_written():
    terms = ((64, ("batch",)), (-1, ("max_q", "max_k")), (1, ("tokens_q",)))
    one = ranges.LengthRange(terms, -3, None)
    assert one.name == "64*batch - max_q*max_k + tokens_q"
    assert ranges.ranges_from(ranges.ranges_to((one,)), "here") == (one,)
    assert one.contains(Lengths(1, 8, 8, -3, 8)) and not one.contains(Lengths(1, 8, 8, -4, 8))
    with pytest.raises(Malformed, match="unknown length"):
        ranges.ranges_from({"- - max_q": [1, 2]}, "here")


# Checks before a rollout


def faults(*options):
    result = invoke("lock", "--check", *options, "--json")
    found = json.loads(result.stdout)["faults"]
    assert result.exit_code == (2 if found else 0)
    return found


def test_a_lock_is_checked_over_its_ranges_and_all_faults_are_told_at_once(lock, packed, fake, monkeypatch):
    def run():
        attend(8)
        train(packed, (5, 9))

    file = lock(run)
    assert faults(file) == []
    assert invoke("lock", "--check", file).exit_code == 0

    def refuses(spec):
        return ("too few keys",) if spec.max_q > 1000 else ()

    replace("short", fake("short", load=broken_loader).backend)
    replace("rest", fake("rest", refuses=refuses, cuts=lambda spec: (Cut.of("max_q", at=1001),)).backend)
    data = json.loads(file.read_text())
    data["environment"]["torch"] = "1.2.0"
    file.write_text(json.dumps(data))
    found = faults(file)
    assert found[0] == f"locked with torch 1.2.0, here it is {torch.__version__}"
    assert len(found) == 1 + len(data["rows"])
    for row, line in zip(data["rows"], found[1:], strict=True):
        why = "failed to load" if row["backend"] == "short" else "too few keys"
        assert f"says {row['backend']} for this {row['direction']}, which can't run it here ({why}" in line
    assert "Faults" in invoke("lock", "--check", file).output


@pytest.mark.parametrize("change", ["disabled", "gone", "preferred"])
def test_a_check_finds_settings_and_backends_that_lead_elsewhere(lock, change, monkeypatch):
    file = lock(lambda: attend(8))
    if change == "disabled":
        monkeypatch.setenv("ATTNREG_DISABLE", "short")
        attnreg.reload()
    if change == "gone":
        replace("short")
    if change == "preferred":
        monkeypatch.setenv("ATTNREG_BACKEND", "rest")
        attnreg.reload()
    reasons = {
        "disabled": "disabled by ATTNREG_DISABLE",
        "gone": "no backend of that name is known here",
        "preferred": "but ATTNREG_BACKEND would have rest run it",
    }
    assert any(reasons[change] in line for line in faults(file))


def test_calls_that_are_locked_to_the_reference_for_want_of_another_are_noted(
    lock, packed, fake, tmp_path, monkeypatch
):
    lock(lambda: train(packed, (5, 9)))
    arguments = ("lock", "--from", tmp_path / "trace.jsonl", "--out", tmp_path / "lock.json")
    assert "Note" not in invoke(*arguments).output
    for name in ("short", "rest"):
        replace(name, fake(name, dtypes=("float64",)).backend)
    shown = words(invoke(*arguments))
    for direction in ("forwards", "backwards"):
        assert f"Note: packed {direction} are locked to the reference, math, as no other backend" in shown
    monkeypatch.setenv("ATTNREG_BACKEND", "math")
    attnreg.reload()
    assert "Note" not in invoke(*arguments).output, "it was asked for"


def test_a_lock_for_a_gpu_is_made_and_checked_without_it(lock, packed, monkeypatch):
    file = lock(lambda: train(packed, (5, 9)), "--device", "sm_90")
    data = json.loads(file.read_text())
    assert (data["device"], data["environment"]["compute_capability"]) == ("cuda", "9.0")
    assert data["environment"]["torch"] == ""
    assert {row["backend"] for row in data["rows"]} == {"short"}
    assert faults(file, "--device", "sm_90") == []
    assert faults(file, "--device", "sm_80") == ["locked with compute capability 9.0, here it is 8.0"]
    assert faults(file, "--device", "cpu") == [
        "locked on cuda, here it is cpu: lock again with `--device cpu`"
    ]
    in_force = LockInForce(lockfile.load(file), registry.entries)
    assert in_force.differences(Device("cuda", (9, 0), name="NVIDIA H100"), "short") == ""
    differs = in_force.differences(Device("cuda", (10, 0)), "short")
    assert differs == "locked with compute capability 9.0, here it is 10.0"
    if not torch.cuda.is_available():
        result = invoke("lock", "--check", file)
        assert (result.exit_code, "--device sm_90 needs no GPU" in words(result)) == (2, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--check lock.json --out other.json", "--check: got --from, --out or --exact as well"),
        ("--out lock.json", "--from: got none, expected a file"),
        ("--from trace.jsonl", "--out: got none, expected a file"),
        ("--check none.json", "none.json: can't be read"),
    ],
)
def test_wrong_usage_exits_2(options, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    result = invoke("lock", *options.split())
    assert (result.exit_code, message in words(result)) == (2, True)
