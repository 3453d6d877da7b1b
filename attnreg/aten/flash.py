"""Aten's flash ops, dense (B, S, H, D) and varlen (T, H, D): the contract's own layout.

On CUDA torch's own kernel for them is FlashAttention 2; the flash op below `F.scaled_dot_product_attention`
calls the dense one. On CPU torch has none, so that with attnreg `torch.nn.attention.varlen.varlen_attn`
works there, too.
"""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch

from attnreg.aten import express
from attnreg.aten.again import Layout, answer
from attnreg.aten.beside import flash_extras, shared
from attnreg.aten.routing import Quick, Route, Turn, drawn, like, passed_on, tied
from attnreg.aten.schemas import FlashBackward, FlashForward, FlashForwardInplace
from attnreg.contract.backend import Call
from attnreg.contract.offsets import facts
from attnreg.dispatch import scope
from attnreg.dispatch.calls import bounds, keys_used, prepare, scale_of, wants_deterministic, wants_gradient
from attnreg.dispatch.planning import Native
from attnreg.torchlib.layout import stream_of

if TYPE_CHECKING:
    from torch import Tensor

    from attnreg.dispatch.planning import Plan

__all__ = ["DENSE", "ROUTES"]

# Dense calls are those of torch's selector, which has judged them; packed ones come from anywhere.
FA2, DENSE = Native("FA2", judged=True), Native("FA2")

# aten's backward receives none of these, so its gradients would be those of another function.
FORWARD_ONLY = ("seqused_k", "block_table", "alibi_slopes")


def _forward(asked: FlashForward, turn: Turn) -> Any:
    if asked.return_debug_mask:
        return turn.untouched("return_debug_mask")
    query, key, value, dropout = asked.query, asked.key, asked.value, asked.dropout_p
    call = _call(asked, asked.seqused_k, asked.block_table, asked.alibi_slopes, None, asked.num_splits)
    native, needs_backward = _native(turn, call), wants_gradient(query, key, value)
    if asked.cum_seq_q is None:
        # The op above has transposed them, and what is transposed below autograd needs no gradient.
        needs_backward = torch.is_grad_enabled()
    plan = prepare("forward", query, key, value, call, turn.pin, native, needs_backward)
    pin = passed_on(turn.pin, plan, dropout, _no_gradient(asked))
    if plan.original:
        # What a dropout's forward tells its backward has to be written beside its results.
        out, lse, rng_state, unused, debug_mask = turn.torch(plan, alone=dropout == 0.0)
        return out, lse, rng_state, unused if pin is None else scope.restamp(unused, pin), debug_mask
    if dropout > 0.0:  # not before torch's own kernel has had its turn: it draws from the same generator
        out, lse, rng_state = drawn(plan, query, key, value, call)
    else:
        out, lse = plan.run(query, key, value, call)
        rng_state = query.new_empty(2, dtype=torch.uint64)
    _remember("forward", turn, plan, call)
    if turn.original is not None and not _every_row_sees_a_key(query, key, call):
        lse = _swap_infinity(lse, -torch.inf)
    lse = lse.float().contiguous()
    return _laid_out(out, query), lse, rng_state, scope.stamp(pin, query), query.new_empty(0)


def _laid_out(result: Tensor, model: Tensor) -> Tensor:
    """Return a result with the strides that torch's meta function gives it, for what is shaped like `model`.

    That of the op above a dense one is meant, which has the heads first. It matters only where several
    heads lie in one place.
    """
    if result.stride() == model.stride() or model.dim() == 3:
        return like(result, model)
    return like(result.transpose(1, 2), model.transpose(1, 2)).transpose(1, 2)


def _forward_inplace(asked: FlashForwardInplace, turn: Turn) -> Tensor:
    # The results of torch's kernel for this op aren't those that `_forward` expects of an original.
    out, lse, *_ = _forward(FlashForward(*asked[1:]), turn._replace(original=None, native=None))
    asked.out.copy_(out)
    return lse  # type: ignore[no-any-return]


def _backward(asked: FlashBackward, turn: Turn) -> tuple[Tensor, ...]:
    query, key, value, dropout = asked.query, asked.key, asked.value, asked.dropout_p
    call = _call(asked, None, None, None, asked.rng_state if dropout > 0.0 else None, None)
    plan = prepare("backward", query, key, value, call, tied(turn, dropout), _native(turn, call))
    if plan.original:
        return turn.torch(plan, alone=dropout == 0.0)  # type: ignore[no-any-return]
    lse = asked.logsumexp
    if turn.original is not None and not _every_row_sees_a_key(query, key, call):
        lse = _swap_infinity(lse, torch.inf)
    grads = plan.run(asked.grad_out, query, key, value, asked.out, lse, call)
    _remember("backward", turn, plan, call)
    return _laid_out(grads[0], query), _laid_out(grads[1], key), _laid_out(grads[2], value)


def _native(turn: Turn, call: Call) -> Native | None:
    """Return the backend that torch's kernel stands for in this call.

    With packed sequences it is as good as the FA2 backend for torch's own front only; attnreg's promises
    more of the rows past the last offset.
    """
    if call.alibi_slopes is not None:
        return None  # torch builds its kernels without
    if turn.native is None or call.cu_seqlens_q is not None:
        return turn.native if turn.pin is None else None
    return DENSE


def _remember(direction: str, turn: Turn, plan: Plan, call: Call) -> None:
    """Have further calls like this one go the shortest way."""
    if call.cu_seqlens_q is None:
        if _dense_sees(call) and call.dropout == 0.0 and turn.args[0].dtype != torch.float64:
            turn.again(plan, answer(plan, call, DENSE_FORWARD if direction == "forward" else DENSE_BACKWARD))
    elif turn.pin is scope.OWN and plan.proven and turn.now is not None:
        express.remember(direction, turn.args, turn.kwargs, plan, call, FA2.name, turn.now, turn.own)


def _forward_results(results: tuple[Tensor, Tensor], given: tuple[Any, ...]) -> tuple[Tensor, ...]:
    out, lse = results
    return _laid_out(out, given[0]), lse.contiguous(), *shared(flash_extras, given[0])


def _backward_results(grads: tuple[Tensor, ...], given: tuple[Any, ...]) -> tuple[Tensor, ...]:
    return tuple(map(_laid_out, grads, given[1:4]))


DENSE_FORWARD = Layout(0, itemgetter(slice(3)), _forward_results)
DENSE_BACKWARD = Layout(1, itemgetter(slice(6)), _backward_results)


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
        asked.dropout_p, rng_state, num_splits or None, wants_deterministic(),
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
        return _dense_sees(call) and call.seqused_k is None
    return query.is_cuda and facts(call, query.shape[0], key.shape[0], stream_of(query)).every_row_sees_a_key


def _dense_sees(call: Call) -> bool:
    """Whether every row of a dense call sees a key."""
    return call.max_k > 0 and (call.max_q <= call.max_k or call.window == (-1, -1))


_KEYS = ("CPU", "CUDA")

ROUTES = (
    Route(
        "_flash_attention_forward",
        _KEYS,
        FlashForward,
        _forward,
        FA2,
        quick=Quick(0, slice(5, 10), absent=(3, 4)),
        express=express.forward,
    ),
    Route(
        "_flash_attention_backward",
        _KEYS,
        FlashBackward,
        _backward,
        FA2,
        "unused",
        quick=Quick(1, slice(10, 12), 13, absent=(6, 7)),
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
