"""A backend's two functions joined by the least autograd: how they are called by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from attnreg.backend import Call

__all__ = ["joined"]


def joined(
    forward: Callable[..., Any], backward: Callable[..., Any] | None, call: Call
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return attention by these functions alone, differentiable if there is a `backward`."""

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            found: Tensor = _Joined.apply(forward, backward, call, query, key, value)  # type: ignore[no-untyped-call]
            return found
        out: Tensor = forward(query, key, value, call)[0]
        return out

    return attention


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, forward: Any, backward: Any, call: Call, query: Tensor, key: Tensor, value: Tensor
    ) -> Any:
        out, lse = forward(query, key, value, call)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.kernel, ctx.call = backward, call
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        return None, None, None, *ctx.kernel(grad_out, *ctx.saved_tensors, ctx.call)
