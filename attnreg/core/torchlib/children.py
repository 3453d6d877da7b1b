"""Runs a command, and ends all its processes with it: a compiler is a tree of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping


def run(
    command: list[str], seconds: float, environment: Mapping[str, str], folder: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, and return its exit status and output.

    If the time is over, or this process is interrupted, all processes of the command are killed. Raises
    `subprocess.TimeoutExpired`, and OSError if the command can't be started.
    """
    with _interrupts_kept_back() as let_through, subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        errors="replace", env=environment, cwd=folder, process_group=0,
    ) as process:  # fmt: skip
        try:
            let_through()
            output, errors = process.communicate(timeout=seconds)
        except BaseException:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


@contextlib.contextmanager
def _interrupts_kept_back() -> Iterator[Callable[[], None]]:
    """Keep Ctrl-C back, at most until the function that this yields is called, or the block ends.

    An interrupt in the middle of `Popen` would leave a process that nobody knows and nobody kills. Only the
    main thread is interrupted, and only it may set a handler. Handlers of C code can't be set back.
    """
    before = signal.getsignal(signal.SIGINT)
    kept: list[int] = []
    is_kept_back = threading.current_thread() is threading.main_thread() and callable(before)

    def let_through() -> None:
        nonlocal is_kept_back
        if is_kept_back:
            signal.signal(signal.SIGINT, before)  # first runs the handlers of other signals, which may raise
            is_kept_back = False
            if kept:
                signal.raise_signal(signal.SIGINT)

    try:
        if is_kept_back:
            signal.signal(signal.SIGINT, lambda number, _: kept.append(number))
        yield let_through
    finally:
        try:
            let_through()
        finally:
            let_through()  # if another handler has raised
