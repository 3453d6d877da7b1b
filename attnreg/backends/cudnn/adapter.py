"""The two directions of a call: tensors in the contract's layout in, results by the contract out."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import torch

from attnreg.backends.cudnn.lengths import lengths_of
from attnreg.backends.cudnn.problem import describe, is_empty, lse_layout, with_results
from attnreg.contract.offsets import facts
from attnreg.torchlib.layout import readable, stream_of, with_strides

if TYPE_CHECKING:
    from torch import Tensor

    from attnreg.backends.cudnn.plans import Plans
    from attnreg.backends.cudnn.problem import Problem
    from attnreg.contract.backend import Call


def forward(plans: Plans, query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Return the output and the LSE."""
    shape = (*query.shape[:-1], value.shape[-1])
    if is_empty(query, key, call):
        *batch, rows, heads = query.shape[:-1]
        return query.new_zeros(shape), query.new_full((*batch, heads, rows), -inf, dtype=torch.float32)
    query, key, value = (readable(x, repeats=False) for x in (query, key, value))
    problem, stream = plans.select(describe("forward", query, key, value, call)), stream_of(query)
    all_written = _writes_all(query, key, call, stream)
    out = query.new_empty(shape) if all_written else query.new_zeros(shape)
    lse = query.new_empty_strided(*lse_layout(problem, query), dtype=torch.float32)
    if not all_written:
        lse.fill_(-inf)
    _run(plans, problem, (query, key, value, out, lse), call, stream)
    # A hook on saved tensors may hand the LSE to any backend, and torch's own ignores its strides.
    return out, lse.contiguous()


def backward(
    plans: Plans,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    call: Call,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value."""
    inputs = (query, key, value)
    if is_empty(query, key, call):
        grad_q, grad_k, grad_v = (x.new_zeros(x.shape) for x in inputs)
        return grad_q, grad_k, grad_v
    # cuDNN 9.19 writes a wrong gradient of packed queries that aren't contiguous.
    query = query.contiguous() if call.varlen else query
    given = (query, key, value, out, grad_out)
    query, key, value, out, grad_out = (readable(x, repeats=False) for x in given)
    problem = with_results(describe("backward", query, key, value, call), out, grad_out, call)
    problem, stream = plans.select(problem), stream_of(query)
    all_written = _writes_all(query, key, call, stream)
    grad_q, grad_k, grad_v = (x.new_empty(x.shape) if all_written else x.new_zeros(x.shape) for x in inputs)
    lse = with_strides(lse, lse_layout(problem, query)[1])
    tensors = (query, key, value, out, lse, grad_out, grad_q, grad_k, grad_v)
    _run(plans, problem, tensors, call, stream)
    return grad_q, grad_k, grad_v


def _writes_all(query: Tensor, key: Tensor, call: Call, stream: int) -> bool:
    """Whether cuDNN is known to write every row of its results, so that they can start uninitialized."""
    return not call.varlen or facts(call, query.shape[0], key.shape[0], stream).no_unused_rows


def _run(plans: Plans, problem: Problem, tensors: tuple[Tensor, ...], call: Call, stream: int) -> None:
    lengths = None
    if call.cu_seqlens_q is not None and call.cu_seqlens_k is not None:
        lengths = lengths_of(problem.batch, stream, call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_k)
    if torch.cuda.current_device() == problem.device:
        plans.run(problem, tensors, lengths, stream)
    else:
        with torch.cuda.device(problem.device):
            plans.run(problem, tensors, lengths, stream)
