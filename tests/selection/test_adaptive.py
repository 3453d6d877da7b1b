"""Promises of `policy = "adaptive"`: backends take turns at the first calls of a kind; the fastest stays."""

import dataclasses
import itertools
import logging
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from support.known import know
from support.packed_calls import attend
from support.policies import SPEC
from support.refusals import refusal

import attnreg
from attnreg.backends import math as math_backend
from attnreg.core.dispatch.state import FEW_SHAPES
from attnreg.core.policy import current as policy
from attnreg.core.selection.predictions import Candidate, Prediction
from attnreg.core.times import adaptive
from attnreg.core.times.kinds import kind_of, size_of
from attnreg.core.times.points import Measured
from attnreg.core.times.table import load
from attnreg.core.times.tables import NamedTables
from attnreg.core.times.turns import MOST_CALLS, MOST_TURNS, Seen, Turns
from attnreg.flash_attn import flash_attn_with_kvcache

pytestmark = pytest.mark.usefixtures("routers")

ADAPTIVE = {"policy": "adaptive"}


def test_backends_take_turns_in_the_default_order_and_then_the_fastest_runs_all(taking, runs):
    taking(slow=2.0, fast=1.0, middle=1.2)
    attnreg.configure(ADAPTIVE)
    order = runs(MOST_TURNS)
    assert order[:6] == ["slow", "fast", "middle"] * 2
    # Each once that isn't timed, so that `slow` is far behind after two that are.
    assert Counter(order[:15]) == {"slow": 3, "fast": 6, "middle": 6}
    assert set(order[15:]) == {"fast"}


@pytest.mark.parametrize("appends", [False, True])
@pytest.mark.parametrize("seconds", [{"slow": 10.0, "fast": 1.0}, {"fast": 1.0, "slow": 10.0}], ids=str)
def test_a_call_that_is_checked_before_it_writes_takes_one_turn(taking, runs, seconds, appends):
    """Else the check would have one backend's turns, and the call the other's."""
    taking(**seconds)
    attnreg.configure(ADAPTIVE)
    query, new = (torch.randn(2, 1, 2, 16, dtype=torch.float64) for _ in range(2))
    caches = torch.randn(2, 2, 8, 2, 16, dtype=torch.float64).unbind()
    used = torch.tensor([3, 5], dtype=torch.int32)

    def step():
        flash_attn_with_kvcache(query, *caches, *((new, new) if appends else ()), cache_seqlens=used)

    order = runs(MOST_TURNS, step)
    assert order[:4] == [*seconds] * 2
    assert set(order[-10:]) == {"fast"}


def test_what_was_seen_is_explained_and_explaining_takes_no_turn(taking, runs):
    taking(slow=2.0, fast=1.0)
    attnreg.configure(ADAPTIVE)
    runs(3)
    spec = dataclasses.replace(SPEC, dtype="float64", varlen=True, tokens_q=8, tokens_k=8)
    for _ in range(5):
        explained = attnreg.explain(spec)
    assert (explained.backend, explained.source) == ("slow", "default order for cpu")
    taken = 'policy = "adaptive": turns taken by a forward like this one: slow 2 of 6, fast 1 of 6'
    assert taken in explained.notes
    runs(9)
    explained = attnreg.explain(spec)
    assert (explained.backend, explained.source) == ("fast", adaptive.NAME)
    assert [one.backend for one in explained.forward.predicted.candidates] == ["fast", "slow"]
    assert explained.forward.predicted.of("fast").gpu_us == pytest.approx(1e6)


@pytest.mark.parametrize("forwards_before", [0, MOST_TURNS])
def test_the_backend_that_takes_least_for_both_directions_runs_both(taking, ran, forwards_before):
    taking(one=(1.0, 4.0), two=(1.9, 2.5))
    attnreg.configure(ADAPTIVE)
    for _ in range(forwards_before):
        attend()
    for _ in range(MOST_TURNS):
        attend(grad=True)
    ran()
    attend(grad=True)
    assert ran() == {"two": (1, 1)}
    attend()
    assert ran() == {"one": (1, 0)}


