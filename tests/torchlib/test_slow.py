"""Promises of the line about slow steps: what was slow and for how long, once, and nothing about others."""

import logging
from types import SimpleNamespace

import pytest

from attnreg.core.torchlib import slow


@pytest.fixture
def clock(monkeypatch):
    """Return the times that the clock shows next, in seconds."""
    times = []
    monkeypatch.setattr(slow, "time", SimpleNamespace(perf_counter=lambda: times.pop(0)))
    return times


@pytest.mark.parametrize(
    ("limit", "took", "lines"),
    [
        ({}, 1.0, []),
        ({}, 1.26, ["FA4 compiled a kernel, which took 1.3 s"]),
        ({"seconds": 5.0}, 4.9, []),
        ({"seconds": 0.5}, 0.75, ["FA4 compiled a kernel, which took 0.8 s"]),
    ],
)
def test_a_step_says_what_it_was_if_it_took_longer_than_the_limit(clock, caplog, limit, took, lines):
    caplog.set_level(logging.INFO, "attnreg")
    clock += [10.0, 10.0 + took]
    with slow.log_if_slow("FA4 compiled a kernel, which", **limit):
        pass
    assert [(one.levelname, one.getMessage()) for one in caplog.records] == [("INFO", x) for x in lines]
    assert clock == []


def test_a_step_that_fails_leaves_the_line_to_whoever_handles_the_error(clock, caplog):
    caplog.set_level(logging.INFO, "attnreg")
    clock += [10.0, 20.0]
    with pytest.raises(ZeroDivisionError), slow.log_if_slow("dividing"):
        raise ZeroDivisionError
    assert caplog.records == []
