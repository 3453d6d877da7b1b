"""What the ops with tensors of (B, H, S, D) share: those below scaled_dot_product_attention.

Torch's selector has chosen the op, so torch's own kernel comes first in the default order and its call is
passed on unchanged; only another backend's call is brought into the contract's layout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch.nn.functional as F

from attnreg.contract.backend import Call
from attnreg.dispatch.call_cache import Kept, kept_for
from attnreg.dispatch.calls import (
    bounds,
    every_dense_row_sees_a_key,
    plan_for,
    scale_of,
    to_bshd,
    wants_deterministic,
    wants_gradient,
)

if TYPE_CHECKING:
    from torch import Tensor

    from attnreg.aten.routing import RoutedCall
    from attnreg.contract.spec import Direction
    from attnreg.dispatch.scope import ScopedChoice
    from attnreg.dispatch.state import Plan


class Inputs(NamedTuple):
    """The inputs of a call in the contract's layout."""

    query: Tensor
    key: Tensor
    value: Tensor
    call: Call


def call_of(given: Any, bias: Tensor | None, rng_state: Tensor | None = None) -> Call:
    """Return the contract's `Call` of the arguments of a (B, H, S, D) op.

    SDPA's causal mask is aligned top-left, the contract's bottom-right. Of more keys than queries the last
    are seen by no query, and `max_k` leaves them out; of more queries than keys the mask reaches further
    right.
    """
    query = given.query
    length_q, length_k = query.shape[2], given.key.shape[2]
    window = (-1, -1)
    if given.is_causal and length_q < length_k:
        length_k, window = length_q, (-1, 0)
        bias = bias[..., :length_k] if bias is not None and bias.shape[-1] > 1 else bias
    elif given.is_causal:
        window = (-1, length_q - length_k)
    return Call(
        scale_of(query, given.scale),
        length_q,
        length_k,
        bounds(window, False, length_q, length_k),
        attn_bias=bias,
        dropout=given.dropout_p,
        rng_state=rng_state,
        deterministic=wants_deterministic(),
    )


def inputs_of(given: Any, call: Call) -> Inputs:
    """Bring the tensors of a (B, H, S, D) call into the contract's layout."""
    return Inputs(*to_bshd(given.query, given.key, given.value, call), call)


def dense_plan(
    direction: Direction, given: Any, routed: RoutedCall, call: Call, choice: ScopedChoice | None
) -> Plan:
    """Return the plan of a (B, H, S, D) call."""
    query, key, value = given.query, given.key, given.value
    needs_backward = direction == "backward" or wants_gradient(query, key, value)
    return plan_for(direction, query, key, value, call, choice, routed.native, needs_backward, bhsd=True)


def gradients(plan: Plan, inputs: Inputs, given: Any, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Run a backend's backward and count it; returns the gradients in the contract's layout."""
    query, key, value, call = inputs
    grad_q, grad_k, grad_v = plan.run(
        given.grad_out.transpose(1, 2), query, key, value, given.out.transpose(1, 2), lse, call
    )
    unseen = given.key.shape[2] - grad_k.shape[1]
    if unseen:  # keys that a top-left causal mask hides from every query
        grad_k, grad_v = (F.pad(grad, (0, 0, 0, 0, 0, unseen)) for grad in (grad_k, grad_v))
    return grad_q, grad_k, grad_v


def kept_dense(
    plan: Plan, given: Any, call: Call, tensors: tuple[Tensor, ...], auxiliary: tuple[Any, ...] = ()
) -> Kept | None:
    """Return how the call cache is to run further calls like this one; see `kept_for`.

    None where it takes more than the kernel: keys that no query sees, rows that see no key.
    """
    if call.max_k != given.key.shape[2] or not every_dense_row_sees_a_key(call):
        return None
    return kept_for(plan, tensors, call, auxiliary)
