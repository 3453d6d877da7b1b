"""Aten's cuDNN ops: dense (B, H, S, D), and packed (T, H, D).

On Hopper and Blackwell torch prefers the cuDNN op below `F.scaled_dot_product_attention`, which calls the
dense op here. From torch 2.15 on, `varlen_attn` calls the varlen ops. A causal mask of these ops is aligned
top-left.
"""

from __future__ import annotations

from typing import Any

import torch

from attnreg.core.aten import routing
from attnreg.core.aten.routing import OpLayout, Route, RoutedCall, RouterResult
from attnreg.core.aten.schemas import CudnnBackward, CudnnForward, CudnnForwardInplace
from attnreg.core.contract.backend import Call
from attnreg.core.dispatch.call_cache import kept_dense
from attnreg.core.dispatch.calls import (
    packed_bounds,
    plan_for,
    scale_of,
    to_bshd,
    wants_batch_invariant,
    wants_deterministic,
    wants_gradient,
)
from attnreg.core.dispatch.dropout import forward_choice, run_forward_kernel
from attnreg.core.dispatch.planning import Native
from attnreg.core.dispatch.state import Plan
from attnreg.core.launching.launchers import MAX_K, MAX_Q
from attnreg.core.torchlib import versions
from attnreg.core.torchlib.layout import with_strides

CUDNN = Native("cuDNN", positive_scale=True, kernel="torch's cudnn_attention kernel")
OP = "_cudnn_attention"

TOKEN = 7  # the result that carries a choice: the offset of the random state


def _forward(arguments: CudnnForward, routed: RoutedCall) -> RouterResult:
    if arguments.cum_seq_q is None:
        return _dense_forward(arguments, routed)
    if arguments.return_debug_mask or arguments.attn_bias is not None or _is_top_left(arguments):
        return routed.untouched("a packed call with a debug mask, a bias or a mask aligned top-left")
    query, key, value, dropout = arguments.query, arguments.key, arguments.value, arguments.dropout_p
    call = _packed_call(arguments, dropout, seqused_k=arguments.seqused_k, block_table=arguments.block_table)
    needs_backward = wants_gradient(query, key, value)
    how = call, routed.choice, routed.native, needs_backward
    plan = plan_for("forward", query, key, value, *how, declined=routed.declined)
    choice = forward_choice(routed.choice, plan, dropout, _no_gradient(arguments))
    if plan.is_native:
        result, kept = routed.run_native(plan, call, keeps=choice is routed.choice)
        return routing.with_choice(result, TOKEN, choice), kept
    # Only where torch's own kernel doesn't run: both draw from the same generator.
    out, lse, seed = run_forward_kernel(plan, query, key, value, call)
    seed = query.new_empty(2, dtype=torch.uint64) if seed is None else seed
    lse = lse.t().contiguous().unsqueeze(-1) if versions.CUDNN_LSE_IS_TOKEN_MAJOR else lse.contiguous()
    offset = query.new_empty((), dtype=torch.uint64)
    lengths = arguments.cum_seq_q, arguments.cum_seq_k, arguments.max_q, arguments.max_k
    return routing.with_choice((out, lse, *lengths, seed, offset, None), TOKEN, choice), None


def _forward_inplace(arguments: CudnnForwardInplace, routed: RoutedCall) -> RouterResult:
    if _is_top_left(arguments):
        return routed.untouched("a packed call with a mask aligned top-left")
    inputs = arguments.query, arguments.key, arguments.value
    call = _packed_call(arguments, seqused_k=arguments.seqused_k, block_table=arguments.block_table)
    plan = plan_for("forward", *inputs, call, routed.choice, routed.native, False, declined=routed.declined)
    if plan.is_native:
        return routed.run_native(plan, call, keeps=False)
    out, lse = plan.run(*inputs, call)
    arguments.out.copy_(out)
    return lse.contiguous(), None


def _dense_forward(arguments: CudnnForward, routed: RoutedCall) -> RouterResult:
    if arguments.seqused_k is not None or arguments.block_table is not None:
        return routed.untouched("seqused_k or block_table of a dense call")
    if arguments.return_debug_mask:
        return routed.untouched("return_debug_mask")
    query, key, dropout = arguments.query, arguments.key, arguments.dropout_p
    call = routing.call_of(arguments, arguments.attn_bias)
    plan = routing.dense_plan("forward", arguments, routed, call, routed.choice)
    choice = forward_choice(routed.choice, plan, dropout)
    if plan.is_native:
        result, kept = routed.run_native(plan, call, keeps=choice is routed.choice)
        return routing.with_choice(result, TOKEN, choice), kept
    tensors, kept = to_bshd(query, key, arguments.value, call), None
    out, lse, rng_state = run_forward_kernel(plan, *tensors, call)
    if rng_state is not None:
        seed, offset = (word.clone() for word in rng_state.view(torch.int64))
    else:
        seed, offset = query.new_empty((), dtype=torch.int64), query.new_empty((), dtype=torch.int64)
        # With another head dim of the value only Python knows the output's strides.
        is_square = arguments.value.shape[-1] == query.shape[-1]
        if is_square and call.max_k == key.shape[2]:
            kept = kept_dense(plan, tensors, call, _auxiliary())
    lengths = query.shape[2], key.shape[2]
    lse = lse.contiguous().unsqueeze(-1)
    out = routing.with_dims_ordered_as(query, out.transpose(1, 2))
    return routing.with_choice((out, lse, None, None, *lengths, seed, offset, None), TOKEN, choice), kept


