"""Promises of the pytest plugin: a test for each check, in a run of somebody else's."""

import re

import pytest
from support.processes import forked

from attnreg.testing import Conformance

PYTEST = "import runpy; runpy.run_module('pytest', run_name='__main__', alter_sys=True)"
RUN = (PYTEST, "-q", "-p", "no:cacheprovider", "-p", "attnreg.testing.plugin")


@pytest.mark.slow
def test_a_named_backend_adds_a_test_for_each_check(tmp_path):
    run = forked(
        *RUN, "--attnreg-backend=cpu", "--attnreg-device=cpu", "-rs", "-k", "sinks or bhsd", cwd=tmp_path
    )
    assert run.returncode == 0, run.stdout + run.stderr
    refused = [check for check in Conformance("cpu", "cpu").checks if check.case.counts_sinks]
    count = sum("sinks" in str(check) for check in refused)
    assert count and re.search(rf"\n\d+ passed, {count} skipped, \d+ deselected", run.stdout)
    assert "sinks must be None, got a tensor" in run.stdout


def test_what_is_wrong_fails_with_the_line_that_repeats_it(tmp_path):
    (tmp_path / "conftest.py").write_text(
        "import attnreg\n"
        "from attnreg.backends.math import BACKEND, EVERYTHING, forward\n"
        "def halves(q, k, v, call):\n"
        "    out, lse = forward(q, k, v, call._replace(scale=0.125))\n"
        "    return out, lse\n"
        "attnreg.register_backend(attnreg.Backend(\n"
        "    name='halves', forward=EVERYTHING, load=lambda: attnreg.Kernels(halves)))\n"
    )
    run = forked(*RUN, "--attnreg-backend=halves", "-k", "scale and 0.3 or dim and 64", cwd=tmp_path)
    assert run.returncode == 1, run.stdout + run.stderr
    assert "cases=['scale 0.3 bfloat16'])" in run.stdout
    assert "cases=['dim 64" not in run.stdout


def test_a_name_that_no_backend_has_is_a_usage_error_in_words(tmp_path):
    run = forked(*RUN, "--attnreg-backend=mth", cwd=tmp_path)
    assert run.returncode == 4, run.stdout + run.stderr
    said = run.stdout + run.stderr
    assert "ERROR: --attnreg-backend=mth: " in said and "did you mean 'math'" in said
    assert "INTERNALERROR" not in said
