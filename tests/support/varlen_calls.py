"""Calls of `varlen_attn` whose results are compared with float64."""

import torch
from support import truth

import attnreg

LENGTHS = (2, 4)


def attend(inputs, window=(-1, -1), **options):
    return attnreg.varlen_attn(*inputs, window_size=window, **options)


def assert_right(inputs, window=(-1, -1), dtype=None, **options):
    """Call `varlen_attn`, forward and backward, and compare all results with float64."""
    *leaves, cu_q, cu_k = inputs[:5]
    out, lse = attend(inputs, window, return_aux=attnreg.AuxRequest(lse=True), **options)
    generator = torch.Generator().manual_seed(5)
    grad = torch.randn(out.shape, generator=generator).to(out.dtype)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    right, right_lse = truth.varlen(*exact, cu_q, cu_k, window=window, scale=options.get("scale"))
    got, wanted = torch.autograd.grad(out, leaves, grad), torch.autograd.grad(right, exact, grad.double())
    for one, other in zip((out, *got), (right, *wanted), strict=True):
        truth.assert_near(one, other, dtype)
    assert lse.is_contiguous()
    truth.assert_near(lse, right_lse, dtype or torch.float32)
