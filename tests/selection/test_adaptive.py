"""Promises of `policy = "adaptive"`: backends take turns at the first calls of a kind; the fastest stays."""

import dataclasses
import logging
from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.known import know
from support.policies import SPEC
from support.refusals import refusal

import attnreg
from attnreg import _registry
from attnreg.backends import math as math_backend
from attnreg.selection import adaptive, policy, turns
from attnreg.selection.turns import MOST_TURNS
from attnreg.torchlib import job_store
from attnreg.tuning.lookup import Candidate, Prediction
from attnreg.tuning.points import Measured
from attnreg.tuning.table import load

pytestmark = pytest.mark.usefixtures("routers")

ADAPTIVE = {"policy": "adaptive"}


class Clock:
    """A clock that only kernels move."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    monotonic = perf_counter


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(turns, "time", clock := Clock())
    monkeypatch.setattr(adaptive, "time", clock)
    return clock


@pytest.fixture
def known(fake, monkeypatch, clock):
    """Know fakes that take so many seconds: `known(slow=2.0, fast=(1.0, 3.0))`, in the default order."""

    def make(**seconds):
        backends = []
        for place, (name, each) in enumerate(seconds.items()):
            forward, backward = each if isinstance(each, tuple) else (each, each)
            recorder = fake(name, priority=50 - place)
            kernels = recorder.backend.load()

            def taking(kernel, seconds):
                def run(*arguments):
                    clock.now += seconds
                    return kernel(*arguments)

                return run

            timed = attnreg.Kernels(taking(kernels.forward, forward), taking(kernels.backward, backward))
            backends.append(dataclasses.replace(recorder.backend, load=lambda timed=timed: timed))
        return know(monkeypatch, *backends, math_backend.BACKEND)

    return make


def attend(length=8, dtype=torch.float64, grad=False, **options):
    """Return what a packed call of one sequence gives, and its reference; with gradients if asked for."""
    generator = torch.Generator().manual_seed(length)
    inputs = torch.randn(3, length, 2, 16, generator=generator, dtype=torch.float64).to(dtype)
    leaves = [one.requires_grad_(grad) for one in inputs.unbind()]
    offsets = torch.tensor([0, length], dtype=torch.int32)
    out = attnreg.varlen_attn(*leaves, offsets, offsets, length, length, **options)
    expected = F.scaled_dot_product_attention(*(one.detach().transpose(0, 1) for one in leaves))
    torch.testing.assert_close(out, expected.transpose(0, 1))
    if grad:
        torch.autograd.grad(out.sum(), leaves)
    return out


@pytest.fixture
def runs(ran):
    """Return a function that makes so many calls and returns which backends ran forwards, in their order."""

    def make(calls, run=attend):
        order = []
        for _ in range(calls):
            ran()
            run()
            order += [name for name, counts in ran().items() for _ in range(counts[0])]
        return order

    return make


def test_backends_take_turns_in_the_default_order_and_then_the_fastest_runs_all(known, runs):
    known(slow=2.0, fast=1.0, middle=1.2)
    attnreg.configure(ADAPTIVE)
    order = runs(MOST_TURNS)
    assert order[:6] == ["slow", "fast", "middle"] * 2
    # Each once that isn't timed, so that `slow` is far behind after two that are.
    assert Counter(order[:15]) == {"slow": 3, "fast": 6, "middle": 6}
    assert set(order[15:]) == {"fast"}


def test_what_was_seen_is_explained_and_explaining_takes_no_turn(known, runs):
    known(slow=2.0, fast=1.0)
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


def test_forward_and_backward_are_chosen_apart(known, ran):
    known(one=(1.0, 4.0), two=(2.0, 3.0))
    attnreg.configure(ADAPTIVE)
    for _ in range(MOST_TURNS):
        attend(grad=True)
    ran()
    attend(grad=True)
    assert ran() == {"one": (1, 0), "two": (0, 1)}


def test_calls_of_nearly_one_size_take_turns_together_and_those_of_another_begin_anew(known, runs):
    known(one=1.2, two=1.0)
    attnreg.configure(ADAPTIVE)
    lengths = iter([8, 8, 9, 9] * 3)
    assert Counter(runs(12, lambda: attend(next(lengths)))) == {"one": 6, "two": 6}
    assert runs(2, lambda: attend(9)) == ["two", "two"]
    assert runs(2, lambda: attend(32)) == ["one", "two"]


def test_torchs_own_kernel_has_its_turns_like_any_other(known, ran):
    known(one=1.0)
    attnreg.configure(ADAPTIVE)
    inputs = torch.randn(3, 1, 2, 8, 16).unbind()
    found = [F.scaled_dot_product_attention(*inputs) for _ in range(MOST_TURNS)]
    assert ran() == {"cpu": (MOST_TURNS - 3, 0), "one": (3, 0)}  # its time is 0 by this clock
    for one in found:
        torch.testing.assert_close(one, found[0])


def test_no_turn_is_given_where_somebody_has_chosen_or_results_have_to_be_the_same(known, runs):
    known(one=2.0, two=1.0)
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


def test_the_reference_has_no_turn_and_one_backend_alone_no_turns(known, runs):
    known(one=2.0)
    attnreg.configure(ADAPTIVE)
    assert runs(3) == ["one"] * 3
    assert [one.given for one in learned().turns.values()] == [{"one": 0}]


def learned():
    (only,) = adaptive._learned.values()
    return only


def test_a_backend_that_declines_a_call_leaves_and_the_next_serves_it(known, runs, monkeypatch):
    entries = known(one=2.0, two=1.0)

    def declines(*arguments):
        raise attnreg.UnsupportedInputError("not today")

    two = entries["two"].backend
    kernels = attnreg.Kernels(declines, declines)
    know(monkeypatch, entries["one"].backend, dataclasses.replace(two, load=lambda: kernels))
    attnreg.configure(ADAPTIVE)
    assert runs(8) == ["one"] * 8
    (forward,) = learned().turns.values()
    assert forward.out == {"two": "UnsupportedInputError: not today"}


def test_an_error_of_a_kernel_passes_through_and_it_gets_no_more_turns(known, runs, monkeypatch):
    entries = known(one=2.0, two=1.0)

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
    able, costs = ("a", "b", "math", "c", "d"), {"a": 10.0, "b": 20.1, "c": 19.9, "math": 10.0}
    predicted = Prediction("a table", tuple(Candidate(*one) for one in (*costs.items(), ("d", None))))
    assert adaptive._worth_a_turn(able, predicted) == ["a", "c"]
    assert adaptive._worth_a_turn(able, None) == ["a", "b", "c", "d"]


@pytest.fixture
def kept(monkeypatch, tmp_path):
    """Keep what is seen, below a folder of the test's; returns what begins a new process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(adaptive, "_keeps", True)

    def begin_anew():
        monkeypatch.setattr(adaptive, "_learned", {})
        _registry.changed()
        return list(tmp_path.glob("attnreg/adaptive/*.json"))

    return begin_anew


