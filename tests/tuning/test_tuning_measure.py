"""Promises of `attnreg tune`: right before fast, saved at every step, and never longer than asked."""

import dataclasses
import errno
import os
import re

import pytest
import torch
from support.options import value_in_spec
from support.tuned import CPU, SPEC, altered, off_by, raising, spec_with, watched

from attnreg.core.contract.capabilities import Range
from attnreg.core.contract.options import OPTIONS
from attnreg.core.contract.spec import Device, arguments_of
from attnreg.core.times.kinds import size_of
from attnreg.core.times.points import Front
from attnreg.core.times.table import Environment, Table, load
from attnreg.errors import ConfigError
from attnreg.tools.tuning import checks
from attnreg.tools.tuning import measure as measuring
from attnreg.tools.tuning.checks import Checks, DeviceLostError
from attnreg.tools.tuning.measure import Measurement
from attnreg.tools.tuning.session import kept
from attnreg.tools.tuning.workload import (
    case_of,
    coarse_to_fine,
    copies,
    grid,
    lengths,
    small_cases,
    unmeasurable,
)

SMALL = spec_with(32)
BOTH = dataclasses.replace(SMALL, needs_backward=True)
HERE = Environment(device="a test")


def run(spec, clock, *entries, directions=("forward", "backward"), deadline=1e9):
    return list(Measurement(spec, directions, entries, Checks(CPU), clock, CPU, deadline).points())


# One call


def test_each_backend_and_direction_gets_its_time(clock, entry):
    forward, backward = run(BOTH, clock, entry("fast", 1.0), entry("slow", 3.0))
    assert [point.kind.direction for point in (forward, backward)] == ["forward", "backward"]
    for point in (forward, backward):
        assert point.backends["fast"].gpu_us == pytest.approx(1000)
        assert point.backends["slow"].gpu_us == pytest.approx(3000)
        assert point.backends["slow"].first_call_s == pytest.approx(0.003)
        assert 0 < point.backends["fast"].error <= 1


@pytest.mark.parametrize("forward", [True, False], ids=["forward", "backward"])
def test_a_wrong_kernel_is_marked_wrong_in_its_direction_and_not_timed(clock, entry, forward):
    found = run(BOTH, clock, entry("right"), entry("off", change=off_by(0.5, forward)))
    wrong, other = (found[0], found[1]) if forward else (found[1], found[0])
    assert wrong.backends["off"].wrong.startswith(f"{'out' if forward else 'dq'} of bfloat16 32 x 32: ")
    assert wrong.backends["off"].gpu_us is None
    assert wrong.backends["right"].gpu_us
    # A wrong forward may be wrong in its LSE, and a backward that undoes that is wrong for all others.
    times = other.backends["off"]
    assert times.wrong.startswith("its forward is: out of bfloat16") if forward else times.gpu_us


LONG = dataclasses.replace(spec_with(280, batch=1), needs_backward=True)


@pytest.mark.parametrize(
    "forward", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["forward", "backward"]
)
def test_a_kernel_that_goes_astray_only_at_the_size_itself_is_wrong_too(clock, entry, forward):
    astray = altered(lambda first: first * 2 if first.shape[1] > 256 else first, forward)
    found = run(LONG, clock, entry("right"), entry("large", change=astray))[0 if forward else 1]
    name = "out" if forward else "dq"
    assert found.backends["large"].wrong.startswith(f"{name} of sequence 0, key head 0: ")
    assert found.backends["right"].gpu_us


@pytest.mark.slow
def test_a_forward_that_goes_astray_at_the_size_spoils_no_other_backends_backward(clock, entry):
    astray = altered(lambda out: out * float("nan") if out.shape[1] > 256 else out)
    _, found = run(LONG, clock, entry("bad", change=astray), entry("good"))
    assert found.backends["good"].gpu_us


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (SystemExit(3), "SystemExit: 3"),  # a failure like any other
        (RuntimeError("no kernel image\nmore"), "RuntimeError: no kernel image"),
    ],
    ids=["exit", "error"],
)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_backend_that_raises_is_marked_failed_and_the_others_go_on(clock, entry, error, failure, direction):
    bad = entry("bad", change=raising(error, direction == "forward"))
    (found,) = run(BOTH, clock, bad, entry("good"), directions=(direction,))
    assert found.backends["bad"].failed == failure
    assert found.backends["good"].gpu_us


