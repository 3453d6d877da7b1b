"""Promises of what a program's log says of the compiled part: each thing once."""

import os
import sys

import pytest
from support.processes import forked

from attnreg.torchlib import building

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


def logged(**variables):
    """Return the lines of a program that registers a backend and makes one call, which has to run."""
    done = forked(PROGRAM, **variables)
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
    assert len(done.stderr.splitlines()) == 2 and done.stderr.count("is damaged") == 2
