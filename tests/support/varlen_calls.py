"""Calls of `varlen_attn` whose results are compared with float64."""

from support import packed_calls, truth

import attnreg

LENGTHS = (2, 4)


def attend(inputs, window=(-1, -1), **options):
    return attnreg.varlen_attn(*inputs, window_size=window, **options)


def assert_right(inputs, window=(-1, -1), dtype=None, **options):
    """Call `varlen_attn`, forward and backward, and compare all results with float64."""
    expected = truth.varlen(*inputs[:5], window=window, scale=options.get("scale"))
    results = attend(inputs, window, return_aux=packed_calls.LSE, **options)
    packed_calls.assert_right(inputs[:3], results, expected, dtype)
