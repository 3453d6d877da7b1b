"""A backend's two functions joined by the least autograd: how they are called by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["joined"]


def joined(
    forward: Callable[..., Any], backward: Callable[..., Any] | None, *last: object
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return attention by these functions alone, differentiable if there is a `backward`.

    `forward` is given query, key, value and what comes `last`, and returns the output first; `backward` the
    gradient of that, the three, what `forward` has returned, and what comes last.
    """

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            found: Tensor = _Joined.apply(forward, backward, last, query, key, value)  # type: ignore[no-untyped-call]
            return found
        out: Tensor = forward(query, key, value, *last)[0]
        return out

    return attention


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, forward: Any, backward: Any, last: tuple[object, ...], *inputs: Tensor) -> Any:
        results = forward(*inputs, *last)
        ctx.save_for_backward(*inputs, *results)
        ctx.kernel, ctx.last = backward, last
        return results[0]

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        return None, None, None, *ctx.kernel(grad_out, *ctx.saved_tensors, *ctx.last)