def test_a_forward_waits_for_the_turns_of_its_backward_for_a_few_calls_only(taking, runs):
    taking(one=2.0, two=1.0)
    attnreg.configure(ADAPTIVE)
    query = torch.randn(8, 2, 16, dtype=torch.float64, requires_grad=True)
    offsets = torch.tensor([0, 8], dtype=torch.int32)

    def without_backward():
        attnreg.varlen_attn(query, query, query, offsets, offsets, 8, 8)

    assert set(runs(MOST_CALLS, without_backward)[12:]) == {"two"}
    (forward,) = learned().turns.values()
    assert (forward.closed, forward.calls) == (True, MOST_CALLS)
    assert runs(3, without_backward) == ["two"] * 3
    assert forward.calls == MOST_CALLS


def test_calls_of_nearly_one_size_take_turns_together_and_those_of_another_begin_anew(taking, runs):
    taking(one=1.2, two=1.0)
    attnreg.configure(ADAPTIVE)
    lengths = iter([8, 8, 9, 9] * 3)
    assert Counter(runs(12, lambda: attend(next(lengths)))) == {"one": 6, "two": 6}
    assert runs(2, lambda: attend(9)) == ["two", "two"]
    assert runs(2, lambda: attend(32)) == ["one", "two"]


@pytest.fixture
def building(taking, monkeypatch):
    """Know a backend, the fastest, that builds something for each new shape, and two others."""
    entries = taking(builder=1.0, other=1.2, third=1.3)
    first, *others = (entries[name].backend for name in ("builder", "other", "third"))
    return know(
        monkeypatch, dataclasses.replace(first, builds=lambda spec: True), *others, math_backend.BACKEND
    )


def test_ever_new_shapes_leave_a_backend_that_builds_something_for_each(building, runs, kept):
    """Whether it had its turns, which are over after 18 calls here, or has to share others."""
    attnreg.configure(ADAPTIVE)
    lengths = iter(range(91, 180))
    order = runs(60, lambda: attend(next(lengths)))
    assert Counter(order[:18]) == {"builder": 6, "other": 6, "third": 6}
    assert order[18:] == ["builder"] * (FEW_SHAPES - 6) + ["other"] * (42 - FEW_SHAPES + 6)
    lengths = iter(range(300, 400))
    order = runs(30, lambda: attend(next(lengths)))
    assert order[:12] == ["other", "third"] * 6 and set(order[12:]) == {"other"}
    # The next process may bring shapes that repeat.
    (file,) = kept()
    assert [len(one.backends) for one in load(file).points] == [3]


