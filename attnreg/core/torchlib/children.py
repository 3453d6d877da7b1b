"""Runs a command, and ends all its processes with it: a compiler is a tree of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping


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
