"""Promises of commands that attnreg runs: none of their processes outlives an interrupt."""

import os
import signal
import subprocess

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
