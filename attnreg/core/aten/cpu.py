"""The ops below `F.scaled_dot_product_attention` on CPU: (B, H, S, D), causal aligned top-left.

Torch's own kernel for them is what the `cpu` backend is built on. They have no random state, so the choice of
a scope travels in the LSE, and only where there is one.
"""

from __future__ import annotations

import torch

from attnreg.core.aten import routing
from attnreg.core.aten.routing import Layout, Route, RoutedCall, RouterResult
from attnreg.core.aten.schemas import SdpaCpuBackward, SdpaCpuForward
from attnreg.core.dispatch import scope
from attnreg.core.dispatch.calls import to_bshd
from attnreg.core.dispatch.planning import Native

CPU = Native("cpu")
OP = "_scaled_dot_product_flash_attention_for_cpu"


def _forward(given: SdpaCpuForward, routed: RoutedCall) -> RouterResult:
    if given.dropout_p > 0.0:
        return routed.untouched("dropout_p")
    call = routing.call_of(given, given.attn_mask)
    plan = routing.dense_plan("forward", given, routed, call, routed.choice)
    if plan.is_native:
        (out, lse), kept = routed.run_native(plan, call)
        lse = lse if routed.choice is None else scope.with_token(lse, routed.choice)
    else:
        tensors = to_bshd(given.query, given.key, given.value, call)
        out, lse = plan.run(*tensors, call)
        kept = routing.kept_dense(plan, call, given.key.shape[2], tensors)
        # Torch lays this LSE out by (B, S, H), whatever the layout of the query.
        if routed.choice is None:
            lse = lse.transpose(1, 2).contiguous().transpose(1, 2)
        else:  # a copy: the kernel may have kept it
            _, heads, length = lse.shape
            if heads == 1 or length == 1:  # both layouts are the same, and this takes half the time
                lse = lse.clone(memory_format=torch.contiguous_format)
            else:
                lse = lse.new_empty_strided(lse.shape, (length * heads, 1, heads)).copy_(lse)
            lse = scope.with_token(lse, routed.choice)
        out = routing.with_strides_of(out.transpose(1, 2), given.query)
    return (out, lse), kept


def _backward(given: SdpaCpuBackward, routed: RoutedCall) -> RouterResult:
    call = routing.call_of(given, given.attn_mask)
    plan = routing.dense_plan("backward", given, routed, call, routed.choice)
    if plan.is_native:
        return routed.run_native(plan, call)
    grads, kept = routing.run_backward(plan, given, call, given.logsumexp)
    # Torch lays these out by (B, S, H, D), whatever the layout of the inputs; torch.compile asserts it.
    return tuple(grad.contiguous().transpose(1, 2) for grad in grads), kept


_FORWARD = Layout(query=0, token_result=1, bhsd=True, lse_bsh=True)
_BACKWARD = Layout(query=1, token_argument=5, bhsd=True, gradients_bshd=True)

ROUTES = (
    Route(OP, ("CPU",), SdpaCpuForward, _forward, CPU, _FORWARD),
    Route(OP + "_backward", ("CPU",), SdpaCpuBackward, _backward, CPU, _BACKWARD, token="logsumexp"),
)
