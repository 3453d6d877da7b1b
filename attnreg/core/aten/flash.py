"""Aten's flash ops, dense (B, S, H, D) and packed (T, H, D): the contract's own layout.

On CUDA torch's own kernel of these ops is FlashAttention 2. The flash op below
`F.scaled_dot_product_attention` calls the dense op. On a CPU torch has no kernel of them, so that
`torch.nn.attention.varlen.varlen_attn` runs on a CPU only with attnreg.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnreg.core.aten import routing
from attnreg.core.aten.routing import OpLayout, Route, RoutedCall, RouterResult
from attnreg.core.aten.schemas import FlashBackward, FlashForward, FlashForwardInplace
from attnreg.core.contract.backend import Call
from attnreg.core.contract.lengths import Cut, cuts_of_window
from attnreg.core.contract.lengths import bounds as dense_bounds
from attnreg.core.dispatch import calls, scope
from attnreg.core.dispatch.call_cache import kept_dense
from attnreg.core.dispatch.calls import wants_gradient
from attnreg.core.dispatch.dropout import forward_choice, run_forward_kernel
from attnreg.core.dispatch.planning import Native
from attnreg.core.launching.offsets import every_row_sees_a_key
from attnreg.core.torchlib import versions

# Dense calls come from torch's selector, which has checked them; packed calls come from anywhere.
KERNEL = "torch's flash_attention kernel"
FA2, DENSE = Native("FA2", judged=True, kernel=KERNEL), Native("FA2", positive_scale=True, kernel=KERNEL)
OP = "_flash_attention"

# Arguments that aten's backward doesn't receive, so that its gradients would belong to another function.
FORWARD_ONLY = ("seqused_k", "block_table", "alibi_slopes")


def _forward(arguments: FlashForward, routed: RoutedCall) -> RouterResult:
    if arguments.return_debug_mask:
        return routed.untouched("return_debug_mask")
    query, key, value, dropout = arguments.query, arguments.key, arguments.value, arguments.dropout_p
    options = arguments.seqused_k, arguments.block_table, arguments.alibi_slopes
    call = _call(arguments, *options, None, arguments.num_splits)
    native, needs_backward = _native(routed, call), wants_gradient(query, key, value)
    if arguments.cum_seq_q is None:
        # The op above passes transposed tensors, made below autograd: their `requires_grad` is False.
        needs_backward = torch.is_grad_enabled()
    how = call, routed.choice, native, needs_backward
    plan = calls.plan_for("forward", query, key, value, *how, declined=routed.declined)
    choice = forward_choice(routed.choice, plan, dropout, _no_gradient(arguments))
    if plan.is_native:
        (*results, unused, debug_mask), kept = routed.run_native(
            plan, call, keeps=choice is routed.choice, cuts=_cuts_of_window(arguments)
        )
        token = unused if choice is None else scope.with_token(unused, choice)
        return (*results, token, debug_mask), kept
    # Not before torch's own kernel has had its turn: it draws from the same generator.
    out, lse, rng_state = run_forward_kernel(plan, query, key, value, call)
    rng_state = query.new_empty(2, dtype=torch.uint64) if rng_state is None else rng_state
    kept = None
    is_square = value.shape[-1] == query.shape[-1]  # else only Python knows the output's strides
    if call.cu_seqlens_q is None and choice is routed.choice and is_square:
        tensors, cuts = (query, key, value), _cuts_of_window(arguments)
        kept = kept_dense(plan, tensors, call, _auxiliary(query), cuts)
    if routed.original is not None and not every_row_sees_a_key(query, key, call):
        lse = _swap_infinity(lse, -torch.inf)
    lse = lse.float().contiguous()
    token = scope.choice_token(choice, query)
    return (_laid_out(out, query), lse, rng_state, token, query.new_empty(0)), kept


def _auxiliary(query: Tensor) -> tuple[Tensor, ...]:
    """Return models of the random state, the choice token and the debug mask."""
    state = torch.empty(2, dtype=torch.uint64, device="meta")
    return state, state[0], torch.empty(0, dtype=query.dtype, device="meta")


def _laid_out(result: Tensor, model: Tensor) -> Tensor:
    """Return a result with the strides that torch's meta function computes from `model`.

    For a dense call the meta function of the op above applies, whose tensors are (B, H, S, D). The difference
    matters only where several heads share memory. Tensors here are (B, S, H, D) or (T, H, D). An output may
    have another head dim than its model, the query.
    """
    if result.stride() == model.stride() or model.dim() == 3:
        return routing.with_strides_of(result, model)
    return routing.with_dims_ordered_as(model.transpose(1, 2), result.transpose(1, 2)).transpose(1, 2)


def _forward_inplace(arguments: Any, routed: RoutedCall) -> RouterResult:
    # Without the original: torch's kernel of this op returns other results than `_forward` expects.
    results, _ = _forward(FlashForward(*arguments[1:]), routed._replace(original=None, native=None))
    arguments.out.copy_(results[0])
    return results[1], None


def _backward(arguments: FlashBackward, routed: RoutedCall) -> RouterResult:
    query, key, value, dropout = arguments.query, arguments.key, arguments.value, arguments.dropout_p
    call = _call(arguments, None, None, None, arguments.rng_state if dropout > 0.0 else None, None)
    choice = routing.backward_choice(routed, dropout)
    how = call, choice, _native(routed, call)
    plan = calls.plan_for("backward", query, key, value, *how, declined=routed.declined)
    if plan.is_native:
        return routed.run_native(plan, call, keeps=dropout == 0.0, cuts=_cuts_of_window(arguments))
    lse = arguments.logsumexp
    if routed.original is not None and not every_row_sees_a_key(query, key, call):
        lse = _swap_infinity(lse, torch.inf)
    tensors = arguments.grad_out, query, key, value, arguments.out, lse
    grads = plan.run(*tensors, call)
    kept = None
    if call.cu_seqlens_q is None:
        kept = kept_dense(plan, tensors, call, cuts=_cuts_of_window(arguments))
    return (_laid_out(grads[0], query), _laid_out(grads[1], key), _laid_out(grads[2], value)), kept


def _native(routed: RoutedCall, call: Call) -> Native | None:
    """Return the backend that torch's kernel belongs to in this call; None if torch's kernel can't run it."""
    if call.alibi_slopes is not None:
        return None  # torch builds its kernels without ALiBi
    if routed.native is None or call.cu_seqlens_q is not None:
        return routed.native if routed.choice is None else None
    return dense_native()


