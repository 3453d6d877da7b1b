"""Promises of what a program's log says of the compiled part: each thing once."""

import os
import sys

import pytest
from support.processes import forked

from attnreg.core.torchlib import background, building, locks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="attnreg compiles on Linux only")

PROGRAM = """
import logging, sys, torch
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(levelname)s %(message)s")
import attnreg
q = torch.randn(1, 2, 8, 16)
with attnreg.register_backend("cpu"):
    torch.nn.functional.scaled_dot_product_attention(q, q, q)
assert attnreg.stats().calls == {"cpu": {"forward": 1, "backward": 0}}
"""


def logged(before="", **variables):
    """Return the lines of a program that registers a backend and makes one call, which has to run."""
    done = forked(before + PROGRAM, **variables)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@pytest.fixture
def built(cache, copying, compiler, untried):
    """Return the files of both libraries, in the order of `LIBRARIES`."""
    compiler.does(copying)
    return [building.build(library) for library in building.LIBRARIES]


def test_each_library_that_is_used_is_one_line(built):
    assert logged() == [
        f"INFO repeated calls use the compiled call cache, {built[0]}",
        f"INFO the cpu backend uses the compiled kernel, {built[1]}",
    ]


@pytest.mark.skipif(os.getuid() != 0, reason="giving files to another user takes root")
@pytest.mark.parametrize("mode", ["background", pytest.param("now", marks=pytest.mark.slow), "off"])
def test_a_cache_of_another_user_is_one_line(built, cache, mode):
    (cache / "build").mkdir(exist_ok=True)
    for place in (cache, *cache.rglob("*")):
        os.chown(place, 65534, 65534)
    problem = f"{cache} belongs to another user (id 65534)"
    assert logged(ATTNREG_BUILD=mode) == [f"WARNING attnreg runs without its compiled part: {problem}"]
    rows = [building.status(library) for library in building.LIBRARIES]
    assert rows == [("built, not used", file, problem) for file in built]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["background", "off"])
def test_the_library_that_alone_is_not_used_is_named(built, mode):
    for number, used in enumerate(("repeated calls use the compiled call cache", "the cpu backend uses the")):
        other = built[1 - number].parent
        other.chmod(0o777)
        use, problem = logged(ATTNREG_BUILD=mode)
        assert use.startswith(f"INFO {used}")
        title = building.LIBRARIES[1 - number].title
        reason = f"others may write to {other} (mode 777; `chmod go-w` ends that)"
        assert problem == f"WARNING attnreg runs without {title}: {reason}"
        other.chmod(0o700)


INSTALL = "install one, or set ATTNREG_BUILD=off to silence this"


@pytest.mark.slow
def test_damage_is_said_in_the_line_about_compiling_again(built, compiler, usual_priority):
    reasons = [f"{file} is damaged, and `attnreg build` compiles it again" for file in built]
    for file in built:
        os.truncate(file, 8192)
    (line,) = logged(ATTNREG_BUILD="background", CXX="none")
    reason = f"there is no C++ compiler, looked for CXX=none: {INSTALL}"
    assert line == f"WARNING attnreg runs without its compiled part: {'; '.join([*reasons, reason])}"
    compiler.does("exit 1")
    (line,) = logged(usual_priority, ATTNREG_BUILD="background")
    assert line.startswith("WARNING compiling the call cache and the CPU kernel in the background, ")
    assert line.endswith(f"ATTNREG_BUILD=off forbids it; {'; '.join(reasons)}")
    locks.release(locks.lock_file(background.lock_path(), wait=True))  # the process that compiles has ended


def test_a_missing_compiler_is_one_warning(cache, copying, compiler, untried):
    reason = f"there is no C++ compiler, looked for CXX=none: {INSTALL}"
    problem = f"WARNING attnreg runs without its compiled part: {reason}"
    assert logged(ATTNREG_BUILD="background", CXX="none") == [problem]
    assert logged(ATTNREG_BUILD="off", CXX="none") == []
    compiler.does(copying)
    for library in building.LIBRARIES:
        building.build(library)
    assert not any(line.startswith("WARNING") for line in logged(ATTNREG_BUILD="background", CXX="none"))


PROCESS = """
import torch
import torch.nn.functional as F
q = torch.randn(1, 2, 8, 16)
F.scaled_dot_product_attention(q, q, q)
import attnreg
print(attnreg.stats().calls)
"""


def test_a_program_with_libraries_that_are_cut_off_runs_without_them(cache, copying, compiler, untried):
    compiler.does(copying)
    for library in building.LIBRARIES:
        os.truncate(building.build(library), 8192)
    done = forked(PROCESS, ATTNREG_BACKEND="cpu", ATTNREG_BUILD="off")
    assert (done.returncode, done.stdout) == (0, "{'cpu': {'forward': 1, 'backward': 0}}\n")
    (line,) = done.stderr.splitlines()
    assert line.startswith("attnreg runs without its compiled part: ") and line.count("is damaged") == 2
