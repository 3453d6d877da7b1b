"""Promises of the conformance kit about cuts: it finds a backend that decides otherwise within a class."""

import dataclasses
import re

import pytest

import attnreg
from attnreg.core.contract.lengths import Cut
from attnreg.core.contract.spec import Device
from attnreg.core.registry.entry import Entry
from attnreg.testing import check_backend
from attnreg.testing.classes import difference
from attnreg.tools.measure import Case

CASES = ["drawn 1 ", "heads 4:2"]
SMALL = Case(name="small", lens_q=(5,), lens_k=(7,), dtype="float32", varlen=True)


def below(spec):
    """Refuse keys from 4,096 on."""
    return (f"max_k must be below 4096, got {spec.max_k}",) if spec.max_k >= 4096 else ()


def odd(spec):
    return (f"max_k must be even, got {spec.max_k}",) if spec.max_k > 130 and spec.max_k % 2 else ()


def many(spec):
    amount = spec.tokens_q + 128 * spec.batch
    return (f"tokens + 128 * sequences must be below 2**16, got {amount}",) if amount >= 2**16 else ()


SUM = ((1, ("tokens_q",)), (128, ("batch",)))
RIGHT = {
    "a length": (below, (Cut.of("max_k", at=4096),)),
    "a sum": (many, (Cut(SUM, 2**16),)),
    "more cuts than are needed": (below, (Cut.of("max_k", at=4096), Cut.of("max_k", at=5))),
    "a remainder that no cut names": (odd, ()),
}
WRONG = {
    "one too low": (below, (Cut.of("max_k", at=4095),)),
    "one too high": (below, (Cut.of("max_k", at=4097),)),
    "somewhere else": (below, (Cut.of("max_k", at=70_000),)),
    "a remainder": (odd, (Cut.of("max_k", at=131),)),
    "a sum": (many, (Cut(((1, ("tokens_q",)), (64, ("batch",))), 2**16),)),
}


@pytest.mark.parametrize(("refuses", "cuts"), RIGHT.values(), ids=RIGHT)
def test_a_backend_with_right_cuts_passes(fake, refuses, cuts):
    mine = fake("mine", refuses=refuses, cuts=lambda _: cuts).backend
    assert check_backend(mine, device="cpu", cases=["drawn 1 ", "heads 4:2"]).passed


@pytest.mark.parametrize(("refuses", "cuts"), WRONG.values(), ids=WRONG)
def test_a_backend_with_wrong_cuts_fails_and_is_told_two_lengths(fake, refuses, cuts):
    mine = fake("mine", refuses=refuses, cuts=lambda _: cuts).backend
    with pytest.raises(AssertionError, match="cuts: no Cut lies between") as raised:
        check_backend(mine, device="cpu", cases=CASES)
    fates = r"with (.*?), which (?:is refused|runs).*?, and with (.*?), which (?:is refused|runs)"
    lengths = [dict(re.findall(r"(\w+) (\d+)", one)) for one in re.search(fates, str(raised.value)).groups()]
    assert lengths[0].keys() == lengths[1].keys() and lengths[0] != lengths[1]
    if refuses is not many:  # a sum of two lengths
        assert [abs(int(a) - int(b)) for a, b in zip(*map(dict.values, lengths), strict=True)] == [1]


def test_a_rank_that_changes_within_a_class_is_found_too(fake):
    mine = fake(
        "mine", priority=lambda spec: 5 + (spec.max_q >= 1000), cuts=lambda _: [Cut.of("max_q", at=999)]
    ).backend
    with pytest.raises(
        AssertionError, match=r"with max_q \d+, which runs \(priority [56]\), and with max_q \d+, which runs"
    ):
        check_backend(mine, device="cpu", cases=CASES)


@pytest.mark.parametrize("has_backward", [pytest.param(True, marks=pytest.mark.slow), False])
def test_the_rank_of_a_direction_that_a_backend_does_not_have_is_no_difference(fake, has_backward):
    mine = fake(
        "mine", backward=has_backward, priority=lambda spec: 5 + (spec.max_q >= 1000),
        cuts=lambda _: [Cut.of("max_q", at=1000)],
    ).backend  # fmt: skip
    assert (mine.backward is not None) is has_backward
    assert check_backend(mine, device="cpu", cases=["drawn 1 ", "heads 4:2"]).passed
    assert difference(Entry("mine", "a test", mine), SMALL.spec(Device("cpu")), 0, 200) == ""


FAILING = {
    "a name that is no length": (
        {"cuts": lambda _: [Cut.of("maxk", at=4096)]},
        "cuts() failed: RegistrationError: cuts() of mine: got Cut(terms=((1, ('maxk',)),), at=4096), "
        "expected a Cut of batch, max_q, max_k, tokens_q, tokens_k, ranges at a whole number",
    ),
    "none": (
        {"cuts": lambda _: None},
        "cuts() failed: RegistrationError: cuts() of mine: got None, expected",
    ),
    "an error": ({"cuts": lambda _: [] + ()}, "cuts() failed: TypeError: can only concatenate list"),
    "of a length": (
        {"cuts": lambda spec: [Cut.of("max_k", at=spec.max_q)]},
        "cuts() reads max_q of the spec, expected no length",
    ),
    "builds": ({"builds": lambda spec: spec.max}, "builds() failed: AttributeError: AttentionSpec has no"),
}


@pytest.mark.parametrize(("functions", "said"), FAILING.values(), ids=FAILING)
def test_cuts_and_builds_that_fail_are_told_as_a_program_goes_on_without_them(
    fake, ran, packed, functions, said
):
    mine = dataclasses.replace(fake("mine", refuses=below).backend, **functions)
    with pytest.raises(AssertionError, match=re.escape(said)):
        check_backend(mine, device="cpu", cases=["heads 4:2"])
    with attnreg.register_backend(mine):
        attnreg.varlen_attn(*packed([3, 2]))
    assert ran() == {"mine": (1, 0)}


def test_the_difference_names_the_direction_the_reason_and_both_lengths(fake):
    mine = fake("mine", refuses=below, cuts=lambda _: [Cut.of("max_k", at=4097)]).backend
    said = difference(Entry("mine", "a test", mine), SMALL.spec(Device("cpu")), 0, 200)
    assert said == (
        "cuts: no Cut lies between a forward with max_k 4095, which runs (priority 0), and with max_k 4096, "
        "which is refused (max_k must be below 4096, got 4096); expected one, or no Cut of these lengths at "
        "all: each length is decided anew then"
    )


@pytest.mark.slow
def test_lengths_that_no_cut_names_are_a_note_as_each_is_decided_anew(fake):
    for wrong in (None, lambda _: [Cut.of("max_q", at=4096)]):
        report = check_backend(fake("mine", refuses=below, cuts=wrong).backend, device="cpu", cases=CASES)
        assert report.passed
        assert report.notes == tuple(
            f"some {direction}s are decided anew for each length: its functions read max_k, which no Cut of "
            "cuts() names"
            for direction in ("forward", "backward")
        )
        assert f"note: {report.notes[0]}" in str(report)
    right = fake("mine", refuses=below, cuts=lambda _: [Cut.of("max_k", at=4096)]).backend
    assert check_backend(right, device="cpu", cases=CASES).notes == ()


def test_a_single_cut_in_place_of_several_is_said(fake):
    mine = fake("mine", refuses=below, cuts=lambda _: Cut.of("max_k", at=4096)).backend
    with pytest.raises(AssertionError, match=r"cuts\(\) of mine: got a single Cut, expected a tuple of them"):
        check_backend(mine, device="cpu", cases=["heads 4:2"])
