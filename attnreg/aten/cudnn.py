"""Aten's cuDNN ops: dense (B, H, S, D), and varlen (T, H, D).

On Hopper and Blackwell torch prefers the cuDNN op below `F.scaled_dot_product_attention`, which calls the
dense one. A causal mask of these ops is aligned top-left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attnreg.aten.again import Layout, answer
from attnreg.aten.beside import cudnn_extras, shared
from attnreg.aten.heads_first import contract, gradients, plan_for
from attnreg.aten.routing import Quick, Route, Turn, drawn, like, passed_on, tied
from attnreg.aten.schemas import CudnnBackward, CudnnForward
from attnreg.contract.backend import Call
from attnreg.dispatch import scope
from attnreg.dispatch.calls import bounds, prepare, scale_of, wants_deterministic, wants_gradient
from attnreg.dispatch.planning import Native

if TYPE_CHECKING:
    from torch import Tensor

    from attnreg.aten.again import Answer
    from attnreg.aten.heads_first import Contract
    from attnreg.dispatch.planning import Plan

__all__ = ["CUDNN", "ROUTES"]

CUDNN = Native("cuDNN")

# Up to torch 2.13 the varlen LSE of this op is token-major, (T, H, 1); from then on (H, T).
TOKEN_MAJOR_LSE = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14)


def _forward(asked: CudnnForward, turn: Turn) -> Any:
    if asked.cum_seq_q is None:
        return _dense_forward(asked, turn)
    if asked.return_debug_mask or asked.attn_bias is not None or _top_left(asked):
        return turn.untouched("a varlen call with a debug mask, a bias or a mask aligned top-left")
    query, dropout = asked.query, asked.dropout_p
    call = _call(asked, seqused_k=asked.seqused_k, block_table=asked.block_table)
    needs_backward = wants_gradient(query, asked.key, asked.value)
    plan = prepare("forward", query, asked.key, asked.value, call, turn.pin, turn.native, needs_backward)

    if plan.original:
        result = turn.torch(plan)
    else:
        if dropout > 0.0:  # not before torch's own kernel has had its turn: it draws from the same generator
            out, lse, seed = drawn(plan, query, asked.key, asked.value, call)
        else:
            out, lse = plan.run(query, asked.key, asked.value, call)
            seed = query.new_empty(2, dtype=torch.uint64)
        lse = lse.t().contiguous().unsqueeze(-1) if TOKEN_MAJOR_LSE else lse.contiguous()
        offset = query.new_empty((), dtype=torch.uint64)
        result = out, lse, asked.cum_seq_q, asked.cum_seq_k, asked.max_q, asked.max_k, seed, offset, None
    return _carrying(result, passed_on(turn.pin, plan, dropout, _no_gradient(asked)))


def _dense_forward(asked: CudnnForward, turn: Turn) -> Any:
    if asked.seqused_k is not None or asked.block_table is not None:
        return turn.untouched("seqused_k or block_table of a dense call")
    if asked.return_debug_mask:
        return turn.untouched("return_debug_mask")
    query, bias, dropout = asked.query, asked.attn_bias, asked.dropout_p
    plan = plan_for("forward", asked, turn, turn.pin, bias, top_left=True)
    if plan.original:
        # What a dropout's forward tells its backward has to be written beside its results.
        result = turn.torch(plan, alone=dropout == 0.0)
    else:
        inputs = contract(asked, bias, True, None)
        if dropout > 0.0:
            out, lse, rng_state = drawn(plan, *inputs)
            words = tuple(word.clone() for word in rng_state.view(torch.int64))
        else:
            out, lse = plan.run(*inputs)
            words = cudnn_extras(query)
            same = inputs.value.shape[-1] == query.shape[-1]
            turn.again(plan, _known(plan, inputs, asked, FORWARD if same else FORWARD_OF_OTHER_SIZE))
        result = _dense_results(out, lse, query, asked.key, words)
    return _carrying(result, passed_on(turn.pin, plan, dropout))


def _dense_results(out: Tensor, lse: Tensor, query: Tensor, key: Tensor, drawn: tuple[Tensor, ...]) -> Any:
    lengths = query.shape[2], key.shape[2]
    lse = lse.contiguous().unsqueeze(-1)
    return _laid_out(out.transpose(1, 2), query), lse, None, None, *lengths, *drawn, None


def _known(
    plan: Plan, inputs: Contract, asked: CudnnForward | CudnnBackward, layout: Layout
) -> Answer | None:
    """Return what answers further calls like this one; None if it takes more than a call of the kernel."""
    if inputs.call.max_k != asked.key.shape[2] or inputs.call.attn_bias is not None:
        return None
    return answer(plan, inputs.call, layout)


def _forward_turned(given: tuple[Any, ...]) -> tuple[Tensor, ...]:
    query, key, value = given[:3]
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def _forward_results(results: tuple[Tensor, Tensor], given: tuple[Any, ...]) -> Any:
    query, key = given[:2]
    return _dense_results(*results, query, key, shared(cudnn_extras, query))


def _backward_turned(given: tuple[Any, ...]) -> tuple[Tensor, ...]:
    *tensors, lse = given[:6]
    return *(x.transpose(1, 2) for x in tensors), lse.squeeze(-1)


def _backward_results(grads: tuple[Tensor, ...], given: tuple[Any, ...]) -> tuple[Tensor, ...]:
    return _heads_first(grads, given[1:4])


def _forward_beside(given: tuple[Any, ...]) -> tuple[Any, ...]:
    # The seed and the offset only say what they are: kept, they might lie in the memory of a CUDA graph.
    word = torch.empty((), dtype=torch.int64, device="meta")
    return None, None, given[0].shape[2], given[1].shape[2], word, word, None


def _backward_beside(_: tuple[Any, ...]) -> tuple[Any, ...]:
    return ()


FORWARD = Layout(0, _forward_turned, _forward_results, _forward_beside)
# How an output lies that isn't shaped like the query only Python knows.
FORWARD_OF_OTHER_SIZE = FORWARD._replace(beside=None)
BACKWARD = Layout(1, _backward_turned, _backward_results, _backward_beside)


def _laid_out(out: Tensor, query: Tensor) -> Tensor:
    """Return the output with its dimensions in the query's order, as torch's own kernels lay it out."""
    if out.shape == query.shape:
        return like(out, query)
    order = sorted(range(4), key=query.stride().__getitem__, reverse=True)
    expected = torch.empty_permuted(out.shape, order, dtype=out.dtype, device=out.device)
    return out if out.stride() == expected.stride() else expected.copy_(out)


def _carrying(result: tuple[Any, ...], pin: scope.Pin | None) -> tuple[Any, ...]:
    """Return a forward's results with a choice in the tensor through which its backward learns of it."""
    if pin is None:
        return result
    offset = scope.stamp(pin, result[0]) if result[7] is None else scope.restamp(result[7], pin)
    return (*result[:7], offset, *result[8:])


