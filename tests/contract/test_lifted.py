"""Functions of scores as text and tensors: one function is never taken for another, and nothing is kept."""

import gc
import logging
import weakref

import pytest
import torch

from attnreg.core.launching import lifted
from attnreg.core.launching.lifted import function_of, lift
from attnreg.errors import InvalidInputError, UnsupportedInputError

CPU = torch.device("cpu")
PLACES = [torch.tensor(place, dtype=torch.int32) for place in (0, 1, 4, 2)]
SCORE = torch.tensor(0.75)


@pytest.fixture(autouse=True)
def nothing_traced(monkeypatch):
    monkeypatch.setattr(lifted, "_traces", {})
    monkeypatch.setattr(lifted, "_counts", {})


def value_of(function):
    text, tensors = lift("score_mod", function, CPU)
    return function_of(text)(SCORE, *PLACES, *tensors).item()


def made(bias, slope):
    def score_mod(score, batch, head, query, key):
        return score + bias[head, query] + slope * (query - key)

    return score_mod


def test_a_lifted_function_has_the_values_of_the_function():
    bias = torch.arange(20.0).view(2, 10)
    assert value_of(made(bias, 0.5)) == 0.75 + 14.0 + 0.5 * 2
    assert (
        value_of(lambda score, batch, head, query, key: torch.where(query >= key, score, -torch.inf)) == 0.75
    )


def test_a_text_is_one_line_which_inductors_cpp_wrapper_can_write_between_quotes():
    text = lift("score_mod", made(torch.ones(2, 10), 0.5), CPU).text
    assert text.isprintable() and not {'"', "\\"} & {*text}


def test_a_function_made_anew_is_traced_once_and_reads_its_own_tensors():
    kept = []
    for number in range(20):
        bias = torch.full((2, 10), float(number))
        score_mod = made(bias, 0.5)
        assert value_of(score_mod) == 0.75 + number + 1.0
        kept += [weakref.ref(bias), weakref.ref(score_mod)]
    assert len(lifted._traces) == 1
    del bias, score_mod
    gc.collect()
    assert not any(reference() is not None for reference in kept)


def test_functions_of_other_numbers_code_or_tensors_that_are_one_are_other_functions():
    first, second = torch.ones(2, 10), torch.full((2, 10), 2.0)

    def both(one, other):
        return lambda score, batch, head, query, key: score + one[head, key] * 10 + other[head, key]

    assert value_of(both(first, first)) == 11.75
    assert value_of(both(first, second)) == 12.75
    assert value_of(both(second, first)) == 21.75
    assert value_of(made(first, 1)) == 3.75
    assert value_of(made(first, 1.0)) == 3.75
    assert value_of(made(first, True)) == 3.75
    assert value_of(made(first, 2)) == 5.75
    assert value_of(lambda score, *_: score + 1) == 1.75
    assert value_of(lambda score, *_: score + 2) == 2.75


GLOBAL = 1.0


def test_a_variable_that_changes_is_read_anew(monkeypatch):
    factor = 2.0

    def changing(score, *_):
        return score * factor + GLOBAL

    assert value_of(changing) == 2.5
    factor = 4.0
    assert value_of(changing) == 4.0
    monkeypatch.setitem(globals(), "GLOBAL", 2.0)
    assert value_of(changing) == 5.0


def test_a_default_and_a_function_that_is_called_count():
    def shifted(by):
        return lambda score: score + by

    def calling(inner):
        return lambda score, batch, head, query, key, weight=3.0: inner(score) * weight

    assert value_of(calling(shifted(1.0))) == 5.25
    assert value_of(calling(shifted(2.0))) == 8.25


def test_sizes_count_where_they_are_read():
    def longest(bias):
        return lambda score, *_: score + bias.shape[0]

    assert [value_of(longest(torch.ones(size))) for size in (3, 4, 3)] == [3.75, 4.75, 3.75]
    assert [value_of(made(torch.ones(2, size), 1)) for size in (5, 6)] == [3.75, 3.75]
    assert len(lifted._traces) == 2


def test_sizes_count_where_an_operation_uses_them():
    def first_half(bias):
        return lambda score, *_: score + bias.tensor_split(2)[0].sum()

    def flat(bias):
        return lambda score, batch, head, query, key: score + bias.flatten()[query]

    assert [value_of(first_half(torch.ones(size))) for size in (4, 10, 4)] == [2.75, 5.75, 2.75]
    assert [value_of(flat(torch.ones(2, size))) for size in (5, 6)] == [1.75, 1.75]


def clamp(score, *_):
    return score.clamp(-clamp.most, clamp.most)


def test_a_function_may_have_the_name_of_a_method_and_attributes():
    clamp.most = 0.5
    assert value_of(clamp) == 0.5
    clamp.most = 0.25
    assert value_of(clamp) == 0.25


class Bias:
    def __init__(self, slope):
        self.slope = slope

    def __call__(self, score, batch, head, query, key):
        return score + self.slope * key


def test_the_state_of_an_object_is_read_in_each_call_and_a_log_line_says_so_once(caplog):
    bias = Bias(1.0)
    with caplog.at_level(logging.WARNING, "attnreg"):
        for number in range(20):
            bias.slope = float(number)
            assert value_of(bias) == 0.75 + 2 * number
    (record,) = caplog.records
    assert "was traced 8 times, as it has captured an object of type Bias" in record.getMessage()
    assert not lifted._traces


def test_numbers_that_change_in_each_call_are_traced_anew_and_a_log_line_says_so_once(caplog, monkeypatch):
    monkeypatch.setattr(lifted, "MOST_TRACES", 10)
    with caplog.at_level(logging.WARNING, "attnreg"):
        for number in range(20):
            assert value_of(lambda score, *_, number=number: score + number) == 0.75 + number
    (record,) = caplog.records
    assert "test_lifted.py" in record.getMessage()
    assert "its numbers change: capture tensors in their place" in record.getMessage()
    assert len(lifted._traces) == 10


HOST = torch.tensor(3)
UNTRACEABLE = {
    "a condition": (lambda score, b, h, query, key: score if query > key else score * 2, "by __bool__"),
    "a tensor as a number": (lambda score, b, h, query, key: score * int(HOST), "by __int__"),
    "an item": (lambda score, *_: score * HOST.item(), "by item"),
    "an error of its own": (lambda score, *_: score.no_such_method(), "no_such_method"),
}


@pytest.mark.parametrize(("function", "reason"), UNTRACEABLE.values(), ids=UNTRACEABLE)
def test_a_function_that_no_kernel_can_be_made_of_is_refused_each_time(function, reason):
    for _ in range(2):
        with pytest.raises(
            UnsupportedInputError, match=f"score_mod can't be traced for a kernel: .*{reason}"
        ):
            lift("score_mod", function, CPU)


@pytest.mark.parametrize(
    "text",
    [
        "import os",
        "def lifted(x):\n    return open('file')",
        "def lifted(x):\n    return torch.load('file')",
        "def lifted(x):\n    return x.__class__()",
        "def lifted(x=exit()):\n    return x",
        "@exit\ndef lifted(x):\n    return x",
    ],
)
def test_a_text_that_does_more_than_call_ops_is_not_run(text):
    with pytest.raises(InvalidInputError, match="expected the text of a function of ops"):
        function_of(text)
