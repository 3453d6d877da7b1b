"""What the ops with heads before lengths, (B, H, S, D), share: those below scaled_dot_product_attention.

Torch's selector has chosen the op, so torch's own kernel leads the default order and its call is
passed on as it came; only another backend's call is brought into the contract's layout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F

from attnreg.contract.backend import Call
from attnreg.contract.validation import check, check_scale
from attnreg.dispatch.calls import bounds, scale_of, wants_deterministic, wants_gradient
from attnreg.dispatch.planning import Plan, make_plan, spec_of
from attnreg.dispatch.state import state

if TYPE_CHECKING:
    from torch import Tensor

    from attnreg.aten.routing import Turn
    from attnreg.contract.spec import Direction
    from attnreg.dispatch.scope import Pin

__all__ = ["Contract", "contract", "gradients", "plan_for"]


class Contract(NamedTuple):
    """A call in the contract's layout."""

    query: Tensor
    key: Tensor
    value: Tensor
    call: Call


def plan_for(
    direction: Direction, asked: Any, turn: Turn, pin: Pin | None, bias: Tensor | None, top_left: bool
) -> Plan:
    """Return the plan of a call; the way through a plan that is there already is short."""
    query, key, value = asked.query, asked.key, asked.value
    if asked.scale is not None:
        check_scale(asked.scale)
    now = state()
    needs_backward = direction == "backward" or wants_gradient(query, key, value)
    look_up = (
        turn.op, direction, needs_backward, pin, wants_deterministic(),
        query.is_cuda and torch.cuda.is_current_stream_capturing(),
        query.shape, key.shape, value.shape, query.dtype, key.dtype, value.dtype,
        query.device, key.device, value.device,
        asked.dropout_p, asked.is_causal, None if bias is None else bias.shape,
        asked.scale is None or asked.scale > 0.0,
    )  # fmt: skip
    found = now.plans.get(look_up)
    if found is None:
        inputs = contract(asked, bias, top_left, None)
        check(*inputs)
        leading = pin.preference if pin is not None else None
        spec = spec_of(*inputs, needs_backward)
        found = make_plan(now, look_up, spec, direction, turn.native, leading)
    return found


def contract(asked: Any, bias: Tensor | None, top_left: bool, rng_state: Tensor | None) -> Contract:
    """Bring a (B, H, S, D) call into the contract's layout.

    A causal mask that is aligned top-left is one of the contract's, too: of more keys than queries
    the last are seen by nobody, of more queries than keys the mask reaches further right.
    """
    query, key, value = asked.query.transpose(1, 2), asked.key.transpose(1, 2), asked.value.transpose(1, 2)
    lengths = query.shape[1], key.shape[1]
    window = (-1, 0) if asked.is_causal else (-1, -1)
    if top_left and asked.is_causal and lengths[0] < lengths[1]:
        key, value = key[:, : lengths[0]], value[:, : lengths[0]]
        bias = bias[..., : lengths[0]] if bias is not None and bias.shape[-1] > 1 else bias
        lengths = lengths[0], lengths[0]
    elif top_left and asked.is_causal:
        window = (-1, lengths[0] - lengths[1])
    call = Call(
        scale_of(query, asked.scale),
        *lengths,
        bounds(window, False, *lengths),
        attn_bias=bias,
        dropout=asked.dropout_p,
        rng_state=rng_state,
        deterministic=wants_deterministic(),
    )
    return Contract(query, key, value, call)


def gradients(plan: Plan, inputs: Contract, asked: Any, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Run a backend's backward and count it; returns the gradients in the contract's layout."""
    grad_q, grad_k, grad_v = plan.run(
        asked.grad_out.transpose(1, 2),
        inputs.query,
        inputs.key,
        inputs.value,
        asked.out.transpose(1, 2),
        lse,
        inputs.call,
    )
    unseen = asked.key.shape[2] - grad_k.shape[1]
    if unseen:  # keys that a top-left causal mask hides from every query
        grad_k, grad_v = (F.pad(grad, (0, 0, 0, 0, 0, unseen)) for grad in (grad_k, grad_v))
    return grad_q, grad_k, grad_v
