"""Kernels, faked or of the CPU, run on one thread unless a test asks for more."""

import pytest

from attnreg.measure import reference, rule

# The latest at the end, and how many bytes of them are kept in a process: those of a few hundred tests.
recent, sizes, MOST = {}, {}, 2**28


def attention(case, given, dtype, kept=None):
    """Compute the reference once for tests of the same values, which takes longer than kernels."""
    name = case, dtype, float(given.q.double().nansum())  # the sum differs between seeds
    if kept is not None:
        return reference.attention(case, given, dtype, kept)
    known = recent.pop(name, None)
    found = recent[name] = known or reference.attention(case, given, dtype)
    if known is None:
        sizes[name] = sum(x.nbytes for x in found)
        while sum(sizes.values()) > MOST:
            del recent[oldest := next(iter(recent))], sizes[oldest]
    return found


@pytest.fixture(autouse=True)
def references_once(monkeypatch):
    monkeypatch.setattr(rule, "attention", attention)


@pytest.fixture(autouse=True)
def on_one_thread(one_thread):
    pass
