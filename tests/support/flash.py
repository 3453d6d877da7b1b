"""A backward as flash kernels compute it: from the output and the LSE that it is given, nothing else."""

import itertools

import torch
from support import one_sequence, ranks

import attnreg
from attnreg.backends import math as math_backend
from attnreg.core.contract.backend import Kernels

FORWARD = math_backend.BACKEND.load().forward


def kernels(seen=None):
    """Return a forward of `math` with that backward, which adds what it is given to a list."""

    def run(*given):
        if seen is not None:
            seen.append(given)
        return backward(*given)

    return Kernels(FORWARD, run)


def spread(method, cu_seq, **options):
    """Compare a call spread over ranks with float64, on a backend that has these kernels."""
    on = dict.fromkeys(("varlen", "gqa", "causal", "window", "delta_from_out"), True)
    dims = attnreg.Range(8, 256, 8)
    limits = attnreg.Capabilities(devices=("cpu",), dtypes=("float32", "bfloat16"), head_dim=dims, **on)
    backend = attnreg.Backend(name="flash-like", forward=limits, backward=limits, load=kernels)
    with attnreg.register_backend(backend):
        return ranks.compare(method, cu_seq, backend=backend.name, **options)


def backward(grad_out, query, key, value, out, lse, call):
    """Return the gradients of query, key and value; there is no dropout, bias or page."""
    assert call.grad_lse is None
    grads = [torch.zeros(x.shape, dtype=torch.float64) for x in (query, key, value)]
    for at_q, at_k, lse_of in _sequences(query, lse, call):
        q, k, v, grad = query[at_q], key[at_k], value[at_k], grad_out[at_q]
        bounds = (None if bound < 0 else bound for bound in call.window)
        mask = one_sequence.visible(len(q), len(k), *bounds)
        scores = one_sequence.scores(q, k, call.scale, mask, call.softcap)
        delta = (grad.double() * out[at_q].double()).sum(-1).T
        found = one_sequence.backward(scores, lse_of, delta, q, k, v, grad, call.scale, call.softcap)
        for whole, at, part in zip(grads, (at_q, at_k, at_k), found, strict=True):
            whole[at] = part
    return tuple(grad.to(x.dtype) for grad, x in zip(grads, (query, key, value), strict=True))


def _sequences(query, lse, call):
    """Yield for each sequence where its queries and keys are, and its LSE (H, S_q)."""
    if call.cu_seqlens_q is None:
        yield from ((number, number, lse[number]) for number in range(len(query)))
        return
    keys = call.cu_seqlens_k.tolist()
    ends = keys[1:] if call.seqused_k is None else [a + n for a, n in zip(keys, call.seqused_k, strict=False)]
    pairs = zip(itertools.pairwise(call.cu_seqlens_q.tolist()), keys, ends, strict=False)
    for (q0, q1), k0, k1 in pairs:
        yield slice(q0, q1), slice(k0, int(k1)), lse[:, q0:q1]
