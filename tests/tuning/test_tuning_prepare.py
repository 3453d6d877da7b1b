"""Promises of what `attnreg tune` does while other processes compile: first calls, and nothing twice."""

import dataclasses

import pytest
import torch
from support.tuned import altered, spec_with

BOTH = dataclasses.replace(spec_with(32), needs_backward=True)


@pytest.fixture
def counted(entry, clock):
    """Make an entry whose first call at the size of `BOTH` takes a second more, and count its forwards."""

    def make(name, **limits):
        calls = []

        def count(out):
            if out.shape[2] == 4:  # checks have two heads
                clock.seconds += not calls
                calls.append(name)
            return out

        return entry(name, 1.0, change=altered(count), **limits), calls

    return make


def test_backends_that_do_not_compile_are_called_once_and_that_was_their_first_call(session, counted):
    (plain, calls), (compiling, none) = counted("plain"), counted("compiling", compiles=True)
    made = session(plain, compiling)
    made.prepare([BOTH], lambda: True)
    prepared = len(calls)
    assert prepared > 0
    assert (none, made.points) == ([], {})
    list(made.run([BOTH], 1e6))
    forward = next(point for point in made.fresh if point.kind.direction == "forward")
    assert forward.backends["plain"].first_call_s == pytest.approx(1.001)
    assert forward.backends["plain"].gpu_us == pytest.approx(1000)


def test_it_ends_with_the_processes_and_what_fails_is_reported_where_it_is_measured(session, counted, entry):
    plain, calls = counted("plain")
    made = session(plain, entry("broken", change=altered(lambda out: 1 / 0)))
    rest = iter([True, False])
    made.prepare([BOTH, spec_with(40), spec_with(48)], lambda: next(rest))
    assert calls
    assert list(rest) == []
    list(made.run([BOTH], 1e6))
    assert all("ZeroDivisionError" in point.backends["broken"].failed for point in made.fresh)


def test_memory_that_other_processes_hold_meanwhile_rules_no_backend_out(session, entry):
    held = [True]

    def take(out):
        if held:
            raise torch.OutOfMemoryError("held by others")
        return out

    made = session(entry("large", change=altered(take)))
    made.prepare([BOTH], lambda: True)
    held.clear()
    list(made.run([BOTH], 1e6))
    assert [point.backends["large"].trouble for point in made.fresh] == ["", ""]
