"""What the tests of the cpu backend share: cases, and what kernels return for them."""

import torch

from attnreg.tools.measure import Case
from attnreg.tools.measure.inputs import inputs

CAUSAL, OPEN = (-1, 0), (-1, -1)


def ragged(lengths, lengths_k=None, **options):
    lengths_k = lengths if lengths_k is None else lengths_k
    return Case(name="ragged", lens_q=tuple(lengths), lens_k=tuple(lengths_k), varlen=True, **options)


def dense(batch, len_q, len_k=None, **options):
    len_k = len_q if len_k is None else len_k
    return Case(name="dense", lens_q=(len_q,) * batch, lens_k=(len_k,) * batch, **options)


def solved(kernels, q, k, v, grad_out, call):
    """Return the output, the LSE and the gradients."""
    out, lse = kernels.forward(q, k, v, call)
    return (out, lse, *kernels.backward(grad_out, q, k, v, out, lse, call))


def assert_gradients_are_the_same_with_any_threads(kernels, case):
    given = inputs(case)
    out, lse = kernels.forward(*given[:3], given.call)
    found = []
    for threads in (1, 2, 7, 64):
        torch.set_num_threads(threads)
        found.append(kernels.backward(given.grad_out, *given[:3], out, lse, given.call))
    for each in found[1:]:
        assert_same(each, found[0])


def assert_same(found, expected, tolerance=0.0):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)


def contiguous(tensors):
    return [x.clone(memory_format=torch.contiguous_format) for x in tensors]


def refuse(*arguments):
    raise AssertionError("not to be called")
