"""Ends the processes that this process has started when it is told to end itself.

A compiler is a tree of processes. Killing the first leaves the others, which write to a folder that nobody
removes any more.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import NoReturn

# Signals that end a process at once, so that nothing of Python's runs. Ctrl-C raises KeyboardInterrupt.
ENDING = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGQUIT", "SIGXCPU") if hasattr(signal, name)
)


class Terminated(BaseException):
    """A signal has told this process to end; raised where `clean_up_at_signals` waits for it."""


@contextlib.contextmanager
def clean_up_at_signals() -> Iterator[None]:
    """Leave the block by an exception where a signal would end the process; then end by that signal.

    Leaves signals alone that the program handles or ignores. Does nothing in other threads than the main one,
    which can't handle signals.
    """
    received: list[int] = []

    def leave(number: int, _: FrameType | None) -> NoReturn:
        received.append(number)
        for other in handled:
            signal.signal(other, signal.SIG_IGN)  # a second signal mustn't interrupt the cleaning up
        raise Terminated

    is_main = threading.current_thread() is threading.main_thread()
    handled = [number for number in ENDING if is_main and signal.getsignal(number) is signal.SIG_DFL]
    try:
        for number in handled:
            signal.signal(number, leave)
        yield
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)
        if received:
            os.kill(os.getpid(), received[0])


def run(
    command: list[str], seconds: float, environment: Mapping[str, str], folder: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, and return its exit status and output.

    If the time is over, or this process is interrupted, all processes of the command are killed. Raises
    `subprocess.TimeoutExpired`, and OSError if the command can't be started.
    """
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        errors="replace", env=environment, cwd=folder, process_group=0,
    ) as process:  # fmt: skip
        try:
            output, errors = process.communicate(timeout=seconds)
        except BaseException:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)
