"""A kernel as the hub has them, for a GPU: flash-attn's functions by torch's own kernels of flash-attn."""

import torch

from attnreg.core.torchlib import captured

# Not torch's ops: attnreg's routers, which lie over them, would bring the calls back here.
_forward = captured.kernel("_flash_attention_forward", "CUDA")
_backward = captured.kernel("_flash_attention_backward", "CUDA")


def flash_attn_func(
    q,
    k,
    v,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    deterministic=False,
    return_attn_probs=False,
):
    lengths = None, None, q.shape[1], k.shape[1]
    return _run(q, k, v, lengths, softmax_scale, causal, window_size)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    deterministic=False,
    return_attn_probs=False,
):
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return _run(q, k, v, lengths, softmax_scale, causal, window_size)


def _flash_attn_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, causal, window_size, deterministic
):
    lengths = None, None, q.shape[1], k.shape[1]
    _differentiate(
        (dout, q, k, v, out, softmax_lse), (dq, dk, dv), lengths, softmax_scale, causal, window_size
    )


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
    softmax_scale,
    causal,
    window_size,
    deterministic,
):
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    _differentiate(
        (dout, q, k, v, out, softmax_lse), (dq, dk, dv), lengths, softmax_scale, causal, window_size
    )


def _sides(causal, window_size):
    left, right = window_size
    return (
        {} if (left, right) in ((-1, -1), (-1, 0)) else {"window_size_left": left, "window_size_right": right}
    )


def _run(q, k, v, lengths, scale, causal, window_size):
    out, lse, *_ = _forward(q, k, v, *lengths, 0.0, causal, False, scale=scale, **_sides(causal, window_size))
    return out, lse, None


def _differentiate(tensors, grads, lengths, scale, causal, window_size):
    unused = tensors[0].new_empty(2, dtype=torch.uint64)
    results = _backward(
        *tensors, *lengths, 0.0, causal, unused, unused[0], scale=scale, **_sides(causal, window_size)
    )
    for grad, result in zip(grads, results, strict=True):
        grad.copy_(result)
