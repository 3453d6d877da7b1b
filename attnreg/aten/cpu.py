"""The ops below `F.scaled_dot_product_attention` on CPU: (B, H, S, D), causal aligned top-left.

Torch's own kernel for them is what the `cpu` backend is built on. They have no random state, so the
choice of a scope travels in the LSE, and only where there is one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnreg.aten.heads_first import contract, gradients, plan_for
from attnreg.aten.routing import Quick, Route, Turn, like
from attnreg.aten.schemas import SdpaCpuBackward, SdpaCpuForward
from attnreg.dispatch import scope
from attnreg.dispatch.planning import Native

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ROUTES"]

CPU = Native("cpu")
OP = "_scaled_dot_product_flash_attention_for_cpu"


def _forward(asked: SdpaCpuForward, turn: Turn) -> tuple[Tensor, Tensor]:
    if asked.dropout_p > 0.0:
        return turn.untouched("dropout_p")  # type: ignore[no-any-return]
    plan = plan_for("forward", asked, turn, turn.pin, asked.attn_mask, top_left=True)
    if plan.original:
        out, lse = turn.torch(plan)
    else:
        out, lse = plan.run(*contract(asked, asked.attn_mask, True, None))
        # Torch lays this LSE out by (B, S, H), whatever the layout of the query.
        out, lse = like(out.transpose(1, 2), asked.query), lse.transpose(1, 2).contiguous().transpose(1, 2)
    return out, lse if turn.pin is None else scope.restamp(lse, turn.pin)


def _backward(asked: SdpaCpuBackward, turn: Turn) -> Any:
    plan = plan_for("backward", asked, turn, turn.pin, asked.attn_mask, top_left=True)
    if plan.original:
        return turn.torch(plan)
    grads = gradients(plan, contract(asked, asked.attn_mask, True, None), asked, asked.logsumexp)
    # Torch lays these out by (B, S, H, D), whatever the layout of the inputs; torch.compile asserts it.
    return tuple(grad.contiguous().transpose(1, 2) for grad in grads)


ROUTES = (
    Route(OP, ("CPU",), SdpaCpuForward, _forward, CPU, quick=Quick(0, slice(3, 5))),
    Route(OP + "_backward", ("CPU",), SdpaCpuBackward, _backward, CPU, "logsumexp", Quick(1, slice(6, 8), 5)),
)
