"""A kernel as the hub has them: flash-attn's functions, by torch's operations on a CPU.

Tests copy this file into the folder of a build variant. As flash-attn's kernels do, it gives +inf as the LSE
of a row without a key, and writes nothing past the last offset.
"""

import torch


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    deterministic=False,
    return_attn_probs=False,
):
    mask = softmax_scale, causal, *window_size, softcap
    results = [_forward(*sequence, *mask) for sequence in zip(q, k, v, strict=True)]
    out, lse = (torch.stack(each) for each in zip(*results, strict=True))
    return (out, lse, None) if return_attn_probs else out


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    deterministic=False,
    return_attn_probs=False,
):
    out, lse = torch.full_like(q, torch.nan), torch.full((q.shape[1], len(q)), torch.nan)
    mask = softmax_scale, causal, *window_size, softcap
    for a, b in _sequences(cu_seqlens_q, cu_seqlens_k):
        out[a], lse[:, a] = _forward(q[a], k[b], v[b], *mask)
    return (out, lse, None) if return_attn_probs else out


def _flash_attn_backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq,
    dk,
    dv,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left,
    window_size_right,
    softcap,
    deterministic,
    rng_state=None,
):
    mask = softmax_scale, causal, window_size_left, window_size_right, softcap
    for n in range(len(q)):
        grads = _backward(dout[n], q[n], k[n], v[n], out[n], softmax_lse[n], *mask)
        dq[n], dk[n], dv[n] = grads


def _flash_attn_varlen_backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq,
    dk,
    dv,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left,
    window_size_right,
    softcap,
    deterministic,
    rng_state=None,
):
    mask = softmax_scale, causal, window_size_left, window_size_right, softcap
    for a, b in _sequences(cu_seqlens_q, cu_seqlens_k):
        grads = _backward(dout[a], q[a], k[b], v[b], out[a], softmax_lse[:, a], *mask)
        dq[a], dk[b], dv[b] = grads


def _sequences(cu_seqlens_q, cu_seqlens_k):
    ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for a, b, c, d in zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False):
        yield slice(a, b), slice(c, d)


def _scores(q, k, scale, causal, left, right, softcap):
    """Return the masked scores (H, S_q, S_k), before and after the softcap."""
    raw = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = softcap * torch.tanh(raw / softcap) if softcap > 0.0 else raw
    row = torch.arange(len(q))[:, None] + len(k) - len(q)
    column = torch.arange(len(k))
    hidden = torch.zeros(len(q), len(k), dtype=torch.bool)
    if left >= 0:
        hidden |= column < row - left
    if causal or right >= 0:
        hidden |= column > row + (0 if causal else right)
    return scores.masked_fill(hidden, -torch.inf), scores


def _shared(x, heads):
    """Return keys or values in float32, once for each query head."""
    return x.float().repeat_interleave(heads // x.shape[1], 1)


def _forward(q, k, v, *mask):
    masked, _ = _scores(q.float(), _shared(k, q.shape[1]), *mask)
    lse = masked.logsumexp(-1)
    weights = (masked - lse[..., None]).exp().masked_fill(masked == -torch.inf, 0.0)
    out = torch.einsum("hqk,khd->qhd", weights, _shared(v, q.shape[1]))
    return out.to(q.dtype), lse.masked_fill(lse == -torch.inf, torch.inf)


def _backward(dout, q, k, v, out, lse, *mask):
    heads, scale, softcap = q.shape[1], mask[0], mask[-1]
    dout, key, value = dout.float(), _shared(k, heads), _shared(v, heads)
    masked, scores = _scores(q.float(), key, *mask)
    weights = (masked - lse[..., None]).exp().masked_fill(masked == -torch.inf, 0.0)
    delta = (dout * out.float()).sum(-1).T[..., None]
    grad = weights * (torch.einsum("qhd,khd->hqk", dout, value) - delta) * scale
    if softcap > 0.0:
        grad = grad * (1 - (scores / softcap) ** 2)
    grad_q = torch.einsum("hqk,khd->qhd", grad, key)
    grad_k = torch.einsum("hqk,qhd->khd", grad, q.float())
    grad_v = torch.einsum("hqk,qhd->khd", weights, dout)
    grads = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (grad_k, grad_v))
    return grad_q.to(q.dtype), *(x.to(q.dtype) for x in grads)
