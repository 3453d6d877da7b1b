"""The ops below `F.scaled_dot_product_attention` on CPU: (B, H, S, D), causal aligned top-left.

The `cpu` backend is built on torch's own kernel of these ops. The ops have no random state, so a scoped
choice travels to the backward in the LSE. Without a scoped choice the LSE is left alone.
"""

from __future__ import annotations

from attnreg.core.aten import routing
from attnreg.core.aten.routing import OpLayout, Route, RoutedCall, RouterResult
from attnreg.core.aten.schemas import SdpaCpuBackward, SdpaCpuForward
from attnreg.core.dispatch import scope
from attnreg.core.dispatch.call_cache import kept_dense
from attnreg.core.dispatch.calls import to_bshd
from attnreg.core.dispatch.planning import Native
from attnreg.core.torchlib.nan_rows import show_nan

CPU = Native("cpu", kernel="torch's flash_attention kernel")
OP = "_scaled_dot_product_flash_attention_for_cpu"


def _forward(arguments: SdpaCpuForward, routed: RoutedCall) -> RouterResult:
    if arguments.dropout_p > 0.0:
        return routed.untouched("dropout_p")
    call = routing.call_of(arguments, arguments.attn_mask)
    plan = routing.dense_plan("forward", arguments, routed, call, routed.choice)
    if plan.is_native:
        (out, lse), kept = routed.run_native(plan, call)
        # The call cache does the same.
        show_nan(out, lse, arguments.query, arguments.key, arguments.is_causal, arguments.attn_mask)
        lse = lse if routed.choice is None else scope.with_token(lse, routed.choice)
    else:
        tensors = to_bshd(arguments.query, arguments.key, arguments.value, call)
        out, lse = plan.run(*tensors, call)
        kept = None
        if call.max_k == arguments.key.shape[2]:  # the call cache cuts no keys off that no query sees
            kept = kept_dense(plan, tensors, call)
        # Torch's kernel lays out the LSE as (B, S, H), whatever the query's layout.
        if routed.choice is None:
            lse = lse.transpose(1, 2).contiguous().transpose(1, 2)
        else:  # a copy to write the token to: the kernel may still hold this tensor
            _, heads, length = lse.shape
            lse = lse.new_empty_strided(lse.shape, (length * heads, 1, heads)).copy_(lse)
            lse = scope.with_token(lse, routed.choice)
        out = routing.with_strides_of(out.transpose(1, 2), arguments.query)
    return (out, lse), kept


def _backward(arguments: SdpaCpuBackward, routed: RoutedCall) -> RouterResult:
    call = routing.call_of(arguments, arguments.attn_mask)
    plan = routing.dense_plan("backward", arguments, routed, call, routed.choice)
    if plan.is_native:
        return routed.run_native(plan, call)
    grads, kept = routing.run_backward(plan, arguments, call, arguments.logsumexp)
    # Torch's kernel lays out gradients as (B, S, H, D), whatever the inputs' layout; torch.compile asserts
    # it.
    return tuple(grad.contiguous().transpose(1, 2) for grad in grads), kept


_FORWARD = OpLayout(query=0, token_result=1, bhsd=True, lse_bsh=True)
_BACKWARD = OpLayout(query=1, token_argument=5, bhsd=True, gradients_bshd=True)

ROUTES = (
    Route(OP, ("CPU",), SdpaCpuForward, _forward, CPU, _FORWARD),
    Route(OP + "_backward", ("CPU",), SdpaCpuBackward, _backward, CPU, _BACKWARD, token="logsumexp"),
)
