"""What attnreg costs the host per call, at shapes so small that the host's work is all there is.

Three steps are timed through `varlen_attn` and SDPA: a forward without a gradient, a forward with a gradient,
forward + backward. The sides are:

- torch's own function, without attnreg and, for SDPA, below routers that nothing asks for a backend;
- attnreg by default, with each backend registered, inside `use_backend(...)`, and with `backend=`;
- each backend's kernels called directly;
- aten's op, whose autograd is C++;
- a graph of autograd that does nothing.

On a GPU the calls have 2 sequences of 128 tokens, 8 heads of 64, bfloat16. The wall time of a few calls
counts, without waiting for the device. They are too few to fill its queue. Autograd hands a backward on a GPU
to a thread of its own, which is most of what it costs. So torch and attnreg are also measured with autograd
in the caller's thread. On a CPU the calls have a few tokens of 8 numbers each.
"""

from __future__ import annotations

import functools
import math
import statistics
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnreg import api
from attnreg.core import registry
from attnreg.tools.bench.compare import Batch, SideTimer, by_step, checked
from attnreg.tools.bench.fronts import SHAPES
from attnreg.tools.bench.report import Job, PrintedTable
from attnreg.tools.bench.shapes import BOTH, dense, packed
from attnreg.tools.bench.sides import (
    Front,
    Side,
    Tensors,
    by_default,
    called_directly,
    forward,
    forward_backward,
    in_the_callers_thread,
    settings,
    torch_alone,
)

# Few enough not to fill a GPU's queue; on a CPU as many as take so many seconds.
CALLS, CPU_CALLS, CPU_SECONDS, QUICK_CPU_SECONDS = 30, 500, 5e-3, 5e-4
CPU_SHAPES = (packed([2, 2], 2, 2, 8, False, "float32"), dense(1, 2, 1, 1, 8, False, "float32"))
FRONTS = ("varlen_attn", "SDPA")

TORCH, UNASKED = "torch", "torch, nothing asks for a backend"
DEFAULT, LED = "attnreg", "attnreg, "
OP, NOTHING = "aten op, C++ autograd", "autograd, nothing"
ALONE, DIRECTLY = "autograd in the caller's thread", "called directly, "
# How a backend may be named, as the end of a row's name; a registered one has none.
IN_SCOPE, BY_ARGUMENT = ", use_backend()", ", backend="


def _with_grad(front: Front, tensors: Tensors) -> Tensor:
    return front(*tensors.inputs())


STEPS = {"forward, no grad": forward, "forward, grad": _with_grad, BOTH: forward_backward}


def measure(job: Job) -> None:
    """Measure both fronts, on a CPU on one thread."""
    results: dict[str, Any] = {}
    threads = torch.get_num_threads()
    gpu = job.device.type == "cuda"
    shapes = dict(zip(FRONTS, SHAPES if gpu else CPU_SHAPES, strict=True))
    if not gpu:
        torch.set_num_threads(1)
    try:
        for front in job.in_time(list(shapes)):
            _compare(front, Batch(shapes[front], job.device), job, results)
            job.keep(results)
    finally:
        torch.set_num_threads(threads)
    job.keep(results)


def _compare(front: str, batch: Batch, job: Job, results: dict[str, Any]) -> None:
    """Add to the results what all calls through one front take."""
    timed_sides = sides(batch, job)
    nothing = timed_sides.pop(NOTHING)  # gives no result that could be wrong
    right = {name: checked_side.side for name, checked_side in checked(batch, timed_sides, job).items()}
    right[NOTHING] = nothing
    seconds, calls = QUICK_CPU_SECONDS if job.quick else CPU_SECONDS, CPU_CALLS
    if job.device.type == "cuda":
        seconds, calls = math.inf, CALLS
    timers = {name: SideTimer(side, side.runs(STEPS), seconds, calls) for name, side in right.items()}
    taken: dict[str, dict[str, float]] = {name: {} for name in timers}
    quartiles: dict[str, dict[str, list[float]]] = {name: {} for name in timers}
    for step, sides_of_step in by_step(timers, job.rounds, "host").items():
        for name, rounds in sides_of_step.items():
            microseconds = [each * 1e6 for each in rounds]
            taken[name][step] = statistics.median(microseconds)
            if len(rounds) > 2:  # else there is no spread
                quartiles[name][step] = statistics.quantiles(microseconds, method="inclusive")[::2]
    results[front] = taken
    results.setdefault("quartiles", {})[front] = quartiles
    rows = [(side, *(f"{medians[step]:.1f}" for step in STEPS)) for side, medians in taken.items()]
    job.tables.append(PrintedTable(f"Host time per call through {front}, µs", ("side", *STEPS), rows))


def sides(batch: Batch, job: Job) -> dict[str, Side]:
    """Return all that are timed, by the names of their rows."""
    sets, gpu = batch.front_sets, batch.device.type == "cuda"
    default = by_default if batch.case.varlen else functools.partial(settings, "measured", job.table)
    timed_sides = {DEFAULT: Side(batch.with_attnreg, sets, default)}
    if gpu or not batch.case.varlen:  # aten's ops for packed tensors have no kernel on a CPU
        timed_sides = {TORCH: Side(batch.with_torch, sets, torch_alone)} | timed_sides
    if not batch.case.varlen:
        timed_sides[UNASKED] = Side(batch.with_torch, sets, by_default)
    for end, choose in (("", api.register_backend), (IN_SCOPE, api.use_backend)):
        for name in job.backends:
            within: Any = functools.partial(choose, name)
            timed_sides[LED + name + end] = Side(batch.with_attnreg, sets, within, wanted=name)
    if batch.case.varlen:
        for name in job.backends:
            front = functools.partial(batch.with_attnreg, backend=name)
            timed_sides[LED + name + BY_ARGUMENT] = Side(front, sets, by_default, wanted=name)
    for name in job.backends:
        kernels = registry.find(name).kernels()
        direct = called_directly(kernels.forward, kernels.backward, batch.call)
        timed_sides[DIRECTLY + name] = Side(direct, batch.sets, by_default)
    if gpu:
        for name in (TORCH, DEFAULT):
            alone = functools.partial(in_the_callers_thread, timed_sides[name].within)
            timed_sides[f"{name}, {ALONE}"] = replace(timed_sides[name], within=alone)
    if gpu or not batch.case.varlen:
        timed_sides[OP] = Side(aten_op(batch), sets, torch_alone)
    return timed_sides | {NOTHING: Side(lambda q, k, v: q.view_as(q), sets, torch_alone)}


def aten_op(batch: Batch) -> Front:
    """Return aten's flash op as a function of query, key and value."""
    ops = torch.ops.aten
    rest: tuple[Any, ...] = ()
    if batch.case.varlen:
        op, rest = ops._flash_attention_forward.default, (*batch.offsets, 0.0, False, False)
    elif batch.device.type == "cuda":
        op = ops._scaled_dot_product_flash_attention.default
    else:
        op = ops._scaled_dot_product_flash_attention_for_cpu.default
    return lambda q, k, v: op(q, k, v, *rest)[0]
