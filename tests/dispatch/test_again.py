"""Promises of calls that are answered again: a backend's shorter way, from when it has one."""

import logging

import pytest
import torch

from attnreg.aten.again import Again
from attnreg.errors import RegistrationError


class Kernel:
    """Answers calls, has a shorter way from a certain asking on, and tells who answered."""

    def __init__(self, ready=1):
        self.ready, self.asked, self.told, self.able = ready, 0, [], True

    def run(self, *given):
        self.told.append("run")
        return given

    def shorter(self, *given):
        self.asked += 1
        return self.short if self.asked >= self.ready else None

    def short(self, *given):
        self.told.append("short")
        return given if self.able else None


def test_the_first_call_runs_and_the_next_is_short():
    kernel = Kernel()
    again = Again(kernel.run, kernel.shorter)
    assert [again(number) for number in range(3)] == [(0,), (1,), (2,)]
    assert kernel.told == ["run", "short", "short"]


def test_a_backend_without_one_yet_is_asked_ever_more_rarely():
    kernel = Kernel(ready=10**9)
    again = Again(kernel.run, kernel.shorter)
    for _ in range(100):
        again()
    assert kernel.asked == 7  # after calls 1, 2, 4, ... 64
    assert kernel.told == ["run"] * 100


def test_one_that_is_ready_later_is_found():
    kernel = Kernel(ready=3)
    again = Again(kernel.run, kernel.shorter)
    for _ in range(6):
        again()
    assert kernel.told == ["run"] * 4 + ["short"] * 2


def test_a_shorter_way_that_cant_after_all_gives_way_to_the_other():
    kernel = Kernel()
    again = Again(kernel.run, kernel.shorter)
    again()
    kernel.able = False
    assert again(5) == (5,)
    assert kernel.told == ["run", "short", "run"]


def test_a_call_that_was_not_answered_asks_for_nothing():
    again = Again(lambda *_: None, lambda *_: pytest.fail("asked"))
    assert again() is None


def test_an_error_is_the_callers_and_ends_nothing():
    kernel = Kernel()
    again = Again(kernel.run, kernel.shorter)
    again()
    kernel.short = None
    again._short = lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("full"))
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        again()
    again._short = lambda *given: given
    assert again(1) == (1,)


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        ((torch.ones(3),), r"got \[\(\(3,\), torch.float32\)\], expected \[\(\(2,\), torch.float32\)\]"),
        ((torch.ones(2).double(),), "torch.float64"),
        ((torch.ones(2), torch.ones(2)), "got .*, .*, expected"),
        (torch.ones(2), "got .'Tensor'"),
        ((None,), "got .'NoneType'"),
    ],
)
def test_a_shorter_way_that_returns_something_else_is_an_error_that_says_what(returned, told):
    again = Again(lambda: (torch.ones(2),), lambda: lambda: returned)
    again()
    with pytest.raises(RegistrationError, match=told):
        again()


def test_it_is_looked_at_the_first_time_only():
    results = [(torch.ones(2),), (torch.ones(3),)]
    again = Again(lambda: (torch.ones(2),), lambda: lambda: results.pop(0))
    again()
    again()
    assert again()[0].shape == (3,)


def test_an_error_in_asking_costs_no_call_and_is_logged(caplog):
    def broken(*_):
        raise LookupError("no such plan")

    again = Again(lambda: (1,), broken)
    with caplog.at_level(logging.INFO, "attnreg"):
        assert [again(), again(), again()] == [(1,)] * 3
    assert "no shorter way for a call that came before: LookupError: no such plan" in caplog.text
