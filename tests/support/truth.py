"""The float64 reference for dense and packed tensors, with autograd: what the tests compare results with."""

import torch

from attnreg.tools.measure import measure
from attnreg.tools.measure.reference import attend


def attention(
    query, key, value, *, window=(-1, -1), scale=None, softcap=0.0, bias=None, slopes=None, top_left=False
):
    """Return output (S_q, H, D_v) and LSE (H, S_q) of one sequence; a window is aligned bottom-right."""
    out, lse = attend(
        *(query[None], key[None], value[None], query.shape[-1] ** -0.5 if scale is None else scale, window),
        bias=bias,
        softcap=softcap,
        alibi_slopes=slopes,
        len_q=len(key) if top_left else None,
    )
    return out[0], lse[0]


def dense(query, key, value, bias=None, **options):
    """Return output (B, H, S_q, D_v) and LSE (B, H, S_q) of tensors (B, H, S, D)."""
    rows = []
    for index in range(query.shape[0]):
        each = (x[index].double().transpose(0, 1) for x in (query, key, value))
        part = None if bias is None else bias.expand(*query.shape[:3], key.shape[2])[index]
        rows.append(attention(*each, bias=part, **options))
    return torch.stack([out.transpose(0, 1) for out, _ in rows]), torch.stack([lse for _, lse in rows])


def varlen(query, key, value, cu_seqlens_q, cu_seqlens_k, *, used=None, slopes=None, **options):
    """Return output (T, H, D_v) and LSE (H, T) of packed tensors; rows of no sequence are 0 and -inf."""
    query, key, value = (x.double() for x in (query, key, value))
    # A sum of nothing is 0 and has a gradient, 0 as well: there may be no sequence to give one.
    out = query.new_zeros(*query.shape[:2], value.shape[-1]) + sum(x[:0].sum() for x in (query, key, value))
    lse = query.new_full((query.shape[1], query.shape[0]), -torch.inf)
    starts, ends = (
        (cu_seqlens_q.tolist(), cu_seqlens_k.tolist()),
        (cu_seqlens_q[1:].tolist(), cu_seqlens_k[1:].tolist()),
    )
    for index, (q0, k0, q1, k1) in enumerate(zip(*starts, *ends, strict=False)):
        stop = k1 if used is None else k0 + int(used[index])
        if q0 == q1 or k0 == stop:
            continue
        options["slopes"] = slopes if slopes is None or slopes.dim() == 1 else slopes[index]
        part, part_lse = attention(query[q0:q1], key[k0:stop], value[k0:stop], **options)
        out = torch.cat((out[:q0], part, out[q1:]))
        lse = torch.cat((lse[:, :q0], part_lse, lse[:, q1:]), dim=1)
    return out, lse


def of_call(query, key, value, grad, call):
    """Return output, LSE and gradients of a kernel's call, on the CPU, in the shapes of the kernel's."""
    leaves = [x.detach().cpu().double().requires_grad_() for x in (query, key, value)]
    options = {"window": call.window, "scale": call.scale, "softcap": call.softcap}
    with torch.enable_grad():
        if call.varlen:
            out, lse = varlen(*leaves, call.cu_seqlens_q.cpu(), call.cu_seqlens_k.cpu(), **options)
        else:
            out, lse = dense(*(x.transpose(1, 2) for x in leaves), **options)
            out = out.transpose(1, 2)
        return out, lse, *torch.autograd.grad(out, leaves, grad.cpu().double())


# How far from float64 a result may be: relative to itself, and in units of its largest element.
TOLERANCES = {
    torch.float64: (1e-7, 1e-9),
    torch.float32: (1e-5, 5e-6),
    torch.float16: (2e-3, 2e-3),
    torch.bfloat16: (1.6e-2, 1.6e-2),
}


# For 16-bit inputs torch's CPU flash kernel takes whole vectors of keys (8 with AVX2, 16 with AVX-512)
# through an exp (`fexp_u20`) that is off by up to 1.066e-4 of itself, by its polynomial's coefficients. An
# LSE, as the log of a sum of exps, is then off by as much, absolutely. The accuracy rule allows ten times
# that and more: plain PyTorch rounds an LSE itself to 16 bits.
FAST_EXP = 1.07e-4


def assert_near(got, expected, dtype=None, beyond=0.0):
    """Check values and shape against float64.

    They are as precise as a dtype, that of `got` unless given, and may be off by `beyond` on top of that.
    """
    relative, absolute = TOLERANCES[dtype or got.dtype]
    expected = expected.detach()
    finite = expected[expected.isfinite()].abs()
    absolute *= max(1.0, float(finite.max()) if finite.numel() else 0.0)
    torch.testing.assert_close(
        got.detach().double(), expected, rtol=relative, atol=absolute + beyond, equal_nan=False
    )


def assert_accurate(kernels, case, seed=0):
    """Hold both directions of kernels to the accuracy rule on a case."""
    errors = measure(kernels, case, seed=seed)
    assert errors.keys() == {"out", "lse", "dq", "dk", "dv"} | ({"dbias"} if case.bias_gradient else set())
    assert {name: str(error) for name, error in errors.items() if not error.passed} == {}
