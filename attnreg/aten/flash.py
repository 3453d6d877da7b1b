"""Aten's flash ops, dense (B, S, H, D) and varlen (T, H, D): the contract's own layout.

On CUDA torch's own kernel for them is FlashAttention 2. On CPU torch has none, so that with attnreg
`torch.nn.attention.varlen.varlen_attn` works there, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attnreg import scope
from attnreg.aten.routing import Route, Turn, like, new_rng_state, passed_on, tied
from attnreg.aten.schemas import FlashBackward, FlashForward, FlashForwardInplace
from attnreg.backend import Call
from attnreg.dispatch import bounds, prepare, scale_of, wants_deterministic, wants_gradient
from attnreg.planning import Native

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ROUTES"]

FA2 = Native("FA2", judged=True)

# aten's backward receives none of these, so its gradients would be those of another function.
FORWARD_ONLY = ("seqused_k", "block_table", "alibi_slopes")


def _forward(asked: FlashForward, turn: Turn) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    if asked.return_debug_mask:
        return turn.untouched("return_debug_mask")  # type: ignore[no-any-return]
    query, device, dropout = asked.query, asked.query.device, asked.dropout_p
    call = _call(
        asked,
        seqused_k=asked.seqused_k,
        block_table=asked.block_table,
        alibi_slopes=asked.alibi_slopes,
        num_splits=asked.num_splits,
        rng_state=new_rng_state(device) if dropout > 0.0 else None,
    )
    plan = prepare("forward", query, asked.key, asked.value, call, turn.pin, turn.native)
    result = turn.run(plan, lambda: plan.kernel(query, asked.key, asked.value, call))
    pin = passed_on(turn.pin, plan, dropout, _no_gradient(asked))
    if plan.original:
        out, lse, rng_state, unused, debug_mask = result
        return out, lse, rng_state, unused if pin is None else scope.stamp(pin, device), debug_mask
    out, lse = result
    rng_state = call.rng_state
    if rng_state is None:
        rng_state = torch.empty(2, dtype=torch.uint64, device=device)
    lse = lse.float() if turn.torch is None else _swap_infinity(lse, -torch.inf)
    return like(out, query), lse, rng_state, scope.stamp(pin, device), query.new_empty(0)


def _forward_inplace(asked: FlashForwardInplace, turn: Turn) -> Tensor:
    # Torch's kernel for this op has other results than the one `_forward` would call for it.
    out, lse, *_ = _forward(FlashForward(*asked[1:]), Turn(turn.op, None, None, turn.pin))
    asked.out.copy_(out)
    return lse


def _backward(asked: FlashBackward, turn: Turn) -> tuple[Tensor, ...]:
    call = _call(
        asked,
        rng_state=asked.rng_state if asked.dropout_p > 0.0 else None,
        deterministic=wants_deterministic(),
    )
    inputs = (asked.query, asked.key, asked.value)
    plan = prepare("backward", *inputs, call, tied(turn, asked.dropout_p), turn.native)

    def kernel() -> Any:
        lse = asked.logsumexp if turn.torch is None else _swap_infinity(asked.logsumexp, torch.inf)
        return plan.kernel(asked.grad_out, *inputs, asked.out, lse, call)

    grads = turn.run(plan, kernel)
    return tuple(like(grad, tensor) for grad, tensor in zip(grads, inputs, strict=True))


def _call(asked: FlashForward | FlashBackward, **rest: Any) -> Call:
    dense = asked.cum_seq_q is None
    max_q, max_k = (asked.query.shape[1], asked.key.shape[1]) if dense else (asked.max_q, asked.max_k)
    left, right = asked.window_size_left, asked.window_size_right
    window = (-1 if left is None else left, -1 if right is None else right)
    return Call(
        scale_of(asked.query, asked.scale),
        max_q,
        max_k,
        bounds(window, asked.is_causal, max_q, max_k),
        asked.cum_seq_q,
        asked.cum_seq_k,
        dropout=asked.dropout_p,
        **rest,
    )


def _no_gradient(asked: FlashForward) -> str:
    """Return why aten's backward of this call would be wrong, or an empty string."""
    dropped = [name for name in FORWARD_ONLY if getattr(asked, name) is not None]
    if not dropped or not wants_gradient(asked.query, asked.key, asked.value):
        return ""
    return (
        f"{' and '.join(dropped)}: aten::_flash_attention_backward doesn't receive it, so its gradients "
        "would be wrong; call attnreg.varlen_attn, whose backward does"
    )


def _swap_infinity(lse: Tensor, sign: float) -> Tensor:
    """Turn the LSE of rows without a key between the contract's -inf and the +inf of torch's kernel."""
    return torch.where(lse == sign, -sign, lse)


_KEYS = ("CPU", "CUDA")

ROUTES = (
    Route("_flash_attention_forward", _KEYS, FlashForward, _forward, FA2),
    Route("_flash_attention_backward", _KEYS, FlashBackward, _backward, FA2, "unused"),
    Route(
        "_flash_attention_forward_no_dropout_inplace",
        _KEYS,
        FlashForwardInplace,
        _forward_inplace,
        FA2,
        since="2.12",
    ),
)