def _backward(asked: CudnnBackward, turn: Turn) -> Any:
    if asked.cum_seq_q is None:
        return _dense_backward(asked, turn)
    if asked.attn_bias is not None or _top_left(asked):
        return turn.untouched("a varlen call with a bias or a mask aligned top-left")
    rng_state = asked.philox_seed if asked.dropout_p > 0.0 else None
    call = _call(asked, rng_state=rng_state, deterministic=wants_deterministic())
    inputs = (asked.query, asked.key, asked.value)
    plan = prepare("backward", *inputs, call, tied(turn, asked.dropout_p), turn.native)
    lse = asked.logsumexp.squeeze(-1).t() if asked.logsumexp.dim() == 3 else asked.logsumexp
    if plan.original:
        return turn.torch(plan)
    return plan.run(asked.grad_out, *inputs, asked.out, lse, call)


def _dense_backward(asked: CudnnBackward, turn: Turn) -> Any:
    bias, dropout = asked.attn_bias, asked.dropout_p
    plan = plan_for("backward", asked, turn, tied(turn, dropout), bias, top_left=True)
    if plan.original:
        return turn.torch(plan, alone=dropout == 0.0)
    drawn = None
    if dropout > 0.0:
        drawn = torch.stack((asked.philox_seed, asked.philox_offset)).view(torch.uint64)
    inputs = contract(asked, bias, True, drawn)
    grads = gradients(plan, inputs, asked, asked.logsumexp.squeeze(-1))
    if drawn is None:
        turn.again(plan, _known(plan, inputs, asked, BACKWARD))
    return _heads_first(grads, (asked.query, asked.key, asked.value))


def _heads_first(grads: tuple[Tensor, ...], inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(like(grad.transpose(1, 2), tensor) for grad, tensor in zip(grads, inputs, strict=True))


def _call(asked: CudnnForward | CudnnBackward, **rest: Any) -> Call:
    window = bounds((-1, -1), asked.is_causal, asked.max_q, asked.max_k)
    return Call(
        scale_of(asked.query, asked.scale),
        asked.max_q,
        asked.max_k,
        window,
        asked.cum_seq_q,
        asked.cum_seq_k,
        dropout=asked.dropout_p,
        **rest,
    )


def _top_left(asked: CudnnForward | CudnnBackward) -> bool:
    """Whether this op's causal mask differs from the contract's, which is aligned bottom-right."""
    return asked.is_causal and asked.cum_seq_q is not asked.cum_seq_k


def _no_gradient(asked: CudnnForward) -> str:
    if asked.seqused_k is None and asked.block_table is None:
        return ""
    if not wants_gradient(asked.query, asked.key, asked.value):
        return ""
    return (
        "seqused_k or block_table: aten::_cudnn_attention_backward receives neither, so its gradients "
        "would be wrong; call attnreg.varlen_attn, whose backward does"
    )


ROUTES = (
    Route(
        "_cudnn_attention_forward", ("CUDA",), CudnnForward, _forward, CUDNN,
        quick=Quick(0, slice(6, 12), absent=(3, 4)),
    ),
    Route(
        "_cudnn_attention_backward", ("CUDA",), CudnnBackward, _backward, CUDNN, "philox_offset",
        quick=Quick(1, slice(13, 15), 7, absent=(8, 9)),
    ),
)  # fmt: skip