def test_the_next_process_begins_with_what_this_one_has_seen(known, runs, kept):
    known(one=2.0, two=1.0)
    attnreg.configure(ADAPTIVE)
    runs(13)
    (file,) = kept()
    (point,) = load(file).points
    assert point.backends == {"one": Measured(gpu_us=2e6), "two": Measured(gpu_us=1e6)}
    assert runs(3) == ["two"] * 3
    # A further kind is added to the file, and takes nothing away.
    runs(13, lambda: attend(64))
    assert [one.size.max_q for one in load(file).points] == [8, 64]


def test_versions_that_differ_begin_anew(known, runs, kept, monkeypatch):
    entries = known(one=2.0, two=1.0)
    attnreg.configure(ADAPTIVE)
    runs(13)
    newer = [dataclasses.replace(one.backend, version=lambda: "2.0") for one in entries.values()]
    know(monkeypatch, *newer)
    assert len(kept()) == 1
    assert runs(2) == ["one", "two"]


def test_a_backend_that_was_disabled_has_its_turns_when_it_no_longer_is(known, runs, kept):
    known(one=2.0, two=1.0, three=3.0)
    attnreg.configure({**ADAPTIVE, "disabled": ["two"]})
    assert "two" not in runs(13)
    kept()
    attnreg.configure(ADAPTIVE)
    assert runs(3) == ["one", "two", "three"]


def test_a_broken_file_is_named_and_written_anew(known, runs, kept, caplog):
    known(one=2.0, two=1.0)
    attnreg.configure(ADAPTIVE)
    runs(13)
    (file,) = kept()
    file.write_text("{", encoding="utf-8")
    with caplog.at_level(logging.WARNING, "attnreg"):
        assert set(runs(12)) == {"one", "two"}
    assert f"what was measured earlier isn't used: {file}: got no JSON" in caplog.text
    runs(1)
    assert len(load(file).points) == 1


