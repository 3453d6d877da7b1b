"""The two directions of a call, in the contract's layout, and launchers for repeated calls."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from attnreg.backends.cudnn.execution_plans import ExecutionPlans, lengths_of
from attnreg.backends.cudnn.graph import ExecutionPlan
from attnreg.backends.cudnn.problem import Problem, describe, is_empty, lse_layout
from attnreg.contract.backend import Call
from attnreg.contract.launchers import AddressLauncher, Allocation, Launcher
from attnreg.contract.offsets import empty_results, facts
from attnreg.contract.spec import Direction
from attnreg.torchlib.layout import (
    aligned,
    contiguous_strides,
    readable,
    stream_of,
    uninitialized,
    with_strides,
)


def forward(
    plans: ExecutionPlans, query: Tensor, key: Tensor, value: Tensor, call: Call
) -> tuple[Tensor, Tensor]:
    """Return the output and the LSE."""
    if is_empty(query, key, call):
        return empty_results(query, value, call)
    shape = (*query.shape[:-1], value.shape[-1])
    query, key, value = (readable(x, repeats=False) for x in (query, key, value))
    problem, stream = plans.select(describe("forward", (query, key, value), call)), stream_of(query)
    all_written = _writes_all(query, key, call, stream)
    out = query.new_empty(shape) if all_written else query.new_zeros(shape)
    lse = query.new_empty_strided(*lse_layout(problem, query), dtype=torch.float32)
    if not all_written:
        lse.fill_(-torch.inf)
    _run(plans, problem, (query, key, value, out, lse), call, stream)
    # A hook on saved tensors may hand the LSE to any backend, and torch's own ignores its strides.
    return out, lse.contiguous()


def backward(
    plans: ExecutionPlans,
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
    given = (grad_out, query, key, value, out)
    grad_out, query, key, value, out = (readable(x, repeats=False) for x in given)
    problem = plans.select(describe("backward", (grad_out, query, key, value, out), call))
    stream = stream_of(query)
    all_written = _writes_all(query, key, call, stream)
    grad_q, grad_k, grad_v = (x.new_empty(x.shape) if all_written else x.new_zeros(x.shape) for x in inputs)
    lse = with_strides(lse, lse_layout(problem, query)[1])
    tensors = (query, key, value, out, lse, grad_out, grad_q, grad_k, grad_v)
    _run(plans, problem, tensors, call, stream)
    return grad_q, grad_k, grad_v


def _writes_all(query: Tensor, key: Tensor, call: Call, stream: int) -> bool:
    """Whether cuDNN is known to write every row of its results, so that they can start uninitialized."""
    return not call.varlen or facts(call, query.shape[0], key.shape[0], stream).no_unused_rows


def _run(
    plans: ExecutionPlans, problem: Problem, tensors: tuple[Tensor, ...], call: Call, stream: int
) -> None:
    lengths = None
    if call.cu_seqlens_q is not None and call.cu_seqlens_k is not None:
        lengths = lengths_of(problem.batch, stream, call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_k)
    if torch.cuda.current_device() == problem.device:
        plans.run(problem, tensors, lengths, stream)
    else:
        with torch.cuda.device(problem.device):
            plans.run(problem, tensors, lengths, stream)


def specialize(
    plans: ExecutionPlans, direction: Direction, tensors: tuple[Tensor, ...], call: Call
) -> Launcher | None:
    """Return a launcher for calls like this one, which has just run; see `Kernels.specialize`."""
    query, key, value = tensors[:3] if direction == "forward" else tensors[1:4]
    if is_empty(query, key, call) or call.seqused_k is not None:
        return None
    # What the functions above copy first needs them.
    if not all(aligned(x, repeats=False) for x in tensors[:5]):
        return None
    if direction == "backward" and call.varlen and not query.is_contiguous():
        return None
    problem = plans.select(describe(direction, tensors, call))
    plan = plans.find(problem)
    if plan is None:
        return None
    lse_size, lse_strides = lse_layout(problem, query)
    lse: Allocation = lse_size, lse_strides, torch.float32
    if direction == "forward":
        results = _contiguous((*query.shape[:-1], value.shape[-1]), query), lse
        repeated = _RepeatedCall(plans, weakref.ref(plan), problem, (0, 1, 2, 3, 4), results)
    else:
        order, grads = (1, 2, 3, 4, 5, 0, 6, 7, 8), tuple(_contiguous(x.shape, x) for x in tensors[1:4])
        repeated = _RepeatedCall(plans, weakref.ref(plan), problem, order, grads, lse_strides)
    if plan.run_on_addresses is None:
        return repeated.run
    # The execution plan's lengths and ragged offsets come after all tensors.
    numbers = *repeated.order, *range(len(repeated.order), len(plan.uids))
    return AddressLauncher(
        repeated.run,
        repeated.launch,
        tuple(numbers[plan.uids.index(uid)] for uid in sorted(plan.uids)),
        repeated.results,
        plan.workspace,
        repeated.lse_strides,
        repeated.derive if call.varlen else None,
    )


def _contiguous(size: tuple[int, ...], like: Tensor) -> Allocation:
    return tuple(size), contiguous_strides(size), like.dtype


class _RepeatedCall(NamedTuple):
    """An execution plan, sizes and strides of the results, and the order in which it takes all tensors.

    Describing a call and looking up its execution plan costs the host as much as the kernel takes on short
    sequences. The LSE stays as cuDNN writes it, maybe with the token first.

    It doesn't keep the execution plan alive: one that `ExecutionPlans` has dropped has to go, most of all
    when the process ends. All methods do nothing then and say so.
    """

    plans: ExecutionPlans
    plan: weakref.ref[ExecutionPlan]
    problem: Problem
    order: tuple[int, ...]
    results: tuple[Allocation, ...]
    lse_strides: tuple[int, ...] | None = None

    def run(self, *given: Tensor) -> tuple[Tensor, ...] | None:
        """Run the execution plan on tensors; see `contract.launchers`."""
        plan = self.plan()
        if plan is None:
            return None
        count = len(self.order) - len(self.results)
        tensors, cu_seqlens = list(given[:count]), given[count:]
        if self.lse_strides is not None:
            tensors[-1] = with_strides(tensors[-1], self.lse_strides)
        results = tuple(uninitialized(*one, given[0].device) for one in self.results)
        tensors += results
        stream = stream_of(given[0])
        lengths = lengths_of(self.problem.batch, stream, *cu_seqlens) if cu_seqlens else None
        ordered = [tensors[number] for number in self.order]
        self.plans.execute(plan, self.problem.device, ordered, lengths, stream)
        return results

    def launch(self, addresses: int, workspace: int, stream: int) -> bool:
        """Run the execution plan on addresses; see `AddressLauncher`."""
        plan = self.plan()
        if plan is None or plan.run_on_addresses is None:
            return False
        handle = self.plans.handle(self.problem.device, stream)
        plan.run_on_addresses(addresses, workspace, handle.backend_handle)
        return True

    def derive(self, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> list[Tensor] | None:
        """Return what the execution plan reads of these offsets; see `AddressLauncher`."""
        plan = self.plan()
        if plan is None:
            return None
        stream = stream_of(cu_seqlens_q)
        return lengths_of(self.problem.batch, stream, cu_seqlens_q, cu_seqlens_k).inputs_of(plan)
