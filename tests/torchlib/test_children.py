"""Promises of commands that attnreg runs: none of their processes outlives an interrupt."""

import functools
import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from attnreg.core.torchlib import children

INTERRUPT = signal.SIGINT


@pytest.fixture
def started(monkeypatch):
    """Return the processes that are started; each is interrupted before `Popen` has returned it."""
    processes = []

    class Interrupted(subprocess.Popen):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            processes.append(self)
            signal.raise_signal(INTERRUPT)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    return processes


def wait_for_half_a_minute(folder):
    return children.run(["sleep", "30"], 60, os.environ, str(folder))


def test_an_interrupt_while_a_command_starts_ends_the_command_too(started, tmp_path):
    handler = signal.getsignal(INTERRUPT)
    with pytest.raises(KeyboardInterrupt):
        wait_for_half_a_minute(tmp_path)
    assert [process.returncode for process in started] == [-signal.SIGKILL]
    assert signal.getsignal(INTERRUPT) is handler


def test_a_programs_own_handler_is_called_and_decides(started, tmp_path):
    called = []
    before = signal.signal(INTERRUPT, lambda number, _: called.append((number, len(started))))
    try:
        assert children.run(["echo", "done"], 60, os.environ, str(tmp_path)).stdout == "done\n"
    finally:
        signal.signal(INTERRUPT, before)
    assert called == [(INTERRUPT, 1)]


def test_an_interrupt_is_not_lost_where_a_command_cannot_be_started(monkeypatch, tmp_path):
    def fail(*args, **options):
        signal.raise_signal(INTERRUPT)
        raise FileNotFoundError(args[0][0])

    monkeypatch.setattr(subprocess, "Popen", fail)
    with pytest.raises(KeyboardInterrupt):
        wait_for_half_a_minute(tmp_path)


def test_the_handler_is_put_back_even_if_that_of_another_signal_raises_meanwhile(monkeypatch, tmp_path):
    """`signal.signal` first runs the handlers of signals that have come."""
    before, put, given = signal.getsignal(INTERRUPT), signal.signal, []

    def put_and_raise(number, handler):
        given.append(handler)
        if len(given) == 2:
            raise TimeoutError
        return put(number, handler)

    monkeypatch.setattr(signal, "signal", put_and_raise)
    with pytest.raises(TimeoutError):
        children.run(["sleep", "30"], 60, os.environ, str(tmp_path))
    assert signal.getsignal(INTERRUPT) is before
    assert given[1:] == [before, before]


def test_where_interrupts_are_ignored_or_in_another_thread_nothing_is_kept_back(monkeypatch, tmp_path):
    def fail(*given):
        raise AssertionError(given)

    run = functools.partial(children.run, ["echo", "done"], 60, os.environ, str(tmp_path))
    with ThreadPoolExecutor(1) as threads, monkeypatch.context() as patched:
        patched.setattr(signal, "signal", fail)
        assert threads.submit(run).result().stdout == "done\n"
        patched.setattr(signal, "getsignal", lambda number: signal.SIG_IGN)
        assert run().stdout == "done\n"
