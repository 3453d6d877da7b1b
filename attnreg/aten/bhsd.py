"""What the ops with tensors of (B, H, S, D) share: those below scaled_dot_product_attention.

Torch's selector has chosen the op, so torch's own kernel comes first in the default order and its call is
passed on unchanged; only another backend's call is brought into the contract's layout.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from attnreg.aten.routing import RoutedCall, kept_dense
from attnreg.contract.backend import Call
from attnreg.contract.spec import Direction
from attnreg.dispatch.call_cache import Kept
from attnreg.dispatch.calls import bounds, plan_for, scale_of, to_bshd, wants_deterministic, wants_gradient
from attnreg.dispatch.scope import ScopedChoice
from attnreg.dispatch.state import Plan


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
    # By place, as every planned call comes here: names cost half a microsecond.
    return Call(
        scale_of(query, given.scale), length_q, length_k, bounds(window, False, length_q, length_k),
        None, None, None, None, bias, None, given.dropout_p, rng_state, None, wants_deterministic(),
    )  # fmt: skip


def dense_plan(
    direction: Direction, given: Any, routed: RoutedCall, call: Call, choice: ScopedChoice | None
) -> Plan:
    """Return the plan of a (B, H, S, D) call."""
    query, key, value = given.query, given.key, given.value
    needs_backward = direction == "backward" or wants_gradient(query, key, value)
    return plan_for(direction, query, key, value, call, choice, routed.native, needs_backward, bhsd=True)


def run_backward(plan: Plan, given: Any, call: Call, lse: Tensor) -> tuple[tuple[Tensor, ...], Kept | None]:
    """Run a backend's backward of a (B, H, S, D) call, and count it.

    Returns:
        The gradients in the contract's layout, and how the call cache is to run further calls like this one.
    """
    length_k = given.key.shape[2]
    inputs = to_bshd(given.query, given.key, given.value, call)
    tensors = given.grad_out.transpose(1, 2), *inputs, given.out.transpose(1, 2), lse
    grad_q, grad_k, grad_v = plan.run(*tensors, call)
    kept = kept_dense(plan, call, length_k, tensors)
    if unseen := length_k - grad_k.shape[1]:  # keys that a top-left causal mask hides from every query
        grad_k, grad_v = (F.pad(grad, (0, 0, 0, 0, 0, unseen)) for grad in (grad_k, grad_v))
    return (grad_q, grad_k, grad_v), kept