def test_a_backend_that_raises_later_is_marked_failed_too(clock, entry):
    calls = []

    def tire(*arguments):
        calls.append(1)
        if len(calls) > 4:
            raise RuntimeError("tired")

    entries = entry("bad", change=watched(tire)), entry("good")
    (found,) = run(SMALL, clock, *entries, directions=("forward",))
    assert found.backends["bad"].failed == "RuntimeError: tired"
    assert found.backends["good"].gpu_us == pytest.approx(1000)


def test_what_a_backend_refuses_is_not_measured_on_it(clock, entry):
    (found,) = run(SMALL, clock, entry("a"), entry("b", dtypes=("float64",)), directions=("forward",))
    assert list(found.backends) == ["a"]


def test_a_backend_is_checked_and_measured_with_the_head_dims_that_it_is_given_in_calls(clock, entry):
    given, limits = set(), dict.fromkeys(("head_dim", "head_dim_v"), Range(8, 64, 8))

    def watch(*arguments):
        given.update(x.shape[-1] for x in arguments[:3])

    odd = dataclasses.replace(BOTH, head_dim=13, head_dim_v=21)
    for point in run(odd, clock, entry("steps", change=watched(watch), **limits)):
        assert point.backends["steps"].gpu_us == pytest.approx(1000)
    assert given == {16, 24}


def test_backends_take_turns_and_a_hopeless_one_is_timed_once(clock, entry):
    order = []
    entries = [
        entry(name, ms, change=watched(lambda *_, name=name: order.append(name)))
        for name, ms in (("a", 2.0), ("b", 2.0), ("c", 60.0))
    ]
    (found,) = run(SMALL, clock, *entries, directions=("forward",))
    assert order.count("c") == 4  # to be checked, first, once to settle, as it takes long, and once more
    rounds = "".join(order[-2 * measuring.ROUNDS :])
    assert set(rounds) == {"a", "b"}
    assert "aaa" not in rounds
    assert "bbb" not in rounds
    assert found.backends["c"].gpu_us == pytest.approx(60_000)


def test_what_a_second_call_takes_is_not_taken_for_what_calls_take(clock, entry):
    """FA4 watches it, to do the third faster."""
    calls = []

    def watch(query, *_):
        if query.shape[1] == SMALL.max_q and len(calls) < 3:  # checked, first, second
            clock.seconds += 0.1
        calls.append(1)

    entries = entry("a", 1.0), entry("b", 1.0, change=watched(watch))
    (found,) = run(SMALL, clock, *entries, directions=("forward",))
    assert len(calls) > measuring.ROUNDS
    assert found.backends["b"].gpu_us == pytest.approx(1000)


def test_past_the_deadline_a_call_gets_as_few_rounds_as_will_do(clock, entry):
    def calls(deadline):
        started = clock.seconds
        run(SMALL, clock, entry("a", 5.0), directions=("forward",), deadline=deadline)
        return round((clock.seconds - started) * 200)

    assert calls(1e9) - calls(clock.seconds) == measuring.ROUNDS - measuring.FEWEST_ROUNDS


def test_a_gpu_that_is_lost_stops_everything(monkeypatch):
    def lost(device):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    with pytest.raises(DeviceLostError, match="the GPU can't be used any more after RuntimeError: boom"):
        checks.failed(RuntimeError("boom"), torch.device("cuda"))


# The inputs and the clock


