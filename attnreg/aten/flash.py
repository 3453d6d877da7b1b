"""Aten's flash ops, dense (B, S, H, D) and varlen (T, H, D): the contract's own layout.

On CUDA torch's own kernel for them is FlashAttention 2. On CPU torch has none, so that with attnreg
`torch.nn.attention.varlen.varlen_attn` works there, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attnreg import counters, scope
from attnreg.aten import express
from attnreg.aten.routing import Route, Turn, like, new_rng_state, passed_on, tied
from attnreg.aten.schemas import FlashBackward, FlashForward, FlashForwardInplace
from attnreg.backend import Call
from attnreg.dispatch import bounds, keys_used, prepare, scale_of, wants_deterministic, wants_gradient
from attnreg.packed import facts, stream_of
from attnreg.planning import Native

if TYPE_CHECKING:
    from torch import Tensor

    from attnreg.planning import Plan

__all__ = ["ROUTES"]

FA2 = Native("FA2", judged=True)

# aten's backward receives none of these, so its gradients would be those of another function.
FORWARD_ONLY = ("seqused_k", "block_table", "alibi_slopes")


def _forward(asked: FlashForward, turn: Turn) -> Any:
    if asked.return_debug_mask:
        return turn.untouched("return_debug_mask")
    query, key, value, dropout = asked.query, asked.key, asked.value, asked.dropout_p
    call = _call(
        asked, asked.seqused_k, asked.block_table, asked.alibi_slopes,
        new_rng_state(query.device) if dropout > 0.0 else None, asked.num_splits,
    )  # fmt: skip
    # Torch's kernel is as good as the FA2 backend for torch's own front; attnreg's promises more of the
    # rows past the last offset.
    native = turn.native if turn.pin is None else None
    plan = prepare("forward", query, key, value, call, turn.pin, native, wants_gradient(query, key, value))
    pin = passed_on(turn.pin, plan, dropout, _no_gradient(asked))
    if plan.original:
        out, lse, rng_state, unused, debug_mask = turn.torch(plan)
        return out, lse, rng_state, unused if pin is None else scope.stamp(pin, query), debug_mask
    out, lse = plan.kernel(query, key, value, call)
    counters.count(plan.counters)
    _remember("forward", turn, plan, call)
    rng_state = call.rng_state
    if rng_state is None:
        rng_state = query.new_empty(2, dtype=torch.uint64)
    if turn.original is not None and not _every_row_sees_a_key(query, key, call):
        lse = _swap_infinity(lse, -torch.inf)
    lse = lse.float().contiguous()
    return like(out, query), lse, rng_state, scope.stamp(pin, query), query.new_empty(0)


def _forward_inplace(asked: FlashForwardInplace, turn: Turn) -> Tensor:
    # The results of torch's kernel for this op aren't those that `_forward` expects of an original.
    out, lse, *_ = _forward(FlashForward(*asked[1:]), turn._replace(original=None, native=None))
    asked.out.copy_(out)
    return lse  # type: ignore[no-any-return]


def _backward(asked: FlashBackward, turn: Turn) -> tuple[Tensor, ...]:
    query, key, value, dropout = asked.query, asked.key, asked.value, asked.dropout_p
    call = _call(asked, None, None, None, asked.rng_state if dropout > 0.0 else None, None)
    native = turn.native if turn.pin is None else None
    plan = prepare("backward", query, key, value, call, tied(turn, dropout), native)
    if plan.original:
        return turn.torch(plan)  # type: ignore[no-any-return]
    lse = asked.logsumexp
    if turn.original is not None and not _every_row_sees_a_key(query, key, call):
        lse = _swap_infinity(lse, torch.inf)
    grads = plan.kernel(asked.grad_out, query, key, value, asked.out, lse, call)
    counters.count(plan.counters)
    _remember("backward", turn, plan, call)
    return like(grads[0], query), like(grads[1], key), like(grads[2], value)


def _remember(direction: str, turn: Turn, plan: Plan, call: Call) -> None:
    """Have further calls like this one go the shortest way."""
    if turn.pin is scope.OWN and plan.proven and turn.original is not None and turn.now is not None:
        express.remember(direction, turn.args, turn.kwargs, plan, call, FA2.name, turn.now)


def _call(
    asked: FlashForward | FlashBackward,
    seqused_k: Tensor | None,
    block_table: Tensor | None,
    alibi_slopes: Tensor | None,
    rng_state: Tensor | None,
    num_splits: int | None,
) -> Call:
    max_q, max_k, scale = asked.max_q, asked.max_k, asked.scale
    if asked.cum_seq_q is None:
        max_q, max_k = asked.query.shape[1], asked.key.shape[1]
    left, right = asked.window_size_left, asked.window_size_right
    window = (-1 if left is None else left, -1 if right is None else right)
    return Call(
        scale_of(asked.query, None) if scale is None else scale,
        max_q, max_k, bounds(window, asked.is_causal, max_q, max_k),
        asked.cum_seq_q, asked.cum_seq_k, keys_used(seqused_k, asked.cum_seq_k, block_table), block_table,
        None, alibi_slopes,
        asked.dropout_p, rng_state, num_splits, wants_deterministic(),
    )  # fmt: skip


def _no_gradient(asked: FlashForward) -> str:
    """Return why aten's backward of this call would be wrong, or an empty string."""
    if asked.seqused_k is None and asked.block_table is None and asked.alibi_slopes is None:
        return ""
    if not wants_gradient(asked.query, asked.key, asked.value):
        return ""
    dropped = [name for name in FORWARD_ONLY if getattr(asked, name) is not None]
    return (
        f"{' and '.join(dropped)}: aten::_flash_attention_backward doesn't receive it, so its gradients "
        "would be wrong; call attnreg.varlen_attn, whose backward does"
    )


def _swap_infinity(lse: Tensor, sign: float) -> Tensor:
    """Turn the LSE of rows without a key between the contract's -inf and the +inf of torch's kernel."""
    return torch.where(lse == sign, -sign, lse)


def _every_row_sees_a_key(query: Tensor, key: Tensor, call: Call) -> bool:
    """Whether that is known, so that no LSE is infinite."""
    if call.cu_seqlens_q is None:
        return call.max_q <= call.max_k and call.seqused_k is None
    return query.is_cuda and facts(call, query.shape[0], key.shape[0], stream_of(query)).covered


_KEYS = ("CPU", "CUDA")

ROUTES = (
    Route("_flash_attention_forward", _KEYS, FlashForward, _forward, FA2, express=express.forward),
    Route(
        "_flash_attention_backward",
        _KEYS,
        FlashBackward,
        _backward,
        FA2,
        "unused",
        express=express.backward,
    ),
    Route(
        "_flash_attention_forward_no_dropout_inplace",
        _KEYS,
        FlashForwardInplace,
        _forward_inplace,
        FA2,
        since="2.12",
    ),
)
