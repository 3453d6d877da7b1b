"""Promises about decisions without a call (`calls.decided`): as about each call, but once a class."""

import random
from dataclasses import replace

import pytest
from support.known import know
from support.length_kinds import draw_backend, draw_kind

import attnreg
from attnreg.core.contract.lengths import Cut, with_lengths
from attnreg.core.contract.spec import AttentionSpec, Device
from attnreg.core.dispatch import calls, scope, state
from attnreg.core.dispatch.kinds import kind_of
from attnreg.core.selection.decision import Preference
from attnreg.testing.classes import draw_spec

SPEC = AttentionSpec(
    device=Device("cpu"), dtype="float32", batch=2, max_q=8, max_k=8, heads_q=2, heads_k=2, head_dim=16,
    head_dim_v=16, varlen=True,
)  # fmt: skip


def choices(decided):
    return [(decision.direction, decision.backend, decision.asked_for) for decision in decided]


@pytest.mark.parametrize("kinds", [12, pytest.param(400, marks=pytest.mark.slow)])
def test_backends_with_limits_of_any_form_are_those_of_each_call(monkeypatch, decided_alone, kinds):
    draw, count = random.Random(11), 60
    for _ in range(kinds):
        made = [draw_backend(draw, f"made{number}") for number in range(draw.randint(1, 3))]
        know(monkeypatch, *(replace(one, backward=None) if draw.random() < 0.3 else one for one in made))
        spec, choice = draw_kind(draw), None
        if draw.random() < 0.5:
            choice = scope.make_choice(Preference("a test", ("made0",), required=False))
        cuts = kind_of(state.state(), spec, "forward").cuts
        for each in [draw_spec(draw, spec, cuts) for _ in range(count)]:
            assert choices(calls.decided(each, choice)) == choices(calls.decisions(each, choice)), each
    assert len(decided_alone) < 1.8 * kinds * count, "most calls are decided by class"


@pytest.mark.parametrize("declared", [True, False])
def test_a_class_is_decided_once_and_each_class_of_its_own(fake, decided_alone, declared):
    """Of a backend without a backward, so that the forward's cuts count, and what the forward reads."""
    limit = Cut.of("max_k", at=100)

    def refuses(spec):
        return ("max_k must be below 100",) if limit.is_reached(spec) else ()

    first = fake("first", refuses=refuses, cuts=lambda _: [limit] * declared).backend
    with (
        attnreg.register_backend("math"),
        attnreg.register_backend(replace(first, backward=None)),
    ):
        for longest in (20, 30, 99, 100, 101, 50, 5000):
            [decision] = calls.decided(with_lengths(SPEC, max_k=longest, tokens_k=2 * longest), None)
            assert decision.backend == ("math" if longest >= 100 else "first")
    each_apart = [20, 30, 99, 100, 101, 50, 5000]
    assert [spec.max_k for spec in decided_alone] == ([20, 100] if declared else each_apart)


def test_kinds_and_choices_are_decided_apart(fake, decided_alone):
    with attnreg.register_backend(fake("first").backend):
        chosen = scope.make_choice(Preference("a test", ("math",)))
        for _ in range(2):
            assert [decision.backend for decision in calls.decided(SPEC, None)] == ["first"]
            assert [decision.backend for decision in calls.decided(SPEC, chosen)] == ["math"]
            trained = calls.decided(SPEC.but(needs_backward=True), None)
            assert [decision.direction for decision in trained] == ["forward", "backward"]
            calls.decided(SPEC.but(heads_k=1), None)
    assert len(decided_alone) == 4


def test_a_change_of_settings_is_decided_anew(fake):
    with attnreg.register_backend(fake("first").backend):
        assert calls.decided(SPEC, None)[0].backend == "first"
        attnreg.configure({"disabled": ["first"]})
        assert calls.decided(SPEC, None)[0].backend != "first"


def test_a_backend_that_turned_out_not_to_load_is_decided_for_no_more(fake, monkeypatch, decided_alone):
    def load():
        raise ImportError("undefined symbol")

    hopeful = replace(fake("hopeful").backend, load=load, backward=None)
    know(monkeypatch, hopeful, fake("second", priority=-1).backend)
    generation = state.state().generation
    spec = SPEC.but(needs_backward=True)
    assert [decision.backend for decision in calls.decided(spec, None)] == ["hopeful", "second"]
    with pytest.raises(attnreg.BackendUnavailableError):
        state.state().entries["hopeful"].kernels()
    for _ in range(3):
        assert [decision.backend for decision in calls.decided(spec, None)] == ["second", "second"]
    assert state.state().generation is generation, "nothing else has dropped what was decided"
    assert len(decided_alone) == 2


def test_what_turns_may_change_is_decided_each_time(decided_alone):
    attnreg.configure({"policy": "adaptive"})
    for _ in range(3):
        calls.decided(SPEC, None)
    assert len(decided_alone) == 3


def test_lengths_that_count_each_are_kept_up_to_a_bound(monkeypatch, fake, decided_alone):
    monkeypatch.setattr(state, "MOST_PLANS", 8)
    odd = fake("odd", refuses=lambda spec: ("max_k must be odd",) * (spec.max_k % 2 == 0))
    with attnreg.register_backend("math"), attnreg.register_backend(odd.backend):
        for longest in range(1, 41):
            [decision] = calls.decided(with_lengths(SPEC, max_k=longest, tokens_k=2 * longest), None)
            assert decision.backend == ("odd" if longest % 2 else "math")
            calls.decided(with_lengths(SPEC.but(heads_k=1), max_k=longest, tokens_k=2 * longest), None)
            assert len(state.state().decided) <= 8
        for dim in range(8, 40):
            calls.decided(replace(SPEC, head_dim=dim), None)
            assert len(state.state().kinds) <= 8


def test_that_no_backend_can_run_a_class_is_decided_once(decided_alone):
    only = scope.make_choice(Preference("a test", ("cuDNN",), exclusive=True, required=False))
    for longest in (20, 30, 40):
        [decision] = calls.decided(with_lengths(SPEC, max_k=longest, tokens_k=2 * longest), only)
        assert (decision.backend, decision.refusal) == (None, "a test allows no other backend")
    assert [spec.max_k for spec in decided_alone] == [20]
