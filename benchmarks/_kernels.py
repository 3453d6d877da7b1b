"""The kernels of each package called directly: no registry, no adapter, no check.

FA2 is aten's CUDA kernel as it was before any router, FA4 the package's two functions, cuDNN graphs that
are planned for exactly these sizes, run on results allocated for each call.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from attnreg.backends.cudnn.problem import Slot
from attnreg.core import registry
from attnreg.core.torchlib import captured

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from attnreg.backends.cudnn.problem import Problem
    from attnreg.core.contract.backend import Call
    from attnreg.tools.bench.sides import Tensors

    Kernel = Callable[..., tuple[Tensor, ...]]
    Direct = tuple[Kernel, Kernel]

__all__ = ["direct"]


def direct(name: str, call: Call, tensors: Tensors) -> Direct:
    """Return `forward(q, k, v)` and `backward(grad, q, k, v, *what the forward returned)` of a backend.

    They are for one kind of call; `tensors` are an example in the contract's layout.
    """
    if name == "FA2":
        return _fa2(call)
    return _fa4(call) if name == "FA4" else _cudnn(call, tensors)


def _fa2(call: Call) -> Direct:
    run_forward = captured.kernel("_flash_attention_forward", "CUDA")
    run_backward = captured.kernel("_flash_attention_backward", "CUDA")
    lengths = (call.cu_seqlens_q, call.cu_seqlens_k, call.max_q, call.max_k, 0.0, call.causal)
    left, right = call.window
    options = {"scale": call.scale, "window_size_left": left, "window_size_right": right}
    state = torch.empty(2, dtype=torch.uint64, device="cuda")
    of_dropout = state, state[0]  # without dropout, but the backward needs its random state

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return tuple(run_forward(q, k, v, *lengths, False, **options)[:2])

    def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *results: Tensor) -> tuple[Tensor, ...]:
        return tuple(run_backward(grad, q, k, v, *results, *lengths, *of_dropout, **options))

    return forward, backward


def _fa4(call: Call) -> Direct:
    from attnreg.backends.fa4.package import functions

    run_forward, run_backward = functions()
    shared = {
        "softmax_scale": call.scale,
        "causal": call.causal,
        "window_size_left": None,
        "window_size_right": None,
        "cu_seqlens_q": call.cu_seqlens_q,
        "cu_seqlens_k": call.cu_seqlens_k,
        "max_seqlen_q": call.max_q,
        "max_seqlen_k": call.max_k,
    }

    plain = {"softcap": 0.0, "deterministic": False}

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return tuple(run_forward(q=q, k=k, v=v, num_splits=1, return_lse=True, **shared)[:2])

    def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *results: Tensor) -> tuple[Tensor, ...]:
        out, lse = results
        grads = run_backward(q=q, k=k, v=v, out=out, dout=grad, lse=lse, **shared, **plain)
        return tuple(grads[:3])

    return forward, backward


class _Spy:
    """Replaces a cuDNN graph for a call, to record the arguments of its run."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        self.buffers: list[Tensor] = []
        self.options: dict[str, Any] = {}

    def execute(self, buffers: list[Tensor], workspace: Tensor | None, **options: Any) -> None:
        """Keep the arguments, and pass them on."""
        self.buffers, self.options = buffers, options
        self.graph.execute(buffers, workspace, **options)


class _Prepared:
    """A cuDNN graph, with its constant buffers: lengths and offsets of the sequences."""

    def __init__(self, plans: Any, kernel: Callable[..., Any], *arguments: Any) -> None:
        kernel(*arguments)  # makes the plans, unless they exist
        planned = plans._plans
        plans._plans = {
            problem: dataclasses.replace(plan, graph=_Spy(plan.graph), run_on_addresses=None)
            for problem, plan in planned.items()
        }
        try:
            kernel(*arguments)
        finally:
            spied, plans._plans = plans._plans, planned
        (self.plan,) = (plan for plan in spied.values() if plan.graph.buffers)
        spy = self.plan.graph
        self.fixed = spy.buffers[len(self.plan.tensors) :]
        self.execute, self.options, spy.buffers = spy.graph.execute, spy.options, []

    def run(self, tensors: dict[Any, Tensor]) -> None:
        """Run it on these tensors."""
        buffers = [*(tensors[slot] for slot in self.plan.tensors), *self.fixed]
        workspace = None
        if self.plan.workspace:
            workspace = torch.empty(self.plan.workspace, dtype=torch.uint8, device=buffers[0].device)
        self.execute(buffers, workspace, **self.options)


def _cudnn(call: Call, tensors: Tensors) -> Direct:
    kernels = registry.find("cuDNN").kernels()
    plans = kernels.forward.args[0]  # type: ignore[attr-defined]
    inputs = [x.detach() for x in tensors.inputs()]

    def select(problem: Problem) -> tuple[Problem, Any]:
        problem = problem._replace(exact=problem.kind.packed)
        return problem, plans._plans.get(problem)

    with mock.patch.object(plans, "select", select):
        of_forward = _Prepared(plans, kernels.forward, *inputs, call)
        results = kernels.forward(*inputs, call)
        of_backward = _Prepared(plans, kernels.backward, tensors.grad, *inputs, *results, call)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        out = torch.empty_like(q)
        rows = (*q.shape[:-3], q.shape[-2], q.shape[-3])  # (B, H, S), or (H, T)
        stats = q.new_empty(rows, dtype=torch.float32)
        of_forward.run({Slot.Q: q, Slot.K: k, Slot.V: v, Slot.OUT: out, Slot.STATS: stats})
        return out, stats

    def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *results: Tensor) -> tuple[Tensor, ...]:
        out, stats = results
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        slots = (Slot.Q, Slot.K, Slot.V, Slot.OUT, Slot.STATS, Slot.GRAD_OUT)
        tensors = dict(zip(slots, (q, k, v, out, stats, grad), strict=True))
        of_backward.run(tensors | dict(zip((Slot.GRAD_Q, Slot.GRAD_K, Slot.GRAD_V), grads, strict=True)))
        return grads

    return forward, backward