def test_inputs_are_as_the_spec_says_and_more_than_the_cache_holds():
    spec = spec_with(varlen=True, batch=3, max_q=64, max_k=96, tokens_q=120, tokens_k=200, heads_k=2)
    found = copies(spec, CPU)
    assert 1 < len(found) <= 16
    q, k, v, grad, call = found[1]
    assert (q.shape, k.shape, v.shape, grad.shape) == ((120, 4, 64), (200, 2, 64), (200, 2, 64), (120, 4, 64))
    assert (call.cu_seqlens_q[-1], call.cu_seqlens_k[-1]) == (120, 200)
    assert (call.cu_seqlens_q.diff().max(), call.cu_seqlens_k.diff().max()) == (64, 96)
    assert not torch.equal(found[0].q, q)


@pytest.mark.parametrize(
    ("batch", "tokens", "longest"),
    [(1, 7, 7), (8, 8 * 64, 64), (8, 300, 64), (5, 64, 64), (3, 70, 64), (4, 9, 4), (3, 40, 64)],
)
def test_lengths_are_ragged_and_fill_the_tokens(batch, tokens, longest):
    found = lengths(batch, tokens, longest)
    assert len(found) == batch
    assert (max(found), min(found) >= 0, sum(found)) == (min(longest, tokens), True, tokens)


def test_a_small_case_is_of_the_kind_of_its_spec():
    spec = spec_with(max_q=1, max_k=32768, heads_q=32, heads_k=8)
    case = small_cases(spec)[0]
    assert (case.max_q, case.max_k, case.heads, case.dims) == (1, 192, (8, 2), (64, 64))
    assert len(set(small_cases(spec_with(4096, varlen=True))[0].lens_q)) == 3


def test_a_call_of_nothing_says_so():
    assert unmeasurable(spec_with(batch=0))
    assert not unmeasurable(SPEC)


@pytest.mark.parametrize("row", OPTIONS, ids=lambda row: row.name)
def test_an_option_is_measured_and_checked_or_said_not_to_be(row):
    """A time without the option would be taken for one with it."""
    value = value_in_spec(row)
    spec = spec_with(varlen=True, **arguments_of({row.field: value}))
    specs = [case.spec(spec.device) for case in (case_of(spec), *small_cases(spec))]
    kept = [getattr(found, row.field) == value for found in specs]
    assert kept in ([True] * 3, [False] * 3)
    assert kept[0] or row.name not in ("softcap", "grad_lse", "sinks")
    assert unmeasurable(spec) == (
        "" if kept[0] else f"{row.field} can't be measured: the default order decides"
    )


# The grids


@pytest.mark.parametrize("device", [Device("cpu"), Device("cuda", (9, 0), 0, "X")], ids=str)
def test_the_quick_grid_is_small_and_the_full_one_has_more_of_everything(device):
    quick, full = grid("quick", device), grid("full", device)
    assert len(quick) <= 105 < len(full)
    assert {spec.varlen for spec in quick} == {True, False} == {spec.causal for spec in quick}
    assert len(set(full)) == len(full)


