"""Promises about a class of which steps count: a new step runs what another with the same choice runs."""

import gc
import weakref

import pytest
import torch
from support.launcher_kinds import PACKED, OnAddresses, assert_equal, forward_function

import attnreg
from attnreg.core.contract.lengths import OF_ALL, Lengths, steps_of
from attnreg.core.dispatch import counters, state
from attnreg.core.dispatch.state import CallKind, Detail

pytestmark = pytest.mark.usefixtures("one_thread")

# Of one class, and each in a step of its own.
FIRST, SECOND, THIRD = (Lengths(2, longest, longest, 2 * longest, 2 * longest) for longest in (8, 20, 40))


class Steps:
    """Stands for `steps.Steps`: what it is asked, and what it says.

    Attributes:
        asked: the lengths.
        answer: the counters of the plan that it chooses, None, or an error to raise.
        meanwhile: called before it answers.
    """

    def __init__(self, answer):
        self.asked, self.answer, self.meanwhile = [], answer, lambda: None

    def __call__(self, *lengths):
        self.asked.append(Lengths(*lengths))
        self.meanwhile()
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


class PlannedBySteps:
    """Calls the compiled front with lengths of a class of which steps count."""

    def __init__(self, plan):
        self.plan, self.kind = plan, CallKind(OF_ALL)
        self.steps = Steps((plan.counter,))
        plan.forward = forward_function

    def __call__(self, lengths):
        """Return whether the call was planned; checks what it returned."""
        place = self.kind.key(lengths)[:1]
        self.kind.details[place] = Detail.STEPS
        self.kind.steps.setdefault(place, self.steps)
        self.plan.plan = state.Plan(
            "tests", None, False, (self.plan.counter,), kind=self.kind, key=self.kind.key(lengths)
        )
        inputs = [torch.randn(rows, 2, 8) for rows in (lengths.tokens_q, lengths.tokens_k, lengths.tokens_k)]
        ends = torch.arange(lengths.batch + 1, dtype=torch.int32) * lengths.max_q
        planned, results = self.plan.planned(*inputs, ends, ends, max_q=lengths.max_q, max_k=lengths.max_k)
        if not planned:
            assert_equal(results, forward_function(*inputs))
        return planned


@pytest.fixture
def call(packed_plan):
    return PlannedBySteps(packed_plan)


def test_a_new_step_runs_what_another_step_with_its_choice_runs(call):
    assert [call(FIRST), call(SECOND), call(SECOND), call(THIRD)] == [True, False, False, False]
    assert call.steps.asked == [SECOND, THIRD]
    assert call.plan.counted() == 3


def test_the_kept_lengths_of_a_step_ask_for_no_choice(call):
    call(FIRST)
    assert not call(FIRST._replace(tokens_q=17, tokens_k=17))
    assert call.steps.asked == []


# Three sequences; 32 tokens begin a step, as 8 and 12 do.
@pytest.mark.parametrize(("longest", "tokens", "is_same"), [(10, 30, True), (11, 24, True), (11, 23, False)])
def test_of_all_tokens_the_mean_of_a_sequence_counts(call, longest, tokens, is_same):
    first, second = Lengths(3, 11, 11, 33, 33), Lengths(3, longest, longest, tokens, tokens)
    call(first)
    assert not call(second)
    assert call.steps.asked == ([] if is_same else [second])
    assert (steps_of(first) == steps_of(second)) is is_same


def test_without_sequences_steps_are_those_of_the_tokens():
    assert steps_of(Lengths(0, 0, 0, 5, 0)) == (0, 0, 0, 6, 0, 0)


@pytest.mark.parametrize("answer", [None, (), "another"], ids=["none", "nothing counted", "another choice"])
def test_a_step_without_such_an_entry_is_planned(call, answer):
    call(FIRST)
    call.steps.answer = (call.plan.counter, counters.Counter()) if answer == "another" else answer
    assert [call(SECOND), call(SECOND)] == [True, False]
    assert call.steps.asked == [SECOND]


def test_an_entry_for_which_python_may_know_better_serves_no_other_step(call):
    call.plan.options = {"is_final": False}
    # Python is asked anew at the first, the second and the fourth use.
    assert [call(FIRST) for _ in range(6)] == [True, True, True, False, True, False]
    assert call(SECOND)
    call.plan.options = {}
    assert call(SECOND)  # its first use
    assert not call(THIRD)


def test_launches_that_steps_would_take_from_each_other_are_kept_by_each(call):
    kernel = OnAddresses("forward", PACKED)
    call.plan.forward = kernel.launcher
    call(FIRST)
    assert call(SECOND)


def test_an_entry_of_another_class_serves_no_step(call):
    call(Lengths(2, 1, 1, 2, 2))
    call.plan.options = {"is_final": False}  # so that no entry of the step's own class serves it either
    call(FIRST)
    assert call(SECOND)
    assert call.steps.asked == [SECOND]


def test_a_plan_serves_only_steps_of_its_class_with_the_same_choice():
    kind, counted = CallKind(OF_ALL), (counters.Counter(),)
    single = Lengths(2, 1, 1, 2, 2)
    for lengths in (FIRST, SECOND, single):
        kind.details[kind.key(lengths)[:1]] = Detail.STEPS
    key = kind.key(SECOND)

    def alike(lengths, backend="first", counts=counted, is_native=False):
        own = kind.key(lengths)
        kind.plans = {own: state.Plan(backend, None, is_native, counts, kind=kind, key=own)}
        return kind.plan_alike(key, "first", counted, False)

    assert alike(FIRST).key == key
    assert alike(single) is None
    assert alike(FIRST, backend="second") is None
    assert alike(FIRST, counts=(*counted, counters.Counter())) is None
    assert alike(FIRST, is_native=True) is None
    kind.details[key[:1]] = Detail.EXACT
    assert alike(FIRST) is None


def test_what_was_chosen_before_a_change_of_settings_is_not_run_after_it(call):
    call(FIRST)

    def change_and_call_again():
        call.steps.meanwhile = lambda: None
        call.plan.module.drop()
        assert call(FIRST)

    call.steps.meanwhile = change_and_call_again
    assert call(SECOND)
    assert [call(FIRST), call(SECOND)] == [False, False]
    assert call.steps.asked == [SECOND, SECOND]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_error_while_a_step_is_chosen_reaches_the_program_and_keeps_nothing(call, error):
    call(FIRST)
    call.steps.answer = error("in the middle")
    with pytest.raises(error, match="in the middle"):
        call(SECOND)
    call.steps.answer = (call.plan.counter,)
    assert not call(SECOND)
    assert call.plan.counted() == 1


def test_what_decides_about_steps_goes_with_the_entries(call):
    gone = []
    call(FIRST)
    watched = call.steps
    weakref.finalize(watched, gone.append, True)
    call.kind.steps.clear()
    call.kind, call.steps = CallKind(OF_ALL), None
    call.plan.plan = None
    del watched
    gc.collect()
    assert not gone
    attnreg.core.registry.changed()
    gc.collect()
    assert gone
