"""The reference of a case, computed once for tests of the same values."""

from attnreg.tools.measure import reference

# The latest at the end, and how many bytes of them are kept in a process: those of a few hundred tests.
recent, sizes, MOST = {}, {}, 2**28


def attention(case, given, dtype, kept=None):
    """Compute the reference once for tests of the same values, which takes longer than kernels."""
    # The sum differs between seeds.
    name = case, dtype, given.q.device, float(given.q.double().nansum())
    if kept is not None:
        return reference.attention(case, given, dtype, kept)
    known = recent.pop(name, None)
    found = recent[name] = known or reference.attention(case, given, dtype)
    if known is None:
        sizes[name] = sum(x.nbytes for x in found if x is not None)
        while sum(sizes.values()) > MOST:
            del recent[oldest := next(iter(recent))], sizes[oldest]
    return found
