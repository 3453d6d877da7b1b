"""The ops below `F.scaled_dot_product_attention` on CUDA: flash and cuDNN, (B, H, S, D).

On Hopper and Blackwell torch prefers the cuDNN op, so both are routed. The two differ in the shapes
of their LSE and random state, and in how they align a causal mask.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attnreg import counters, scope
from attnreg.aten.heads_first import contract, gradients, plan_for
from attnreg.aten.routing import Quick, Route, Turn, like, new_rng_state, passed_on, tied
from attnreg.aten.schemas import CudnnBackward, SdpaCudnnForward, SdpaFlashBackward, SdpaFlashForward
from attnreg.planning import Native

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CUDNN", "ROUTES", "cudnn_dense_backward", "cudnn_dense_forward"]

FLASH, CUDNN = Native("FA2"), Native("cuDNN")


def _flash_forward(asked: SdpaFlashForward, turn: Turn) -> Any:
    if asked.return_debug_mask:
        return turn.untouched("return_debug_mask")
    return _forward(asked, turn, bias=None, cudnn=False)


def cudnn_dense_forward(asked: Any, turn: Turn) -> Any:
    """Answer a dense cuDNN op."""
    if asked.return_debug_mask:
        return turn.untouched("return_debug_mask")
    return _forward(asked, turn, bias=asked.attn_bias, cudnn=True)


def _forward(asked: Any, turn: Turn, bias: Tensor | None, cudnn: bool) -> tuple[Any, ...]:
    query, dropout = asked.query, asked.dropout_p
    plan = plan_for("forward", asked, turn, turn.pin, bias, top_left=cudnn)
    if plan.original:
        # What a dropout's forward tells its backward has to be written beside its results.
        result = turn.torch(plan, alone=dropout == 0.0)
    else:
        rng_state = new_rng_state(query.device) if dropout > 0.0 else None
        out, lse = plan.kernel(*contract(asked, bias, cudnn, rng_state))
        counters.count(plan.counters)
        out, lse = _laid_out(out.transpose(1, 2), query), lse.contiguous()
        lse, debug_mask = (lse.unsqueeze(-1), None) if cudnn else (lse, query.new_empty(0))
        lengths = query.shape[2], asked.key.shape[2]
        result = out, lse, None, None, *lengths, *_random_state(rng_state, query, cudnn), debug_mask
    pin = passed_on(turn.pin, plan, dropout)
    if pin is None:
        return result  # type: ignore[no-any-return]
    offset = scope.stamp(pin, query) if result[7] is None else scope.restamp(result[7], pin)
    return (*result[:7], offset, *result[8:])


def _laid_out(out: Tensor, query: Tensor) -> Tensor:
    """Return the output with its dimensions in the query's order, as torch's own kernels lay it out."""
    if out.shape == query.shape:
        return like(out, query)
    order = sorted(range(4), key=query.stride().__getitem__, reverse=True)
    expected = torch.empty_permuted(out.shape, order, dtype=out.dtype, device=out.device)
    return out if out.stride() == expected.stride() else expected.copy_(out)


def _random_state(rng_state: Tensor | None, query: Tensor, cudnn: bool) -> tuple[Tensor, Tensor]:
    """Return the seed and offset outputs: both in the first of the flash op, one each of cuDNN's."""
    drawn = query.new_empty(2, dtype=torch.uint64) if rng_state is None else rng_state
    if cudnn:
        seed, offset = drawn.view(torch.int64)
        return seed.clone(), offset.clone()
    return drawn, query.new_empty((), dtype=torch.uint64)


def _drawn(asked: Any, cudnn: bool) -> Tensor | None:
    """Return the random state that the forward drew, in the contract's form."""
    if asked.dropout_p == 0.0:
        return None
    if cudnn:
        return torch.stack((asked.philox_seed, asked.philox_offset)).view(torch.uint64)
    return asked.philox_seed  # type: ignore[no-any-return]


def _flash_backward(asked: SdpaFlashBackward, turn: Turn) -> tuple[Tensor, ...]:
    return _backward(asked, turn, bias=None, cudnn=False)


def cudnn_dense_backward(asked: CudnnBackward, turn: Turn) -> tuple[Tensor, ...]:
    """Answer the backward of a dense cuDNN op."""
    return _backward(asked, turn, bias=asked.attn_bias, cudnn=True)


def _backward(asked: Any, turn: Turn, bias: Tensor | None, cudnn: bool) -> tuple[Tensor, ...]:
    plan = plan_for("backward", asked, turn, tied(turn, asked.dropout_p), bias, top_left=cudnn)

    if plan.original:
        return turn.torch(plan, alone=asked.dropout_p == 0.0)  # type: ignore[no-any-return]
    lse = asked.logsumexp.squeeze(-1) if cudnn else asked.logsumexp
    grads = gradients(plan, contract(asked, bias, cudnn, _drawn(asked, cudnn)), asked, lse)
    inputs = (asked.query, asked.key, asked.value)
    return tuple(like(grad.transpose(1, 2), tensor) for grad, tensor in zip(grads, inputs, strict=True))


SDPA_FLASH = "_scaled_dot_product_flash_attention"
SDPA_CUDNN = "_scaled_dot_product_cudnn_attention"


def _route(
    op: str, arguments: Any, serve: Any, native: Native, carrier: str = "", quick: Quick | None = None
) -> Route:
    # Torch's own kernels of these ops call `_flash_attention_*` and `_cudnn_attention_*`.
    return Route(op, ("CUDA",), arguments, serve, native, carrier, quick, calls_ops=True)


ROUTES = (
    _route(SDPA_FLASH, SdpaFlashForward, _flash_forward, FLASH, quick=Quick(0, slice(3, 6))),
    _route(
        SDPA_FLASH + "_backward", SdpaFlashBackward, _flash_backward, FLASH, "philox_offset",
        quick=Quick(1, slice(10, 12), 13),
    ),
    _route(
        SDPA_CUDNN, SdpaCudnnForward, cudnn_dense_forward, CUDNN,
        quick=Quick(0, slice(4, 8), absent=slice(3, 4)),
    ),
    _route(
        SDPA_CUDNN + "_backward", CudnnBackward, cudnn_dense_backward, CUDNN, "philox_offset",
        quick=Quick(1, slice(13, 15), 7, slice(8, 11)),
    ),
)  # fmt: skip
