"""Fixtures of the tests of what attnreg compiles: an empty cache, and a compiler that is a script."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnreg.core.torchlib import background, building, libraries


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """Return a cache folder where nothing is compiled, for a process that has served no call yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(building, "built", lambda: libraries.find_file(building.CALL_CACHE))
    monkeypatch.setattr(background, "_considered", False)
    monkeypatch.setattr(background, "_waited", False)
    monkeypatch.setattr(background, "_kernel_is_required", False)
    building.target.cache_clear()
    yield tmp_path / "cache" / "attnreg"
    building.target.cache_clear()


@pytest.fixture
def untried(monkeypatch):
    """Don't try what is compiled in a process of its own, which takes seconds: other tests hold that."""
    start = libraries.python

    def python(script, *arguments):
        return ["true"] if script.startswith("name, file = ") else start(script, *arguments)

    monkeypatch.setattr(libraries, "python", python)


# Beside busy tests a process of low priority takes seconds. For tests that aren't about that.
USUAL_PRIORITY = """
from attnreg.core.torchlib import background
background.DETACHED = background.DETACHED.replace("os.nice(19)", "")
"""


@pytest.fixture
def usual_priority(monkeypatch):
    """Have the process that compiles get as much time as others; returns code that does that elsewhere."""
    assert "os.nice(19)" in background.DETACHED
    monkeypatch.setattr(background, "DETACHED", background.DETACHED.replace("os.nice(19)", ""))
    return USUAL_PRIORITY


class FakeCompiler:
    """A script that stands in for the compiler, and writes down how each run of it was started."""

    def __init__(self, folder):
        self.script, self.runs_file = folder / "fake-c++", folder / "runs"

    def does(self, *lines):
        """Have it run these lines, in which "$2" is the file to make."""
        # Fields of /proc: 4 is the parent, 6 the session, 19 the nice value.
        noted = '"$2 $(cut -d " " -f 6,19 /proc/$$/stat) $(readlink /proc/$$/fd/0)"'
        start = ("#!/bin/sh", 'while [ "$1" != -o ]; do shift; done', f"echo {noted} >> {self.runs_file}")
        self.script.write_text("\n".join([*start, *lines, ""]))
        self.script.chmod(0o755)

    def runs(self):
        """Return one line for each run: the output's name, the session, the nice value and stdin."""
        if not self.runs_file.exists():
            return []
        lines = [line.split() for line in self.runs_file.read_text().splitlines()]
        return [(Path(output).name, int(session), int(nice), stdin) for output, session, nice, stdin in lines]


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Return a compiler that fails until `does` says something else."""
    made = FakeCompiler(tmp_path)
    made.does("echo no such header >&2", "exit 1")
    monkeypatch.setenv("CXX", f"{made.script} --an-option")
    return made


@pytest.fixture
def copying(built_routers, built_cpu_kernel):
    """Return the line of a script that makes what was compiled before."""
    building.target.cache_clear()
    return f'case "$2" in *attnreg_cpu*) cp {built_cpu_kernel} "$2";; *) cp {built_routers} "$2";; esac'
