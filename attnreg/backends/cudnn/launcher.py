"""Launchers for repeated calls: they hold the plan, and sizes and strides of the results.

Describing a call and looking its plan up costs the host as much as the kernel takes on short sequences. A
launcher leaves the LSE as cuDNN writes it, maybe with the token first.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, NamedTuple

import torch

from attnreg.backends.cudnn.lengths import lengths_of
from attnreg.backends.cudnn.problem import describe, is_empty, lse_layout, with_results
from attnreg.contract.launchers import AddressLauncher
from attnreg.torchlib.layout import aligned, contiguous_strides, stream_of, uninitialized, with_strides

if TYPE_CHECKING:
    from torch import Tensor

    from attnreg.backends.cudnn.graph import Plan
    from attnreg.backends.cudnn.plans import Plans
    from attnreg.contract.backend import Call
    from attnreg.contract.launchers import Allocation, Launcher
    from attnreg.contract.spec import Direction


def specialize(
    plans: Plans, direction: Direction, tensors: tuple[Tensor, ...], call: Call
) -> Launcher | None:
    """Return a launcher for calls like this one, which has just run; see `Kernels.specialize`."""
    query, key, value = tensors[:3] if direction == "forward" else tensors[1:4]
    if is_empty(query, key, call) or call.seqused_k is not None:
        return None
    # What the adapter copies first needs the adapter.
    if not all(aligned(x, repeats=False) for x in tensors[:5]):
        return None
    if direction == "backward" and call.varlen and not query.is_contiguous():
        return None
    problem = describe(direction, query, key, value, call)
    if direction == "backward":
        problem = with_results(problem, tensors[4], tensors[0], call)
    problem = plans.select(problem)
    plan = plans.find(problem)
    if plan is None:
        return None
    repeated = _RepeatedCall(plans, weakref.ref(plan), problem.device, problem.batch)
    lse_size, lse_strides = lse_layout(problem, query)
    if direction == "forward":
        return _forward(repeated, query, value, (lse_size, lse_strides, torch.float32), call.varlen)
    return _backward(repeated, tensors, lse_strides, call.varlen)


class _RepeatedCall(NamedTuple):
    """What a launcher runs.

    It doesn't keep the plan alive: a plan that `Plans` has dropped has to go, most of all when the process
    ends. All methods do nothing then and say so.
    """

    plans: Plans
    plan: weakref.ref[Plan]
    device: int
    batch: int

    def run(self, plan: Plan, tensors: list[Tensor], cu_seqlens: tuple[Tensor, ...]) -> None:
        """Run the plan on these tensors."""
        stream = stream_of(tensors[0])
        lengths = lengths_of(self.batch, stream, *cu_seqlens) if cu_seqlens else None
        self.plans.execute(plan, self.device, tensors, lengths, stream)

    def launch(self, addresses: int, workspace: int, stream: int) -> bool:
        """Run the plan on addresses; see `AddressLauncher`."""
        plan = self.plan()
        if plan is None or plan.by_address is None:
            return False
        self.plans.execute_on_addresses(plan.by_address.run, self.device, addresses, workspace, stream)
        return True

    def derive(self, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> list[Tensor] | None:
        """Return what the plan reads of these offsets; see `AddressLauncher`."""
        plan = self.plan()
        if plan is None:
            return None
        return lengths_of(self.batch, stream_of(cu_seqlens_q), cu_seqlens_q, cu_seqlens_k).inputs_of(plan)


def _forward(
    repeated: _RepeatedCall, query: Tensor, value: Tensor, lse: Allocation, varlen: bool
) -> Launcher:
    device, out_size = query.device, (*query.shape[:-1], value.shape[-1])
    results: tuple[Allocation, ...] = (out_size, contiguous_strides(out_size), query.dtype), lse

    def run(query: Tensor, key: Tensor, value: Tensor, *cu_seqlens: Tensor) -> tuple[Tensor, ...] | None:
        plan = repeated.plan()
        if plan is None:
            return None
        out, lse = (uninitialized(*one, device) for one in results)
        repeated.run(plan, [query, key, value, out, lse], cu_seqlens)
        return out, lse

    return _on_addresses(repeated, run, (0, 1, 2, 3, 4), results, varlen)


def _backward(
    repeated: _RepeatedCall, tensors: tuple[Tensor, ...], lse_strides: tuple[int, ...], varlen: bool
) -> Launcher:
    results = tuple((tuple(x.shape), contiguous_strides(x.shape), x.dtype) for x in tensors[1:4])
    device = tensors[1].device

    def run(
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        *cu_seqlens: Tensor,
    ) -> tuple[Tensor, ...] | None:
        plan = repeated.plan()
        if plan is None:
            return None
        lse = with_strides(lse, lse_strides)
        grads = [uninitialized(*one, device) for one in results]
        repeated.run(plan, [query, key, value, out, lse, grad_out, *grads], cu_seqlens)
        return tuple(grads)

    return _on_addresses(repeated, run, (1, 2, 3, 4, 5, 0, 6, 7, 8), results, varlen, lse_strides)


def _on_addresses(
    repeated: _RepeatedCall,
    run: Launcher,
    numbers: tuple[int, ...],
    results: tuple[Allocation, ...],
    varlen: bool,
    lse_strides: tuple[int, ...] | None = None,
) -> Launcher:
    """Return `run` as an `AddressLauncher` if the plan can run on addresses.

    Args:
        numbers: those that an `AddressLauncher` gives the plan's tensors; its lengths come after them.
    """
    plan = repeated.plan()
    if plan is None or plan.by_address is None:
        return run
    numbers = *numbers, *range(len(numbers), len(plan.uids))
    operands = tuple(numbers[place] for place in plan.by_address.order)
    derive = repeated.derive if varlen else None
    return AddressLauncher(run, repeated.launch, operands, results, plan.workspace, lse_strides, derive)
