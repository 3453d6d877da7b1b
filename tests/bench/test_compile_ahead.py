"""Promises of compiling ahead: each kind of call, by processes that end in time, and only where it pays."""

import dataclasses
import multiprocessing
import time
import types

import pytest
from support.known import know
from support.tuned import spec_with

from attnreg.core import registry
from attnreg.core.times.kinds import kind_of
from attnreg.tools.bench import ahead

# Eight kinds, two sizes of each.
KINDS = [
    dataclasses.replace(spec_with(length, head_dim=dim, head_dim_v=dim, window=window), needs_backward=True)
    for dim in (8, 16, 24, 32)
    for window in ((-1, -1), (-1, 0))
    for length in (20, 40)
]


class Inline:
    """A process that runs in this one when it is started."""

    def __init__(self, target, args):
        self._run = lambda: target(*args)

    def start(self):
        self._run()

    def join(self, timeout=None):
        pass

    def is_alive(self):
        return False


@pytest.fixture
def inline(monkeypatch):
    """Run what the processes would; returns the kinds of calls that each was given."""
    shares = []

    def process(target, args):
        shares.append([kind_of(group[0], "forward") for group in args[1]])
        return Inline(target, args)

    fake_context = types.SimpleNamespace(Process=process)
    monkeypatch.setattr(ahead.multiprocessing, "get_context", lambda method: fake_context)
    monkeypatch.setattr(ahead.os, "cpu_count", lambda: 6)
    monkeypatch.setattr(ahead.os, "dup2", lambda *files: None)
    return shares


def test_a_backend_that_compiles_is_called_at_every_size_in_both_directions_and_no_other(
    monkeypatch, fake, inline
):
    compiling, other = fake("compiling", compiles=True), fake("other")
    know(monkeypatch, compiling.backend, other.backend)
    assert ahead.compile_ahead(KINDS, registry.entries().values(), 60.0) == 3
    assert [len(share) for share in inline] == [3, 3, 2]
    assert {kind for share in inline for kind in share} == {kind_of(spec, "forward") for spec in KINDS}
    assert (other.forwards, other.backwards) == ([], [])
    for calls in (compiling.forwards, compiling.backwards):
        sizes = [(call[-1].max_q, call[-1].window, call[1].shape[-1]) for call in calls]
        for spec in KINDS:
            assert (spec.max_q, spec.window, spec.head_dim) in sizes


def test_this_process_does_something_else_meanwhile_and_knows_when_the_others_are_done(
    monkeypatch, fake, inline
):
    know(monkeypatch, fake("compiling", compiles=True).backend)
    monkeypatch.setattr(Inline, "start", lambda process: None)
    seen = []

    def meanwhile(going_on):
        seen.append(len(inline))
        monkeypatch.setattr(Inline, "is_alive", lambda process: True)
        seen.append(going_on())
        monkeypatch.setattr(Inline, "is_alive", lambda process: False)
        seen.append(going_on())

    ahead.compile_ahead(KINDS, registry.entries().values(), 60.0, meanwhile)
    assert seen == [3, True, False]
    # The time is up, whatever they do; and where nothing is started there is no meanwhile.
    monkeypatch.setattr(Inline, "terminate", lambda process: None, raising=False)
    monkeypatch.setattr(Inline, "is_alive", lambda process: True)
    ahead.compile_ahead(KINDS, registry.entries().values(), 0.0, lambda going_on: seen.append(going_on()))
    ahead.compile_ahead(KINDS[:2], registry.entries().values(), 60.0, lambda going_on: seen.append("called"))
    assert seen[3:] == [False]


@pytest.mark.slow
def test_what_fails_in_a_process_does_not_keep_the_rest_from_being_compiled(monkeypatch, fake, inline):
    broken = fake("broken", compiles=True, load=lambda: 1 / 0)
    right = fake("right", compiles=True)
    know(monkeypatch, broken.backend, right.backend)
    ahead.compile_ahead(KINDS, registry.entries().values(), 60.0)
    assert {call[-1].max_q for call in right.backwards} >= {20, 40}


@pytest.mark.parametrize(
    ("kinds", "cores", "compiles"), [(KINDS[:6], 64, True), (KINDS, 3, True), (KINDS, 64, False)]
)
def test_nothing_is_started_for_few_kinds_with_few_cores_or_without_such_a_backend(
    monkeypatch, fake, inline, kinds, cores, compiles
):
    one = fake("one", compiles=compiles)
    know(monkeypatch, one.backend)
    monkeypatch.setattr(ahead.os, "cpu_count", lambda: cores)
    assert ahead.compile_ahead(kinds, registry.entries().values(), 60.0) == 0
    assert (inline, one.forwards) == ([], [])


def test_processes_that_are_not_done_in_time_are_ended(monkeypatch, fake):
    monkeypatch.setattr(ahead.os, "cpu_count", lambda: 4)
    one = fake("cpu", compiles=True)  # the processes find the backend of this name
    know(monkeypatch, one.backend)
    started = time.monotonic()
    assert ahead.compile_ahead(KINDS, registry.entries().values(), 0.0) == 2
    assert not multiprocessing.active_children()
    assert time.monotonic() - started < 30