def dense_native() -> Native:
    """Return the backend of torch's kernel in a dense call; judged if the selector goes by FA4's limits."""
    return FA2 if versions.selector_counts_on_fa4() else DENSE


def _call(
    arguments: FlashForward | FlashBackward,
    seqused_k: Tensor | None,
    block_table: Tensor | None,
    alibi_slopes: Tensor | None,
    rng_state: Tensor | None,
    num_splits: int | None,
) -> Call:
    max_q, max_k, bounds = arguments.max_q, arguments.max_k, calls.packed_bounds
    if arguments.cum_seq_q is None:
        bounds = dense_bounds
        max_q, max_k = arguments.query.shape[1], arguments.key.shape[1]
    left, right = arguments.window_size_left, arguments.window_size_right
    window = (-1 if left is None else left, -1 if right is None else right)
    call = Call(
        calls.scale_of(arguments.query, arguments.scale),
        max_q, max_k, bounds(window, arguments.is_causal, max_q, max_k),
        arguments.cum_seq_q, arguments.cum_seq_k, calls.keys_used(seqused_k, arguments.cum_seq_k,
        block_table), block_table, None, alibi_slopes, arguments.dropout_p, rng_state, num_splits or None,
        calls.wants_deterministic(), calls.wants_batch_invariant(),
    )  # fmt: skip
    return routing.with_lasting_offsets(call)


def _cuts_of_window(arguments: FlashForward | FlashBackward) -> tuple[Cut, ...]:
    """Return the lengths at which a bound of the op's window begins to hide keys."""
    bounds = arguments.window_size_left, 0 if arguments.is_causal else arguments.window_size_right
    return cuts_of_window(*(-1 if bound is None else bound for bound in bounds))


def _no_gradient(arguments: FlashForward) -> str:
    """Return why aten's backward of this call would compute wrong gradients, or an empty string."""
    dropped = [name for name in FORWARD_ONLY if getattr(arguments, name) is not None]
    if not dropped or not wants_gradient(arguments.query, arguments.key, arguments.value):
        return ""
    return (
        f"{' and '.join(dropped)}: aten::_flash_attention_backward doesn't receive it, so its gradients "
        "would be wrong; call attnreg.varlen_attn, whose backward does"
    )


def _swap_infinity(lse: Tensor, sign: float) -> Tensor:
    """Convert the LSE of rows without a key between the contract's -inf and the +inf of torch's kernel.

    `sign` is the infinity to replace.
    """
    return torch.where(lse == sign, -sign, lse)


_KEYS = ("CPU", "CUDA")
_FORWARD, _BACKWARD = OpLayout(query=0, token_result=3), OpLayout(query=1, token_argument=13)
_INPLACE = OP + "_forward_no_dropout_inplace"

ROUTES = (
    Route(OP + "_forward", _KEYS, FlashForward, _forward, FA2, _FORWARD),
    Route(OP + "_backward", _KEYS, FlashBackward, _backward, FA2, _BACKWARD, token="unused"),
    Route(_INPLACE, _KEYS, FlashForwardInplace, _forward_inplace, FA2, OpLayout(query=1), since=(2, 12)),
)
