"""Aten's cuDNN ops: dense (B, H, S, D), and packed (T, H, D).

On Hopper and Blackwell torch prefers the cuDNN op below `F.scaled_dot_product_attention`, which calls the
dense one, and from 2.15 on the varlen ones below its `varlen_attn`. A causal mask of these ops is aligned
top-left.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnreg.core.aten import routing
from attnreg.core.aten.routing import Layout, Route, RoutedCall, RouterResult
from attnreg.core.aten.schemas import CudnnBackward, CudnnForward, CudnnForwardInplace
from attnreg.core.contract.backend import Call
from attnreg.core.dispatch.calls import (
    packed_bounds,
    scale_of,
    to_bshd,
    wants_batch_invariant,
    wants_deterministic,
    wants_gradient,
)
from attnreg.core.dispatch.dropout import forward_choice, run_with_dropout
from attnreg.core.dispatch.planning import Native
from attnreg.core.dispatch.state import Plan
from attnreg.core.launching.launchers import MAX_K, MAX_Q
from attnreg.core.torchlib.layout import with_strides

CUDNN = Native("cuDNN", positive_scale=True)
OP = "_cudnn_attention"

# Up to torch 2.13 the packed LSE of this op is token-major, (T, H, 1); from then on (H, T).
TOKEN_MAJOR_LSE = routing.TORCH_VERSION < (2, 14)

TOKEN = 7  # the result that carries a choice: the offset of the random state


def _forward(given: CudnnForward, routed: RoutedCall) -> RouterResult:
    if given.cum_seq_q is None:
        return _dense_forward(given, routed)
    if given.return_debug_mask or given.attn_bias is not None or _is_top_left(given):
        return routed.untouched("a packed call with a debug mask, a bias or a mask aligned top-left")
    query, key, value, dropout = given.query, given.key, given.value, given.dropout_p
    call = _packed_call(given, dropout, seqused_k=given.seqused_k, block_table=given.block_table)
    needs_backward = wants_gradient(query, key, value)
    plan = routed.plan_for("forward", (query, key, value), call, routed.choice, routed.native, needs_backward)
    choice = forward_choice(routed.choice, plan, dropout, _no_gradient(given))
    if plan.is_native:
        result, kept = routed.run_native(plan, call, keeps=choice is routed.choice)
        return routing.with_choice(result, TOKEN, choice), kept
    if dropout > 0.0:  # not before torch's own kernel has had its turn: it draws from the same generator
        out, lse, seed = run_with_dropout(plan, query, key, value, call)
    else:
        out, lse = plan.run(query, key, value, call)
        seed = query.new_empty(2, dtype=torch.uint64)
    lse = lse.t().contiguous().unsqueeze(-1) if TOKEN_MAJOR_LSE else lse.contiguous()
    offset = query.new_empty((), dtype=torch.uint64)
    result = out, lse, given.cum_seq_q, given.cum_seq_k, given.max_q, given.max_k, seed, offset, None
    return routing.with_choice(result, TOKEN, choice), None


def _forward_inplace(given: CudnnForwardInplace, routed: RoutedCall) -> RouterResult:
    if _is_top_left(given):
        return routed.untouched("a packed call with a mask aligned top-left")
    inputs = given.query, given.key, given.value
    call = _packed_call(given, seqused_k=given.seqused_k, block_table=given.block_table)
    plan = routed.plan_for("forward", inputs, call, routed.choice, routed.native, needs_backward=False)
    if plan.is_native:
        return routed.run_native(plan, call, keeps=False)
    out, lse = plan.run(*inputs, call)
    given.out.copy_(out)
    return lse.contiguous(), None


def _dense_forward(given: CudnnForward, routed: RoutedCall) -> RouterResult:
    if given.seqused_k is not None or given.block_table is not None:
        return routed.untouched("seqused_k or block_table of a dense call")
    if given.return_debug_mask:
        return routed.untouched("return_debug_mask")
    query, key, dropout = given.query, given.key, given.dropout_p
    call = routing.call_of(given, given.attn_bias)
    plan = routing.dense_plan("forward", given, routed, call, routed.choice)
    choice = forward_choice(routed.choice, plan, dropout)
    if plan.is_native:
        result, kept = routed.run_native(plan, call, keeps=choice is routed.choice)
        return routing.with_choice(result, TOKEN, choice), kept
    tensors, kept = to_bshd(query, key, given.value, call), None
    if dropout > 0.0:
        out, lse, rng_state = run_with_dropout(plan, *tensors, call)
        seed, offset = (word.clone() for word in rng_state.view(torch.int64))
    else:
        out, lse = plan.run(*tensors, call)
        seed, offset = query.new_empty((), dtype=torch.int64), query.new_empty((), dtype=torch.int64)
        if given.value.shape[-1] == query.shape[-1]:  # else only Python knows the output's strides
            kept = routing.kept_dense(plan, call, key.shape[2], tensors, _auxiliary())
    lengths = query.shape[2], key.shape[2]
    lse = lse.contiguous().unsqueeze(-1)
    result = _laid_out(out.transpose(1, 2), query), lse, None, None, *lengths, seed, offset, None
    return routing.with_choice(result, TOKEN, choice), kept


def _auxiliary() -> tuple[Any, ...]:
    """Return models of the results behind output and LSE: offsets, lengths, seed and offset, debug mask."""
    word = torch.empty((), dtype=torch.int64, device="meta")
    return None, None, MAX_Q, MAX_K, word, word, None


def _laid_out(out: Tensor, query: Tensor) -> Tensor:
    """Return the output with its dimensions in the query's order, as torch's own kernels lay it out."""
    if out.shape == query.shape:
        return routing.with_strides_of(out, query)
    order = sorted(range(4), key=query.stride().__getitem__, reverse=True)
    expected = torch.empty_permuted(out.shape, order, dtype=out.dtype, device=out.device)
    return out if out.stride() == expected.stride() else expected.copy_(out)


def _backward(given: CudnnBackward, routed: RoutedCall) -> RouterResult:
    if given.cum_seq_q is None:
        return _dense_backward(given, routed)
    if given.attn_bias is not None or _is_top_left(given):
        return routed.untouched("a packed call with a bias or a mask aligned top-left")
    dropout = given.dropout_p
    rng_state = given.philox_seed if dropout > 0.0 else None
    call = _packed_call(given, dropout, rng_state=rng_state, deterministic=wants_deterministic())
    inputs = given.query, given.key, given.value
    plan = routed.plan_for("backward", inputs, call, routing.backward_choice(routed, dropout), routed.native)
    if plan.is_native:
        return _native_backward(given, routed, plan, call)
    lse = given.logsumexp.squeeze(-1).t() if given.logsumexp.dim() == 3 else given.logsumexp
    return plan.run(given.grad_out, *inputs, given.out, lse, call), None


def _dense_backward(given: CudnnBackward, routed: RoutedCall) -> RouterResult:
    dropout, rng_state = given.dropout_p, None
    if dropout > 0.0:
        rng_state = torch.stack((given.philox_seed, given.philox_offset)).view(torch.uint64)
    call = routing.call_of(given, given.attn_bias, rng_state)
    plan = routing.dense_plan("backward", given, routed, call, routing.backward_choice(routed, dropout))
    if plan.is_native:
        return _native_backward(given, routed, plan, call)
    grads, kept = routing.run_backward(plan, given, call, given.logsumexp.squeeze(-1))
    models = given.query, given.key, given.value
    pairs = zip(grads, models, strict=True)
    return tuple(routing.with_strides_of(grad.transpose(1, 2), x) for grad, x in pairs), kept


def _native_backward(given: CudnnBackward, routed: RoutedCall, plan: Plan, call: Call) -> RouterResult:
    # Torch 2.11 keeps its graphs by the strides of query, key and value, without the gradient's: one laid out
    # otherwise than that of an earlier call would be read wrongly.
    grad_out = with_strides(given.grad_out, given.out.stride())
    keeps = given.dropout_p == 0.0 and grad_out is given.grad_out
    return routed._replace(args=(grad_out, *routed.args[1:])).run_native(plan, call, keeps)


def _packed_call(
    given: CudnnForward | CudnnForwardInplace | CudnnBackward, dropout: float = 0.0, **rest: Any
) -> Call:
    scale, max_q, max_k = scale_of(given.query, given.scale), given.max_q, given.max_k
    window = packed_bounds((-1, -1), given.is_causal, max_q, max_k)
    options = {"dropout": dropout, "batch_invariant": wants_batch_invariant(), **rest}
    return routing.with_lasting_offsets(
        Call(scale, max_q, max_k, window, given.cum_seq_q, given.cum_seq_k, **options)
    )


def _is_top_left(given: CudnnForward | CudnnForwardInplace | CudnnBackward) -> bool:
    """Whether this op's causal mask differs from the contract's, which is aligned bottom-right."""
    return given.is_causal and given.cum_seq_q is not given.cum_seq_k


def _no_gradient(given: CudnnForward) -> str:
    """Return why aten's backward of this call would be wrong, or an empty string."""
    dropped = given.seqused_k is not None or given.block_table is not None
    if not dropped or not wants_gradient(given.query, given.key, given.value):
        return ""
    return (
        "seqused_k or block_table: aten::_cudnn_attention_backward receives neither, so its gradients "
        "would be wrong; call attnreg.varlen_attn, whose backward does"
    )


_FORWARD = Layout(query=0, token_result=TOKEN, bhsd=True, lse_ends_in_one=True)
_BACKWARD = Layout(query=1, token_argument=7, bhsd=True, lse_ends_in_one=True)
_INPLACE = OP + "_forward_no_dropout_inplace"

ROUTES = (
    Route(OP + "_forward", ("CUDA",), CudnnForward, _forward, CUDNN, _FORWARD),
    Route(OP + "_backward", ("CUDA",), CudnnBackward, _backward, CUDNN, _BACKWARD, token="philox_offset"),
    Route(_INPLACE, ("CUDA",), CudnnForwardInplace, _forward_inplace, CUDNN, Layout(query=1), since=(2, 15)),
)