def _auxiliary() -> tuple[Any, ...]:
    """Return models of the results after output and LSE: offsets, lengths, seed and offset, debug mask."""
    word = torch.empty((), dtype=torch.int64, device="meta")
    return None, None, MAX_Q, MAX_K, word, word, None


def _backward(arguments: CudnnBackward, routed: RoutedCall) -> RouterResult:
    if arguments.cum_seq_q is None:
        return _dense_backward(arguments, routed)
    if arguments.attn_bias is not None or _is_top_left(arguments):
        return routed.untouched("a packed call with a bias or a mask aligned top-left")
    dropout = arguments.dropout_p
    rng_state = arguments.philox_seed if dropout > 0.0 else None
    call = _packed_call(arguments, dropout, rng_state=rng_state, deterministic=wants_deterministic())
    inputs = arguments.query, arguments.key, arguments.value
    choice = routing.backward_choice(routed, dropout)
    plan = plan_for("backward", *inputs, call, choice, routed.native, declined=routed.declined)
    if plan.is_native:
        return _native_backward(arguments, routed, plan, call)
    lse = arguments.logsumexp.squeeze(-1).t() if arguments.logsumexp.dim() == 3 else arguments.logsumexp
    return plan.run(arguments.grad_out, *inputs, arguments.out, lse, call), None


def _dense_backward(arguments: CudnnBackward, routed: RoutedCall) -> RouterResult:
    dropout, rng_state = arguments.dropout_p, None
    if dropout > 0.0:
        rng_state = torch.stack((arguments.philox_seed, arguments.philox_offset)).view(torch.uint64)
    call = routing.call_of(arguments, arguments.attn_bias, rng_state)
    plan = routing.dense_plan("backward", arguments, routed, call, routing.backward_choice(routed, dropout))
    if plan.is_native:
        return _native_backward(arguments, routed, plan, call)
    grads, kept = routing.run_backward(plan, arguments, call, arguments.logsumexp.squeeze(-1))
    models = arguments.query, arguments.key, arguments.value
    pairs = zip(grads, models, strict=True)
    return tuple(routing.with_strides_of(grad.transpose(1, 2), x) for grad, x in pairs), kept


def _native_backward(arguments: CudnnBackward, routed: RoutedCall, plan: Plan, call: Call) -> RouterResult:
    # Torch 2.11 caches its graphs by the strides of query, key and value, but not of the gradient. It would
    # read a gradient wrongly whose layout differs from an earlier call's.
    grad_out = with_strides(arguments.grad_out, arguments.out.stride())
    keeps = arguments.dropout_p == 0.0 and grad_out is arguments.grad_out
    return routed._replace(args=(grad_out, *routed.args[1:])).run_native(plan, call, keeps)


def _packed_call(
    arguments: CudnnForward | CudnnForwardInplace | CudnnBackward, dropout: float = 0.0, **rest: Any
) -> Call:
    scale, max_q, max_k = scale_of(arguments.query, arguments.scale), arguments.max_q, arguments.max_k
    window = packed_bounds((-1, -1), arguments.is_causal, max_q, max_k)
    options = {"dropout": dropout, "batch_invariant": wants_batch_invariant(), **rest}
    return routing.with_lasting_offsets(
        Call(scale, max_q, max_k, window, arguments.cum_seq_q, arguments.cum_seq_k, **options)
    )


def _is_top_left(arguments: CudnnForward | CudnnForwardInplace | CudnnBackward) -> bool:
    """Whether this op's causal mask differs from the contract's, which is aligned bottom-right."""
    return arguments.is_causal and arguments.cum_seq_q is not arguments.cum_seq_k


def _no_gradient(arguments: CudnnForward) -> str:
    """Return why aten's backward of this call would compute wrong gradients, or an empty string."""
    dropped = arguments.seqused_k is not None or arguments.block_table is not None
    if not dropped or not wants_gradient(arguments.query, arguments.key, arguments.value):
        return ""
    return (
        "seqused_k or block_table: aten::_cudnn_attention_backward receives neither, so its gradients "
        "would be wrong; call attnreg.varlen_attn, whose backward does"
    )


_FORWARD = OpLayout(query=0, token_result=TOKEN, bhsd=True, lse_ends_in_one=True)
_BACKWARD = OpLayout(query=1, token_argument=7, bhsd=True, lse_ends_in_one=True)
_INPLACE = OP + "_forward_no_dropout_inplace"

ROUTES = (
    Route(OP + "_forward", ("CUDA",), CudnnForward, _forward, CUDNN, _FORWARD),
    Route(OP + "_backward", ("CUDA",), CudnnBackward, _backward, CUDNN, _BACKWARD, token="philox_offset"),
    Route(
        _INPLACE, ("CUDA",), CudnnForwardInplace, _forward_inplace, CUDNN, OpLayout(query=1), since=(2, 15)
    ),
)