def test_a_backend_that_builds_keeps_no_turns_waiting_where_a_table_counts_what_it_builds(
    building, runs, kept, monkeypatch
):
    """Each call that waits is decided anew."""

    def predict(self, spec, direction, builders=frozenset()):
        costs = {"builder": 5e4 if builders else 1.0, "other": 1.2, "third": 1.3}
        candidates = (Candidate(name, cost, gpu_us=min(cost, 1.5)) for name, cost in costs.items())
        return Prediction("a table", tuple(candidates))

    monkeypatch.setattr(NamedTables, "predict", predict)
    attnreg.configure(ADAPTIVE)
    lengths = itertools.chain.from_iterable(zip(range(91, 140), range(300, 349), strict=True))  # two sizes
    order = runs(40, lambda: attend(next(lengths)))
    assert order.count("builder") == FEW_SHAPES
    found = learned().turns.values()
    assert [turns.counts for turns in found] == [{"builder": FEW_SHAPES // 2, "other": 6, "third": 6}] * 2
    assert [(turns.closed, turns.calls) for turns in found] == [(True, 6 + 6 + FEW_SHAPES // 2)] * 2
    assert set(order[-6:]) == {"other"} and not kept()


def test_shapes_of_forwards_that_wait_for_their_backward_are_counted_too(building, runs):
    """Forwards that want a gradient, without a backward, wait for up to sixty calls."""
    attnreg.configure(ADAPTIVE)
    lengths = iter(range(91, 180))

    def without_backward():
        length = next(lengths)
        x = torch.randn(length, 2, 16, dtype=torch.float64, requires_grad=True)
        attnreg.varlen_attn(x, x, x, *2 * [torch.tensor([0, length], dtype=torch.int32)], length, length)

    order = runs(85, without_backward)
    assert order.count("builder") == FEW_SHAPES and order[-20:] == ["other"] * 20


def test_turns_that_lack_no_builder_are_kept_although_shapes_do_not_repeat(taking, runs, kept, monkeypatch):
    """Whoever builds had all its turns before, or was far behind."""
    entries = taking(builder=4.0, other=1.2, third=1.3)
    first, *others = (entries[name].backend for name in ("builder", "other", "third"))
    know(monkeypatch, dataclasses.replace(first, builds=lambda spec: True), *others, math_backend.BACKEND)
    attnreg.configure(ADAPTIVE)
    for start in (91, 300, 600, 1200):
        lengths = itertools.count(start)
        runs(20, lambda lengths=lengths: attend(next(lengths)))
    (file,) = kept()
    # Three turns in each of the first two; two of three in the third, of which it lacks the last.
    assert [(one.size.max_q, len(one.backends)) for one in load(file).points] == [(91, 3), (300, 3)]


def test_shapes_that_repeat_keep_a_backend_that_builds_something_for_each(building, runs):
    attnreg.configure(ADAPTIVE)
    lengths = itertools.cycle(range(91, 91 + FEW_SHAPES))
    order = runs(60, lambda: attend(next(lengths)))
    assert Counter(order[:18]) == {"builder": 6, "other": 6, "third": 6}
    assert set(order[18:]) == {"builder"}


def test_torchs_own_kernel_has_its_turns_like_any_other(taking, ran):
    taking(one=1.0)
    attnreg.configure(ADAPTIVE)
    inputs = torch.randn(3, 1, 2, 8, 16).unbind()
    found = [F.scaled_dot_product_attention(*inputs) for _ in range(MOST_TURNS)]
    assert ran() == {"cpu": (MOST_TURNS - 3, 0), "one": (3, 0)}  # its time is 0 by this clock
    for one in found:
        torch.testing.assert_close(one, found[0])


def test_no_turn_is_given_where_somebody_has_chosen_or_results_have_to_be_the_same(taking, runs):
    taking(one=2.0, two=1.0)
    attnreg.configure(ADAPTIVE)
    with attnreg.use_backend("one"):
        assert set(runs(14)) == {"one"}
    assert set(runs(14, lambda: attend(backend="two"))) == {"two"}
    torch.use_deterministic_algorithms(True)
    try:
        assert set(runs(14)) == {"one"}
    finally:
        torch.use_deterministic_algorithms(False)
    handle = attnreg.register_backend("two")
    assert set(runs(14)) == {"two"}
    handle.remove()
    assert runs(2) == ["one", "two"]


def test_the_reference_has_no_turn_and_one_backend_alone_no_turns(taking, runs):
    taking(one=2.0)
    attnreg.configure(ADAPTIVE)
    assert runs(3) == ["one"] * 3
    assert [one.counts for one in learned().turns.values()] == [{}]


def learned():
    (only,) = adaptive._learned.values()
    return only


def test_a_backend_that_declines_a_call_leaves_and_the_next_serves_it(taking, runs, monkeypatch):
    entries = taking(one=2.0, two=1.0)

    def declines(*arguments):
        raise attnreg.UnsupportedInputError("not today")

    two = entries["two"].backend
    kernels = attnreg.Kernels(declines, declines)
    know(monkeypatch, entries["one"].backend, dataclasses.replace(two, load=lambda: kernels))
    attnreg.configure(ADAPTIVE)
    assert runs(8) == ["one"] * 8
    (forward,) = learned().turns.values()
    assert forward.out == {"two": "UnsupportedInputError: not today"}


def test_an_error_of_a_kernel_passes_through_and_it_gets_no_more_turns(taking, runs, monkeypatch):
    entries = taking(one=2.0, two=1.0)

    def breaks(*arguments):
        raise ZeroDivisionError("in the kernel")

    two = dataclasses.replace(entries["two"].backend, load=lambda: attnreg.Kernels(breaks, breaks))
    know(monkeypatch, entries["one"].backend, two)
    attnreg.configure(ADAPTIVE)
    assert runs(1) == ["one"]
    with pytest.raises(ZeroDivisionError, match="in the kernel"):
        attend()
    assert runs(10) == ["one"] * 10


def test_what_a_table_puts_far_behind_gets_no_turn():
    able, costs = ("a", "b", "c", "d"), {"a": 10.0, "b": 20.1, "c": 19.9}
    predicted = Prediction("a table", tuple(Candidate(*one) for one in (*costs.items(), ("d", None))))
    assert adaptive._worth_a_turn(able, predicted) == ["a", "c"]
    assert adaptive._worth_a_turn(able, None) == ["a", "b", "c", "d"]


def test_what_stands_in_for_the_reference_gets_no_turn(taking, runs, monkeypatch, fake):
    entries = taking(slow=2.0, fast=1.0)
    behind = fake("behind", priority=math_backend.BACKEND.priority + 1, stands_in=True).backend
    know(monkeypatch, *(entry.backend for entry in entries.values()), behind)
    attnreg.configure(ADAPTIVE)
    assert set(runs(MOST_TURNS)) == {"slow", "fast"}


def test_the_next_process_begins_with_what_this_one_has_seen(taking, runs, kept):
    taking(one=2.0, two=1.0)
    attnreg.configure(ADAPTIVE)
    runs(13)
    (file,) = kept()
    (point,) = load(file).points
    assert point.backends == {"one": Measured(gpu_us=2e6), "two": Measured(gpu_us=1e6)}
    assert runs(3) == ["two"] * 3
    # A further kind is added to the file, and takes nothing away.
    runs(13, lambda: attend(64))
    assert [one.size.max_q for one in load(file).points] == [8, 64]


def test_versions_that_differ_begin_anew(taking, runs, kept, monkeypatch):
    entries = taking(one=2.0, two=1.0)
    attnreg.configure(ADAPTIVE)
    runs(13)
    newer = [dataclasses.replace(one.backend, version=lambda: "2.0") for one in entries.values()]
    know(monkeypatch, *newer)
    assert len(kept()) == 1
    assert runs(2) == ["one", "two"]


def test_a_backend_that_was_disabled_has_its_turns_when_it_no_longer_is(taking, runs, kept):
    taking(one=2.0, two=1.0, three=3.0)
    attnreg.configure({**ADAPTIVE, "disabled": ["two"]})
    assert "two" not in runs(13)
    kept()
    attnreg.configure(ADAPTIVE)
    assert runs(3) == ["one", "two", "three"]


def test_a_broken_file_is_named_and_written_anew(taking, runs, kept, caplog):
    taking(one=2.0, two=1.0)
    attnreg.configure(ADAPTIVE)
    runs(13)
    (file,) = kept()
    file.write_text("{", encoding="utf-8")
    with caplog.at_level(logging.WARNING, "attnreg"):
        assert set(runs(12)) == {"one", "two"}
    assert f'what policy = "adaptive" measured earlier isn\'t used: {file}: got no JSON' in caplog.text
    runs(1)
    assert len(load(file).points) == 1


def test_a_folder_that_cannot_be_written_costs_only_the_next_start(taking, runs, kept, tmp_path, caplog):
    (tmp_path / "attnreg").write_text("a file is in the way", encoding="utf-8")
    taking(one=2.0, two=1.0)
    attnreg.configure(ADAPTIVE)
    with caplog.at_level(logging.INFO, "attnreg"):
        assert runs(14)[12:] == ["two"] * 2
    assert "has measured can't be kept" in caplog.text


def by_table(monkeypatch, *candidates):
    """Have a table in force that predicts these for every call."""
    predicted = Prediction("a table", candidates)
    monkeypatch.setattr(NamedTables, "predict", lambda self, spec, direction, builders=frozenset(): predicted)


@pytest.mark.parametrize("first", [Candidate("first", 100.0), Candidate("first", trouble="wrong: gives NaN")])
def test_what_had_no_turn_for_a_tables_reason_comes_behind_what_was_seen(taking, runs, monkeypatch, first):
    taking(first=9.0, two=2.0, three=1.0)
    by_table(monkeypatch, Candidate("three", 10.0), Candidate("two", 11.0), first)
    attnreg.configure(ADAPTIVE)
    assert Counter(runs(9)) == {"two": 3, "three": 6}
    assert runs(3) == ["three"] * 3
    with attnreg.use_backend("first"):
        assert runs(1) == ["first"]


def test_what_has_failed_in_its_turn_does_not_come_back_when_all_are_over(taking, runs, monkeypatch):
    entries = taking(one=2.0, two=1.0, three=1.2)

    def breaks(*arguments):
        raise ZeroDivisionError

    broken = dataclasses.replace(entries["one"].backend, load=lambda: attnreg.Kernels(breaks, breaks))
    know(monkeypatch, broken, *(entries[name].backend for name in ("two", "three")))
    attnreg.configure(ADAPTIVE)
    with pytest.raises(ZeroDivisionError):
        attend()
    assert Counter(runs(12)) == {"two": 6, "three": 6}
    assert runs(3) == ["two"] * 3


class Event:
    """An event that the device reaches at so many milliseconds; or that can't be asked."""

    def __init__(self, at=0.0, reached=True, error=None):
        self.at, self.reached, self.error = at, reached, error

    def query(self):
        if self.error:
            raise RuntimeError(self.error)
        return self.reached

    def elapsed_time(self, other):
        return other.at - self.at


def turns_of(**seen):
    kind, size = kind_of(SPEC, "forward"), size_of(SPEC)
    return Turns(kind, size, "a name", backends=seen, counts=dict.fromkeys(seen, 6))


def test_a_time_that_comes_in_after_its_backend_has_left_is_dropped():
    found = turns_of(a=[], b=[Seen(1.0, 0.0)])
    found.pending = [("a", Event(), Event(2.0), 1e-6, 1.0), ("b", Event(), Event(3.0), 1e-6, 1.0)]
    found.out["a"] = "far behind"
    found.leave("b", "OutOfMemoryError")
    found.collect()
    assert found.pending == []
    assert found.result().backends == {"b": Measured(failed="OutOfMemoryError")}


def test_an_event_that_cannot_be_read_is_no_error_of_a_call():
    found, late = turns_of(a=[], b=[]), Event(reached=False)
    ends = {"a": Event(error="captures"), "b": Event(3.0)}
    found.pending = [(name, Event(), end, 1e-6, 1.0) for name, end in (*ends.items(), ("b", late))]
    found.collect()
    assert [one[2] for one in found.pending] == [late]
    assert found.out == {"a": "captures"}
    assert [one.gpu_us for one in found.backends["b"]] == [3000.0]


@pytest.fixture
def not_nine(taking, monkeypatch):
    """Know fakes as `known` does, of which the one of this name takes no call of length 9."""

    def make(name, **seconds):
        entries = taking(**seconds)

        def refuses(spec):
            return ("not 9",) if spec.max_q == 9 else ()

        backends = [entries[each].backend for each in seconds]
        know(
            monkeypatch,
            *(dataclasses.replace(one, refuses=refuses) if one.name == name else one for one in backends),
        )

    return make


@pytest.mark.parametrize("strict", [False, True])
def test_a_backend_that_cannot_run_every_call_of_a_kind_has_turns_at_the_others(
    not_nine, runs, strict, caplog
):
    not_nine("two", one=2.0, two=1.0, three=1.9)
    attnreg.configure({**ADAPTIVE, "strict": strict})
    lengths = iter([8, 9] * 40)
    order = runs(40, lambda: attend(next(lengths)))
    assert "two" not in order[1::2]
    (forward,) = learned().turns.values()
    assert [one.gpu_us for one in forward.backends["two"]] == [pytest.approx(1e6)] * 5
    assert runs(2, lambda: attend(8)) == ["two"] * 2
    assert runs(2, lambda: attend(9)) == ["three"] * 2
    assert not caplog.records


def test_turns_end_after_sixty_calls_even_if_a_backend_could_not_take_all_of_its_turns(not_nine, runs):
    not_nine("three", one=2.0, two=1.2, three=1.0)
    attnreg.configure(ADAPTIVE)
    assert runs(3, lambda: attend(8)) == ["one", "two", "three"]
    runs(MOST_CALLS, lambda: attend(9))
    (forward,) = learned().turns.values()
    assert (forward.closed, forward.counts["three"]) == (True, 1)
    assert runs(2, lambda: attend(9)) == ["two"] * 2


def test_a_backend_that_could_not_run_many_calls_has_its_turns_when_it_can(not_nine, runs):
    not_nine("three", one=2.0, two=1.2, three=1.0)
    attnreg.configure(ADAPTIVE)
    runs(3, lambda: attend(8))
    runs(17, lambda: attend(9))
    assert set(runs(20, lambda: attend(8))[5:]) == {"three"}


def test_a_call_that_only_one_backend_can_run_does_not_end_the_turns_of_its_kind(not_nine, runs):
    not_nine("two", one=2.0, two=1.0)
    attnreg.configure(ADAPTIVE)
    assert runs(3, lambda: attend(9)) == ["one"] * 3
    assert runs(2, lambda: attend(8)) == ["one", "two"]


def test_an_empty_call_takes_no_turn_and_spoils_no_file(taking, runs, kept):
    taking(one=2.0, two=1.0)
    attnreg.configure(ADAPTIVE)
    query, offsets = torch.zeros(0, 2, 16), torch.zeros(2, dtype=torch.int32)
    for _ in range(14):
        attnreg.varlen_attn(query, query, query, offsets, offsets, 0, 0)
    runs(13)
    (file,) = kept()
    assert [one.size.max_q for one in load(file).points] == [8]


def test_what_has_failed_is_tried_again_by_the_next_process(taking, runs, kept, monkeypatch):
    entries = taking(one=2.0, two=1.0)
    kernels, calls = entries["two"].backend.load(), iter([True])

    def full_once(*arguments):
        if next(calls, False):
            raise torch.OutOfMemoryError
        return kernels.forward(*arguments)

    two = dataclasses.replace(entries["two"].backend, load=lambda: kernels._replace(forward=full_once))
    know(monkeypatch, entries["one"].backend, two)
    attnreg.configure(ADAPTIVE)
    runs(1)
    with pytest.raises(torch.OutOfMemoryError):
        attend()
    assert runs(12) == ["one"] * 12
    assert kept() == []
    assert runs(13)[12:] == ["two"]


def test_a_misspelt_policy_names_the_right_one(monkeypatch):
    said = refusal(attnreg.configure, {"policy": "adaptiv"})
    assert "'measured', 'order', 'adaptive' or 'batch_invariant'; did you mean 'adaptive'?" in said
    monkeypatch.setenv("ATTNREG_POLICY", "adaptiv")
    assert "measured, order, adaptive or batch_invariant; did you mean 'adaptive'?" in refusal(attnreg.reload)


def test_attnreg_policy_adaptive_needs_no_other_setting(taking, runs, monkeypatch):
    taking(one=2.0, two=1.0)
    monkeypatch.setenv("ATTNREG_POLICY", "adaptive")
    attnreg.reload()
    assert policy.current().adaptive is not None
    assert runs(2) == ["one", "two"]


def test_lengths_of_one_cell_are_run_by_the_backend_that_its_calls_have_shown_to_be_the_fastest(taking, ran):
    taking(one=(1.0, 4.0), two=(2.2, 2.2))  # forward and backward, whatever the length
    attnreg.configure({"policy": "adaptive"})
    for _ in range(30):
        attend(128, grad=True)
    for length in (120, 128, 129, 150, 180):  # a tile more doesn't make a forward twice as long
        ran()
        attend(length, grad=True)
        assert ran()["two"] == (1, 1)
