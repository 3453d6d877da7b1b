"""A call that is known, done again: its plan is at hand, and so is how its results lie.

Describing a call and finding its plan costs the host as much as the kernel takes on short sequences. The
LSE stays as cuDNN writes it, maybe with the token first: whoever needs it in order turns it.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, NamedTuple

import torch

from attnreg.backends.cudnn.describe import described, lse_lies, offsets_of, with_results
from attnreg.contract.launchers import AddressLauncher
from attnreg.torchlib.layout import aligned, dense, stream_of, uninitialized, with_strides

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from attnreg.backends.cudnn.graph import Graph
    from attnreg.backends.cudnn.plans import Plans
    from attnreg.contract.backend import Call
    from attnreg.contract.launchers import Allocation
    from attnreg.contract.spec import Direction

__all__ = ["specialize"]


class _Known(NamedTuple):
    """A plan to run again. One that is dropped mustn't live on here, least of all when the process ends."""

    plans: Plans
    plan: weakref.ref[Graph]
    device: int
    batch: int

    def here(self) -> Graph | None:
        """Return it; None if it has gone, or another device is the current one."""
        return self.plan() if torch.cuda.current_device() == self.device else None

    def run(self, plan: Graph, tensors: list[Tensor], ends: tuple[Tensor, ...]) -> None:
        """Run it on these tensors and offsets."""
        stream = stream_of(tensors[0])
        offsets = offsets_of(self.batch, stream, *ends) if ends else None
        self.plans.launch(plan, self.device, tensors, offsets, stream)

    def launch(self, addresses: int, workspace: int, stream: int) -> bool:
        """Run it on addresses; see `AddressLauncher`."""
        plan = self.plan()
        if plan is None or plan.by_address is None:
            return False
        self.plans.launch_on_addresses(plan.by_address.run, self.device, addresses, workspace, stream)
        return True

    def derive(self, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> list[Tensor] | None:
        """Return what it reads of these offsets; see `AddressLauncher`."""
        plan = self.plan()
        if plan is None:
            return None
        return offsets_of(self.batch, stream_of(cu_seqlens_q), cu_seqlens_q, cu_seqlens_k).operands(plan)


def specialize(
    plans: Plans, direction: Direction, tensors: tuple[Tensor, ...], call: Call
) -> Callable[..., tuple[Tensor, ...] | None] | None:
    """Return what does such a call again; see `Kernels`."""
    forward = direction == "forward"
    query, key, value = tensors[:3] if forward else tensors[1:4]
    if not (query.numel() and key.numel() and call.max_q and call.max_k) or call.seqused_k is not None:
        return None
    if not all(aligned(x, repeats=False) for x in tensors[:5]):
        return None
    if not forward and call.varlen and not query.is_contiguous():
        return None
    problem, _, _ = described(direction, query, key, value, call)
    if not forward:
        problem = with_results(problem, tensors[4], tensors[0], call)
    problem = plans.planned(problem)
    plan = plans.known(problem)
    if plan is None:
        return None
    known, lse = _Known(plans, weakref.ref(plan), problem.device, problem.batch), lse_lies(problem, query)
    if forward:
        return _forward(known, query, value, lse, call.varlen)
    return _backward(known, tensors, lse[1], call.varlen)


def _forward(
    known: _Known, query: Tensor, value: Tensor, lse: tuple[tuple[int, ...], tuple[int, ...]], varlen: bool
) -> Callable[..., tuple[Tensor, ...] | None]:
    device, out_size = query.device, (*query.shape[:-1], value.shape[-1])
    results: tuple[Allocation, ...] = (
        (out_size, dense(out_size), query.dtype),
        (*lse, torch.float32),
    )

    def run(query: Tensor, key: Tensor, value: Tensor, *ends: Tensor) -> tuple[Tensor, ...] | None:
        plan = known.here()
        if plan is None:
            return None
        out, lse = (uninitialized(*one, device) for one in results)
        known.run(plan, [query, key, value, out, lse], ends)
        return out, lse

    return _on_addresses(known, run, (0, 1, 2, 3, 4), results, varlen)


def _backward(
    known: _Known, tensors: tuple[Tensor, ...], lse_strides: tuple[int, ...], varlen: bool
) -> Callable[..., tuple[Tensor, ...] | None]:
    results = tuple((tuple(x.shape), dense(x.shape), x.dtype) for x in tensors[1:4])
    device = tensors[1].device

    def run(
        grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *ends: Tensor
    ) -> tuple[Tensor, ...] | None:
        plan = known.here()
        if plan is None:
            return None
        lse = with_strides(lse, lse_strides)
        grads = [uninitialized(*one, device) for one in results]
        known.run(plan, [query, key, value, out, lse, grad_out, *grads], ends)
        return tuple(grads)

    return _on_addresses(known, run, (1, 2, 3, 4, 5, 0, 6, 7, 8), results, varlen, lse_strides)


def _on_addresses(
    known: _Known,
    run: Callable[..., tuple[Tensor, ...] | None],
    numbers: tuple[int, ...],
    results: tuple[Allocation, ...],
    varlen: bool,
    lse_strides: tuple[int, ...] | None = None,
) -> Callable[..., tuple[Tensor, ...] | None]:
    """Return `run` as what compiled routers can do with addresses alone, if the plan can.

    `numbers` are those of an `AddressLauncher` that its tensors have; vectors come behind them.
    """
    plan = known.plan()
    if plan is None or plan.by_address is None:
        return run
    numbers = *numbers, *range(len(numbers), len(plan.uids))
    operands = tuple(numbers[place] for place in plan.by_address.order)
    derive = known.derive if varlen else None
    return AddressLauncher(run, known.launch, operands, results, plan.workspace, lse_strides, derive)