def test_a_folder_that_cannot_be_written_costs_only_the_next_start(known, runs, kept, tmp_path, caplog):
    (tmp_path / "attnreg").write_text("a file is in the way", encoding="utf-8")
    known(one=2.0, two=1.0)
    attnreg.configure(ADAPTIVE)
    with caplog.at_level(logging.INFO, "attnreg"):
        assert runs(14)[12:] == ["two"] * 2
    assert "what was measured can't be kept" in caplog.text


# The ranks of a job


class Rank:
    """One of two ranks that share a store: what is known there, and the switch to it."""

    def __init__(self, monkeypatch, store):
        self._patch, self._store, self._learned = monkeypatch, store, {}

    def __enter__(self):
        self._patch.setattr(adaptive, "_learned", self._learned)
        self._patch.setattr(job_store, "default", lambda: self._store)
        self._patch.setattr(job_store, "group_of_several", lambda: dist)
        # Nothing but this policy asks here.
        self._patch.setattr("attnreg.selection.ranks.agree", lambda *arguments: None)
        _registry.changed()

    def __exit__(self, *error):
        self._learned = adaptive._learned


@pytest.fixture
def ranks(monkeypatch):
    store = dist.HashStore()
    return Rank(monkeypatch, store), Rank(monkeypatch, store)


def test_one_rank_measures_and_the_others_take_over_what_it_has_found(known, runs, ranks, clock):
    known(one=2.0, two=1.0)
    attnreg.configure(ADAPTIVE)
    with ranks[1]:
        assert runs(2) == ["one", "two"]  # the first that meets such a call
    with ranks[0]:
        assert runs(15) == ["one"] * 15
    with ranks[1]:
        assert runs(12)[10:] == ["two"] * 2
    with ranks[0]:
        clock.now += adaptive.LOOK_S
        assert runs(2) == ["two", "two"]
        assert learned().turns.popitem()[1].point.backends["one"].gpu_us == pytest.approx(2e6)


def test_a_rank_that_waits_too_long_goes_on_without(known, runs, ranks, clock):
    known(one=2.0, two=1.0)
    attnreg.configure(ADAPTIVE)
    with ranks[1]:
        runs(1)
    with ranks[0]:
        runs(1)
        clock.now += adaptive.PATIENCE_S + 1
        runs(1)
    with ranks[1]:
        runs(14)
    with ranks[0]:
        clock.now += adaptive.PATIENCE_S
        assert runs(3) == ["one"] * 3


def test_a_store_that_fails_is_said_once_and_no_turns_are_taken(known, runs, ranks, monkeypatch, caplog):
    known(one=2.0, two=1.0)
    attnreg.configure(ADAPTIVE)

    def fails(seconds, run):
        raise RuntimeError("the store is gone")

    with ranks[0], caplog.at_level(logging.INFO, "attnreg"):
        monkeypatch.setattr(job_store, "within", fails)
        assert runs(14) == ["one"] * 14
    assert caplog.text.count("the store is gone") == 1


def test_what_cannot_be_read_in_the_store_fails_no_call(known, runs, ranks, clock, monkeypatch):
    known(one=2.0, two=1.0)
    attnreg.configure(ADAPTIVE)
    with ranks[1]:
        runs(1)
    with ranks[0]:
        runs(1)
        monkeypatch.setattr(adaptive, "_published", lambda name: '{"of": "another version"}')
        clock.now += adaptive.LOOK_S
        assert runs(3) == ["one"] * 3


def test_a_misspelt_policy_names_the_right_one(monkeypatch):
    said = refusal(attnreg.configure, {"policy": "adaptiv"})
    assert "'measured', 'order' or 'adaptive'; did you mean 'adaptive'?" in said
    monkeypatch.setenv("ATTNREG_POLICY", "adaptiv")
    assert "measured, order or adaptive; did you mean 'adaptive'?" in refusal(attnreg.reload)


def test_the_variable_alone_is_enough(known, runs, monkeypatch):
    known(one=2.0, two=1.0)
    monkeypatch.setenv("ATTNREG_POLICY", "adaptive")
    attnreg.reload()
    assert policy.current().adaptive is not None
    assert runs(2) == ["one", "two"]