def test_the_grids_of_a_gpu_cover_what_models_ask():
    quick, full = (grid(name, Device("cuda", (9, 0))) for name in ("quick", "full"))
    assert {spec.head_dim for spec in quick} == {64, 96, 128}
    assert {spec.heads_q // spec.heads_k for spec in quick} == {1, 4}
    assert {spec.head_dim for spec in full} == {32, 64, 96, 128, 192, 256}
    assert {spec.heads_q // spec.heads_k for spec in full} == {1, 4, 8}
    assert {spec.max_q for spec in full} >= {1, 16, 128, 256, 512, 1024, 2048, 4096, 8192, 16384}
    assert max(spec.max_k for spec in full) == 32768
    assert {spec.dtype for spec in full} == {"bfloat16"}
    for calls in (quick, full):
        assert {spec.head_dim for spec in calls if spec.varlen and spec.max_q == 1} == {64, 96, 128}


def test_coarse_sizes_come_first_and_no_kind_is_left_out():
    assert list(coarse_to_fine([[1, 2, 3, 4, 5], ["a", "b"], []])) == [3, "b", 1, "a", 5, 2, 4]
    # Of the quick grid a third has each head dim, layout and mask, a gradient and a decode.
    third = grid("quick", Device("cuda", (9, 0)))[:18]
    for varlen, causal, needs_backward in ((False, True, True), (True, True, True), (True, False, True)):
        kind = {"varlen": varlen, "causal": causal, "needs_backward": needs_backward}
        found = [spec for spec in third if all(getattr(spec, name) == value for name, value in kind.items())]
        assert sorted(spec.head_dim for spec in found) == [64, 96, 128]
    assert {spec.head_dim for spec in third if spec.max_q == 1} == {64, 96, 128}
    first = grid("full", Device("cuda", (9, 0)))[:20]
    assert {spec.varlen for spec in first} == {True, False}
    assert {spec.head_dim for spec in first} == {64, 128}
    assert min(spec.max_k for spec in first) >= 1024


# A session


@pytest.mark.slow
def test_a_session_saves_after_every_call_and_has_nothing_left(session, entry):
    made = session(entry("a", 1.0), entry("b", 2.0))
    specs = [spec_with(16), BOTH]
    sizes = [len(load(made.out).points) for _ in made.run(specs, 1e9)]
    assert sizes == [1, 3]
    assert not any(made.todo(spec) for spec in specs)


def test_what_a_table_has_is_not_measured_again_but_a_new_backend_is(session, entry):
    list(session(entry("a")).run([BOTH], 1e9))
    known = {point.place: point for point in kept(session().out, HERE).points}
    later = session(entry("a"), points=dict(known))
    assert later.todo(BOTH) == ()
    assert (list(later.run([BOTH], 1e9)), later.fresh) == ([BOTH], [])
    more = session(entry("a"), entry("b", 2.0), points=known)
    assert more.todo(BOTH) == ("forward", "backward")
    list(session(entry("b", 2.0), points=dict(known)).run([SMALL], 1e9))
    found = kept(more.out, HERE).points[0].backends
    assert {name: one.gpu_us for name, one in found.items()} == pytest.approx({"a": 1000.0, "b": 2000.0})


def test_what_failed_is_tried_once_more_by_every_run(session, entry):
    made = session(entry("tired", change=raising(RuntimeError("out of memory"))), entry("a"))
    list(made.run([SMALL], 1e9))
    assert made.todo(SMALL) == ()  # it was measured
    (point,) = kept(made.out, HERE).points
    assert point.backends["tired"].failed
    later = session(entry("tired", 2.0), entry("a"), points={point.place: point})
    assert later.todo(SMALL) == ("forward",)
    list(later.run([SMALL], 1e9))
    (found,) = kept(made.out, HERE).points
    assert found.backends["tired"].gpu_us == pytest.approx(2000.0)


def test_host_times_of_fronts_are_saved_with_the_points(session, entry):
    made = session(entry("a"))
    made.add_fronts([Front("a", True, "forward", 20.0)])
    list(made.run([BOTH], 1e9))
    made.add_fronts([Front("b", True, "forward", 30.0), Front("a", True, "forward", 21.0)])
    found = kept(made.out, HERE)
    assert len(found.points) == 2
    assert found.fronts == (Front("a", True, "forward", 21.0), Front("b", True, "forward", 30.0))


def test_a_table_of_another_environment_is_not_continued(session, entry):
    made = session(entry("a"))
    made.save()
    with pytest.raises(ConfigError, match=r"measured with device a test, here it is another: .* --fresh"):
        kept(made.out, Environment(device="another"))
    assert kept(made.out.with_name("none.json"), HERE) == Table(HERE, (), "none.json")


def test_sessions_that_run_at_the_same_time_keep_each_others_points(session, entry):
    first, second = session(entry("one")), session(entry("one"), entry("two"))
    for length in (16, 32):
        list(first.run([spec_with(length)], 1e9))
        list(second.run([spec_with(length + 1), spec_with(16)], 1e9))
    assert {point.size.max_q for point in load(first.out).points} == {16, 17, 32, 33}
    assert {name for point in load(first.out).points for name in point.backends} == {"one", "two"}


def test_sessions_that_measure_a_table_anew_keep_each_others_points_and_no_old_ones(session, entry):
    list(session(entry("one")).run([spec_with(64)], 1e9))
    old = load(session().out)
    for length in (16, 32):
        list(session(entry("one"), replaced=old).run([spec_with(length)], 1e9))
    assert {point.size.max_q for point in load(session().out).points} == {16, 32}


def test_a_table_that_cannot_be_written_any_more_is_an_error_with_its_path(session, entry, monkeypatch):
    made = session(entry("one"))
    list(made.run([spec_with(16)], 1e9))
    before = made.out.read_text()
    monkeypatch.setattr("os.fdopen", lambda *_, **__: full_disk())
    with pytest.raises(ConfigError, match=f"{made.out}: can't be written: No space left on device"):
        list(made.run([spec_with(32)], 1e9))
    assert made.out.read_text() == before


def full_disk():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_budget_stops_before_it_is_spent(session, entry, clock):
    made = session(entry("a", 10.0))
    specs = [spec_with(n) for n in range(16, 80, 4)]
    done = list(made.run(specs, 0.5))
    assert 0 < len(done) < len(specs)
    assert clock.seconds <= 0.5
    assert list(session(entry("a")).run(specs, 0.0)) == []


def test_a_first_call_that_took_long_leaves_no_part_of_the_budget_unused(session, entry, clock, monkeypatch):
    made, seconds = session(entry("a")), iter([20.0, *[1.0] * 50])

    def measure(self, spec, todo, deadline):
        clock.seconds += next(seconds)

    monkeypatch.setattr(type(made), "_measure", measure)
    assert len(list(made.run([spec_with(n) for n in range(16, 80)], 40.0))) == 21
    assert clock.seconds == 40.0


def test_a_budget_stops_between_backends_and_keeps_no_half_point(session, entry, clock):
    made = session(*(entry(name, 400.0) for name in "abcdefgh"))
    assert list(made.run([SMALL, spec_with(48)], 3.0)) == []
    assert clock.seconds < 5.0
    assert (made.fresh, made.points) == ([], {})


def test_a_call_that_no_backend_can_run_is_skipped_with_the_reasons_of_each(session, entry):
    made = session(entry("a", dtypes=("float32",)), entry("b", dtypes=("float16",)))
    assert list(made.run([SMALL], 1e9)) == [SMALL]
    reasons = "a: dtype must be float32, got bfloat16; b: dtype must be float16, got bfloat16"
    assert made.skipped == [(SMALL, reasons)]


def no_gpu_memory():
    raise torch.cuda.OutOfMemoryError("no 80 GiB")


@pytest.mark.parametrize(
    ("allocate", "reason"),
    [(no_gpu_memory, "no 80 GiB"), (lambda: torch.empty(2**60), ".*can't allocate memory")],
    ids=["gpu", "cpu"],
)
def test_what_cannot_be_measured_is_skipped_with_the_reason_and_the_rest_measured(
    session, entry, monkeypatch, allocate, reason
):
    made, real = session(entry("a")), measuring.copies

    def full(spec, *arguments):
        if spec.max_q == 16:
            allocate()
        return real(spec, *arguments)

    monkeypatch.setattr(measuring, "copies", full)
    specs = [spec_with(16, dropout=0.5), spec_with(16), SMALL]
    assert list(made.run(specs, 1e9)) == specs
    assert [spec for spec, _ in made.skipped] == specs[:2]
    assert made.skipped[0][1] == "dropout can't be measured: the default order decides"
    assert re.match(f"its inputs need more memory than there is: {reason}", made.skipped[1][1])
    assert [point.size for point in made.fresh] == [size_of(SMALL)]


def test_an_error_in_tunes_own_code_ends_the_run(session, entry, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("a mistake")

    monkeypatch.setattr(measuring, "copies", broken)
    with pytest.raises(RuntimeError, match="a mistake"):
        list(session(entry("a")).run([SMALL], 1e9))
