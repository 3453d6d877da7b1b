"""Processes that tests start: what their environment is, and what they print."""

import os
import subprocess
import sys


def environment(**variables):
    """Return the variables of a process: of attnreg's own only these, and nothing is compiled."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("ATTNREG_")}
    return others | {"ATTNREG_BUILD": "off"} | variables


def python(*arguments, cwd=None, **variables):
    """Run Python in a process of its own, on one core, so that a fork finds no OpenMP threads."""
    return subprocess.run(
        [sys.executable, *arguments], env=environment(**{"OMP_NUM_THREADS": "1"} | variables), cwd=cwd,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
