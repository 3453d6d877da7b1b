"""Attention with sinks by its formula, and results of `varlen_attn` held to it by the accuracy rule."""

import itertools

import torch
from support.dense import random_like

from attnreg.backends import math as math_backend
from attnreg.core.adaptation.sinks import grad_of_sinks
from attnreg.core.contract.backend import Call, Kernels
from attnreg.core.varlen.sinks import with_sinks
from attnreg.tools.measure.rule import compare


def by_the_formula(
    query,
    key,
    value,
    cu_seqlens_q,
    cu_seqlens_k,
    sinks,
    causal=False,
    softcap=0.0,
    dtype=torch.float64,
    window=(-1, -1),
):
    """Return output and LSE of a softmax over the scores and the sink, sequence by sequence, in a dtype."""
    query, key, value, sinks = (x.to(dtype) for x in (query, key, value, sinks))
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    outs, lses = [], []
    pairs = zip(*(itertools.pairwise(x.tolist()) for x in (cu_seqlens_q, cu_seqlens_k)), strict=True)
    for (q0, q1), (k0, k1) in pairs:
        scores = torch.einsum("qhd,khd->hqk", query[q0:q1], key[k0:k1]) * query.shape[-1] ** -0.5
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        left, right = (-1, 0) if causal else window
        rows, columns = (torch.arange(x, device=query.device) for x in (q1 - q0, k1 - k0))
        later = columns - rows[:, None] - (k1 - k0) + (q1 - q0)  # than the key in line with the row
        hidden = (later > right) & (right >= 0) | (later < -left) & (left >= 0)
        scores = scores.masked_fill(hidden, -torch.inf)
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, q1 - q0, 1)), -1)
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :-1], value[k0:k1]))
        seen = (scores[..., :-1] > -torch.inf).any(-1)
        lses.append(scores.logsumexp(-1).masked_fill(~seen, -torch.inf))
    return torch.cat(outs), torch.cat(lses, 1)


def assert_accurate(attend, inputs, *rest, causal=False, window=(-1, -1)):
    """Hold output, LSE and all gradients to the accuracy rule.

    Args:
        attend: from query, key, value, sinks and `rest` to output and LSE, which may be None.
        inputs: query, key, value and sinks, which need gradients.
        rest: both offsets, and whatever else `attend` takes.
        causal, window: which keys are hidden.
    """

    def results(attend, dtype, *rest):
        leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in inputs]
        out, lse = attend(*leaves, *rest)
        return [out.detach(), lse, *torch.autograd.grad(out, leaves, grad.to(out.dtype))]

    def formula(query, key, value, sinks, *offsets):
        options = {"dtype": query.dtype, "window": window}
        return by_the_formula(query, key, value, *offsets, sinks, causal, **options)

    query, _, value, _ = inputs
    grad = random_like(query.new_empty((*query.shape[:2], value.shape[-1]))).to(query.device)
    got = results(attend, None, *rest)
    truth, plain = (results(formula, dtype, *rest[:2]) for dtype in (torch.float64, query.dtype))
    for name, *three in zip(("out", "lse", "dq", "dk", "dv", "dsinks"), got, plain, truth, strict=True):
        if three[0] is None:
            continue
        error = compare([x.detach() for x in three[:1]], *(x.detach() for x in three[1:]), query.dtype)
        assert error.passed, f"{name}: {error}"


class _ByKernels(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, sinks, kernels, call):
        results = with_sinks(*kernels.forward(query, key, value, call), sinks)
        ctx.save_for_backward(query, key, value, *results, sinks)
        ctx.kernels, ctx.call = kernels, call
        ctx.mark_non_differentiable(results[1])
        return results

    @staticmethod
    def backward(ctx, grad, _):
        *tensors, sinks = ctx.saved_tensors
        of_sinks = grad_of_sinks(grad, tensors[3:], sinks, None)
        return *ctx.kernels.backward(grad, *tensors, ctx.call), of_sinks, None, None


def assert_kernels_are_accurate(kernels, dtype=torch.bfloat16, lens_q=(9, 0, 1, 30), lens_k=(20, 3, 1, 30)):
    """Hold a backend's own forward and backward to the rule, with sinks; some rows may see no key."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(lens_q), 4, 64), (sum(lens_k), 2, 64), (sum(lens_k), 2, 64), (4,)]
    given = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    offsets = [torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (lens_q, lens_k)]
    call = Call(64**-0.5, max(lens_q), max(lens_k), (-1, 0), *offsets)

    def attend(query, key, value, sinks, *_):
        return _ByKernels.apply(query, key, value, sinks, kernels, call)

    assert_accurate(attend, given, *offsets, causal=True)


class Counting:
    """Kernels that count sinks themselves, in float64; `seen` says of each call since whether it had some.

    A row without a key would be wrong, as it is with kernels that know nothing else of such a row.
    """

    def __init__(self):
        self.calls, self.problem = [], None

    def backend(self, fake, **limits):
        kernels = Kernels(self.forward, self.backward)
        return fake("counting", load=lambda: kernels, **{"sinks": True, **limits}).backend

    def seen(self):
        calls, self.calls = self.calls, []
        return calls

    def _noted(self, call):
        if call.sinks is not None and self.problem is not None:
            raise self.problem
        self.calls.append("rescaled" if call.sinks is None else "given")

    def forward(self, query, key, value, call):
        self._noted(call)
        run = math_backend.BACKEND.load().forward
        if call.sinks is None:
            return run(query, key, value, call)
        out, lse = run(query.double(), key.double(), value.double(), call)
        total = torch.logaddexp(lse, call.sinks.double()[:, None])
        return (out * (lse - total).exp().mT[..., None]).to(query.dtype), total.float()

    def backward(self, grad, query, key, value, out, lse, call):
        self._noted(call)
        run = math_backend.BACKEND.load().backward
        if call.sinks is None:
            return run(grad, query, key, value, out, lse, call)
        wide = [x.double() for x in (grad, query, key, value, out, lse)]
        weights = (call.sinks.double()[:, None] - wide[5]).exp()
        of_sinks = -(weights * (wide[0] * wide[4]).sum(-1).mT).sum(-1)
        inputs = query, key, value, call.sinks
        return tuple(x.to(y.dtype) for x, y in zip((*run(*wide, call), of_sinks), inputs, strict=True))
