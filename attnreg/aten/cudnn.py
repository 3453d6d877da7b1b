"""Aten's cuDNN ops as they are called directly: dense (B, H, S, D), and varlen (T, H, D)."""

from __future__ import annotations

from typing import Any

import torch

from attnreg import counters, scope
from attnreg.aten.routing import Route, Turn, new_rng_state, passed_on, tied
from attnreg.aten.schemas import CudnnBackward, CudnnForward
from attnreg.aten.sdpa import CUDNN, cudnn_dense_backward, cudnn_dense_forward
from attnreg.backend import Call
from attnreg.dispatch import bounds, prepare, scale_of, wants_deterministic, wants_gradient

__all__ = ["ROUTES"]

# Up to torch 2.13 the varlen LSE of this op is token-major, (T, H, 1); from then on (H, T).
TOKEN_MAJOR_LSE = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14)


def _forward(asked: CudnnForward, turn: Turn) -> Any:
    if asked.cum_seq_q is None:
        if asked.seqused_k is not None or asked.block_table is not None:
            return turn.untouched("seqused_k or block_table of a dense call")
        return cudnn_dense_forward(asked, turn)
    if asked.return_debug_mask or asked.attn_bias is not None or _top_left(asked):
        return turn.untouched("a varlen call with a debug mask, a bias or a mask aligned top-left")
    query, dropout = asked.query, asked.dropout_p
    rng_state = new_rng_state(query.device) if dropout > 0.0 else None
    call = _call(asked, seqused_k=asked.seqused_k, block_table=asked.block_table, rng_state=rng_state)
    needs_backward = wants_gradient(query, asked.key, asked.value)
    plan = prepare("forward", query, asked.key, asked.value, call, turn.pin, turn.native, needs_backward)

    if plan.original:
        result = turn.torch(plan)
    else:
        out, lse = plan.kernel(query, asked.key, asked.value, call)
        counters.count(plan.counters)
        lse = lse.t().contiguous().unsqueeze(-1) if TOKEN_MAJOR_LSE else lse.contiguous()
        seed = rng_state if rng_state is not None else query.new_empty(2, dtype=torch.uint64)
        offset = query.new_empty((), dtype=torch.uint64)
        result = out, lse, asked.cum_seq_q, asked.cum_seq_k, asked.max_q, asked.max_k, seed, offset, None
    pin = passed_on(turn.pin, plan, dropout, _no_gradient(asked))
    if pin is None:
        return result
    offset = scope.stamp(pin, asked.query) if result[7] is None else scope.restamp(result[7], pin)
    return (*result[:7], offset, *result[8:])


def _backward(asked: CudnnBackward, turn: Turn) -> Any:
    if asked.cum_seq_q is None:
        return cudnn_dense_backward(asked, turn)
    if asked.attn_bias is not None or _top_left(asked):
        return turn.untouched("a varlen call with a bias or a mask aligned top-left")
    rng_state = asked.philox_seed if asked.dropout_p > 0.0 else None
    call = _call(asked, rng_state=rng_state, deterministic=wants_deterministic())
    inputs = (asked.query, asked.key, asked.value)
    plan = prepare("backward", *inputs, call, tied(turn, asked.dropout_p), turn.native)
    lse = asked.logsumexp.squeeze(-1).t() if asked.logsumexp.dim() == 3 else asked.logsumexp
    if plan.original:
        return turn.torch(plan)
    grads = plan.kernel(asked.grad_out, *inputs, asked.out, lse, call)
    counters.count(plan.counters)
    return grads


def _call(asked: CudnnForward | CudnnBackward, **rest: Any) -> Call:
    window = bounds((-1, -1), asked.is_causal, asked.max_q, asked.max_k)
    return Call(
        scale_of(asked.query, asked.scale),
        asked.max_q,
        asked.max_k,
        window,
        asked.cum_seq_q,
        asked.cum_seq_k,
        dropout=asked.dropout_p,
        **rest,
    )


def _top_left(asked: CudnnForward | CudnnBackward) -> bool:
    """Whether this op's causal mask differs from the contract's, which is aligned bottom-right."""
    return asked.is_causal and asked.cum_seq_q is not asked.cum_seq_k


def _no_gradient(asked: CudnnForward) -> str:
    if asked.seqused_k is None and asked.block_table is None:
        return ""
    if not wants_gradient(asked.query, asked.key, asked.value):
        return ""
    return (
        "seqused_k or block_table: aten::_cudnn_attention_backward receives neither, so its gradients "
        "would be wrong; call attnreg.varlen_attn, whose backward does"
    )


ROUTES = (
    Route("_cudnn_attention_forward", ("CUDA",), CudnnForward, _forward, CUDNN),
    Route("_cudnn_attention_backward", ("CUDA",), CudnnBackward, _backward, CUDNN, "philox_offset"),
)
