"""A call that is known, done again: its plan is at hand, and so is how its results lie.

Describing a call and finding its plan costs the host as much as the kernel takes on short sequences. The
LSE stays as cuDNN writes it, seen the other way round: whoever needs it in order turns it.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, NamedTuple

import torch

from attnreg.backends._cudnn_described import described, offsets_of, with_results
from attnreg.layout import aligned, dense, fresh
from attnreg.packed import stream_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from attnreg.backend import Call
    from attnreg.backends._cudnn_graph import Graph
    from attnreg.backends._cudnn_plans import Plans
    from attnreg.discovery import Direction

__all__ = ["again"]


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


def again(
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
    plan = plans.known(problem)
    if plan is None:
        return None
    known = _Known(plans, weakref.ref(plan), problem.device, problem.batch)
    return _forward(known, query, value, call.varlen) if forward else _backward(known, tensors, call.varlen)


def _forward(
    known: _Known, query: Tensor, value: Tensor, varlen: bool
) -> Callable[..., tuple[Tensor, ...] | None]:
    *rows, heads, _ = query.shape
    dtype, device = query.dtype, query.device
    out_size = *rows, heads, value.shape[-1]
    stats_size = (*rows, heads) if varlen else (rows[0], heads, rows[1])
    out_strides, stats_strides = dense(out_size), dense(stats_size)

    def run(query: Tensor, key: Tensor, value: Tensor, *ends: Tensor) -> tuple[Tensor, ...] | None:
        plan = known.here()
        if plan is None:
            return None
        out = fresh(out_size, out_strides, dtype, device)
        stats = fresh(stats_size, stats_strides, torch.float32, device)
        known.run(plan, [query, key, value, out, stats], ends)
        return out, stats.t() if varlen else stats

    return run


def _backward(
    known: _Known, tensors: tuple[Tensor, ...], varlen: bool
) -> Callable[..., tuple[Tensor, ...] | None]:
    given = [(tuple(x.shape), dense(x.shape), x.dtype, x.device) for x in tensors[1:4]]

    def run(
        grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *ends: Tensor
    ) -> tuple[Tensor, ...] | None:
        plan = known.here()
        if plan is None:
            return None
        stats = (lse.t() if varlen else lse).contiguous()
        grads = [fresh(*one) for one in given]
        known.run(plan, [query, key, value, out, stats, grad_out, *grads], ends)
        return tuple(grads)

    return run
