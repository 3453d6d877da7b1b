"""Torch's efficient attention kernels faked on a CPU, and how tests call the ops.

The stand-ins compute in float64 and keep the rules of the real kernels: what a bias has to be like, an LSE
whose length is rounded up to 32 with +inf behind the last row and 0 for a row without a key, an output that
the backward takes for contiguous. Without an LSE, and with one key and value for all heads, a last block of
one query is wrong (pytorch#191937). Up to torch 2.13 all heads have a key of their own. Dropout is no more
than its seed and offset.
"""

import torch
from support import truth
from support.cuda_ops import NativeKernel, differentiated
from support.dense import CAUSAL, OPEN

from attnreg.core.torchlib import versions

SDPA = "_scaled_dot_product_efficient_attention"
FORWARD, BACKWARD = "_efficient_attention_forward", "_efficient_attention_backward"
SEED, OFFSET = 3, 4
MASKS = (
    {"window": OPEN},
    {"window": CAUSAL, "top_left": True},
    {"window": CAUSAL},
)


def call(inputs, bias=None, dropout=0.0, causal=False, scale=None, lse=True):
    """Call the op below scaled_dot_product_attention; returns all that it returns."""
    op = getattr(torch.ops.aten, SDPA)
    return op(*inputs, bias, lse, dropout, causal, scale=scale)


def varlen(inputs, cu_q, cu_k, max_q, max_k, mask=0, lse=True, **options):
    """Call aten's op on packed tensors (T, H, D)."""
    op = getattr(torch.ops.aten, FORWARD)
    packed = (x[None] for x in inputs)
    return op(*packed, None, cu_q, cu_k, max_q, max_k, 0.0, mask, lse, **options)


def rounded(length):
    return -(-length // 32) * 32


def _checked(query, key, bias):
    same = query.shape[2] == key.shape[2]
    assert same or versions.EFFICIENT_SHARES_HEADS, "the kernels take no fewer key heads"
    if bias is None:
        return
    assert bias.dtype == query.dtype
    assert bias.shape == (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    assert bias.stride(-1) == 1
    aligned = [bias.data_ptr(), *(stride * bias.element_size() for stride in bias.stride()[:-1])]
    assert all(number % 16 == 0 for number in aligned)


def _attend(query, key, value, bias, cu_q, cu_k, mask, scale):
    """Return output and LSE, as the reference has them, of (B, S, H, D) or (1, T, H, D)."""
    options = {**MASKS[mask], "scale": scale}
    if cu_q is not None:
        out, lse = truth.varlen(query[0], key[0], value[0], cu_q, cu_k, **options)
        return out[None], lse
    out, lse = truth.dense(*(x.transpose(1, 2) for x in (query, key, value)), bias, **options)
    return out.transpose(1, 2), lse


def _padded(lse, cu_q, max_q):
    """Return an LSE as the kernel lays it out."""
    rows = list(lse)
    if cu_q is not None:
        starts, ends = cu_q[:-1].tolist(), cu_q[1:].tolist()
        rows = [lse[:, start:end] for start, end in zip(starts, ends, strict=True)]
    found = torch.full((len(rows), lse.shape[0 if cu_q is not None else 1], rounded(max_q)), torch.inf)
    for one, row in zip(found, rows, strict=True):
        one[:, : row.shape[-1]] = row.masked_fill(row == -torch.inf, 0.0)
    return found


def _forward(
    query,
    key,
    value,
    bias,
    cu_q,
    cu_k,
    max_q,
    max_k,
    p,
    mask,
    with_lse=False,
    *,
    scale=None,
    seqlen_k=None,
    window_size=None,
):
    _checked(query, key, bias)
    out, lse = _attend(query, key, value, bias, cu_q, cu_k, mask, scale)
    max_q = query.shape[1] if max_q is None else max_q
    max_k = key.shape[1] if max_k is None else max_k
    if not with_lse and key.stride(2) == 0 == value.stride(2):
        for end in [query.shape[1]] if cu_q is None else cu_q[1:].tolist():
            out[:, end - 1] += 4.0
    lse = _padded(lse, cu_q, max_q) if with_lse else torch.empty(query.shape[0], query.shape[2], 0)
    return out.to(query.dtype).contiguous(), lse, torch.tensor(SEED), torch.tensor(OFFSET), max_q, max_k


def _backward(
    grad, query, key, value, bias, out, cu_q, cu_k, max_q, max_k, lse, p, seed, offset, mask, wants_bias, *,
    scale=None
):  # fmt: skip
    _checked(query, key, bias)
    assert lse.shape[-1] == rounded(query.shape[1] if cu_q is None else max_q), "LSE is not correctly aligned"
    assert out.is_contiguous()
    assert p == 0.0 or (int(seed), int(offset), seed.device.type) == (SEED, OFFSET, "cpu")
    own, right = _attend(query, key, value, bias, cu_q, cu_k, mask, scale)
    expected = _padded(right, cu_q, max_q)
    hidden = _padded(torch.where(right == -torch.inf, torch.inf, right), cu_q, max_q) == torch.inf
    assert not (lse == -torch.inf).any(), "exp(-inf - -inf) would be NaN"
    assert lse.shape == expected.shape
    if cu_q is None:  # The LSE makes the weights: with a sink counted they are smaller than the forward's.
        smaller = torch.exp(right - lse[..., : right.shape[-1]].double())
        grad = grad.double() * smaller.transpose(1, 2).unsqueeze(-1)
    else:
        torch.testing.assert_close(lse[~hidden].double(), expected[~hidden].double(), rtol=1e-4, atol=1e-4)
    tensors = (query, key, value) if bias is None else (query, key, value, bias)

    def attend(*leaves):
        return _attend(*leaves, *([None] if bias is None else []), cu_q, cu_k, mask, scale)

    # The kernel computes delta, the sum of output times gradient, from the output that it is given: what that
    # makes a difference is like a gradient of the LSE.
    difference = ((own - out.double()) * grad.double()).sum(-1)
    of_lse = difference.transpose(1, 2) if cu_q is None else difference[0].T
    of_lse = of_lse.masked_fill(right == -torch.inf, 0.0)
    grads = differentiated(grad, tensors, attend, of_lse)
    return *(x.contiguous() for x in grads[:3]), grads[3] if wants_bias else None


def native_kernels():
    """Return stand-ins for torch's own kernels."""
    return {FORWARD: NativeKernel(_forward), BACKWARD: NativeKernel(_backward)}


def sdpa_kernels():
    """Return kernels of the ops below scaled_dot_product_attention; as torch's, they call the routed ops."""
    ops = torch.ops.aten

    def forward(query, key, value, bias, lse, p=0.0, causal=False, *, scale=None):
        tensors = (x.transpose(1, 2) for x in (query, key, value))
        lengths = None, None, None, None
        out, *rest, _, _ = ops._efficient_attention_forward(
            *tensors, bias, *lengths, p, int(causal), lse, scale=scale
        )
        return out.transpose(1, 2), *rest

    def backward(grad, query, key, value, bias, out, lse, seed, offset, p, mask, causal=False, *, scale=None):
        bshd = [x.transpose(1, 2) for x in (grad, query, key, value)]
        lengths = None, None, query.shape[2], key.shape[2]
        *grads, of_bias = ops._efficient_attention_backward(
            *bshd,
            bias,
            out.transpose(1, 2),
            *lengths,
            lse,
            p,
            seed,
            offset,
            int(causal),
            mask[3],
            scale=scale,
        )
        return *(grad.transpose(1, 2) for grad in grads), of_bias

    return {SDPA: forward, f"{SDPA}_backward": backward}
