"""What attnreg costs the host per call, at shapes so small that the host's work is all there is.

Through `varlen_attn` and SDPA, forward without and with a gradient, forward + backward: torch's own; attnreg
by default, led by each backend that is registered, inside `use_backend(...)`, with `backend=`; each backend's
kernels called directly; aten's op, whose autograd is C++; a graph of autograd that does nothing. On a GPU 2
sequences of 128 tokens, 8 heads of 64, bfloat16: wall time of a few calls without waiting for the device, too
few to fill its queue. There autograd hands a backward to a thread of its own, which is most of what it
costs: torch's and attnreg's are measured without that as well. On a CPU some tokens of 8 numbers each, and
the questions of `overhead_cpu`.
"""

from __future__ import annotations

import functools
import statistics
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from attnreg import _registry
from attnreg.bench import overhead_cpu
from attnreg.bench.batches import Batch, named
from attnreg.bench.compare import Checked, checked
from attnreg.bench.contexts import by_default, in_the_callers_thread, led_by, scoped, settings, torch_alone
from attnreg.bench.fronts import SHAPES
from attnreg.bench.report import Report, Table
from attnreg.bench.shapes import BOTH, dense, packed
from attnreg.bench.sides import Side, called_directly, forward, forward_backward, wrong_backend
from attnreg.measure.timing import calls_for, interleaved

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from attnreg.bench.batches import Tensors
    from attnreg.bench.report import Job
    from attnreg.bench.sides import Step
    from attnreg.measure import Sample

    Front = Callable[..., Tensor]
    Medians = dict[str, dict[str, float]]

# Few enough not to fill a GPU's queue; on a CPU as many as take so many seconds.
CALLS, CPU_SECONDS, QUICK_CPU_SECONDS = 30, 5e-3, 5e-4
CPU_SHAPES = (packed([2, 2], 2, 2, 8, False, "float32"), dense(1, 2, 1, 1, 8, False, "float32"))
FRONTS = ("varlen_attn", "SDPA")

TORCH, DEFAULT, LED, OP, NOTHING = (
    "torch",
    "attnreg",
    "attnreg, ",
    "aten op, C++ autograd",
    "autograd, nothing",
)
ALONE, DIRECTLY = "autograd in the caller's thread", "called directly, "
# How a backend may be named, as the end of a row's name; a registered one has none.
IN_SCOPE, BY_ARGUMENT = ", use_backend()", ", backend="

# Microseconds of attnreg's `varlen_attn` on a GPU's host, and of torch's on the host that they were set for:
# hosts differ by a factor of two.
AIMS = {"forward, grad": (30.0, 84.0), BOTH: (110.0, 256.0)}
# What naming a backend for some calls may cost above registering it, in microseconds.
SCOPED_AIM = 2.0


def _with_grad(front: Front, tensors: Tensors) -> Tensor:
    return front(*tensors.inputs())


STEPS = {"forward, no grad": forward, "forward, grad": _with_grad, BOTH: forward_backward}


def measure(job: Job) -> Report:
    """Measure both fronts, and on a CPU what `overhead_cpu` asks first."""
    if job.device.type == "cuda":
        return _fronts(job, Report({}, []), 0, len(FRONTS))
    report, threads = Report({}, []), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        parts = overhead_cpu.measure(job, report, also=len(FRONTS))
        return _fronts(job, report, parts, parts + len(FRONTS))
    finally:
        torch.set_num_threads(threads)


def _fronts(job: Job, report: Report, done: int, total: int) -> Report:
    gpu = job.device.type == "cuda"
    for number, (name, shape) in enumerate(zip(FRONTS, SHAPES if gpu else CPU_SHAPES, strict=True)):
        job.advance(done + number, total, name)
        if job.late:
            job.leave_out(name, "the time was spent")
            continue
        batch = Batch(shape, job.device)
        report.results[name] = taken = _medians(_right(sides(batch, job), batch, job), job)
        rows = [(side, *(f"{found[step]:.1f}" for step in STEPS)) for side, found in taken.items()]
        report.tables.append(Table(f"Host time per call through {name}, µs", ("side", *STEPS), rows))
        job.keep(report.results)
        if gpu and shape.varlen:
            report.summary += [
                aim(side, step, found[step], taken.get(TORCH, {}).get(step))
                for side, found in taken.items()
                if side.startswith(DEFAULT)
                for step in AIMS
            ]
        report.summary += scoped_aims(name, taken)
    return report


def sides(batch: Batch, job: Job) -> dict[str, Side]:
    """Return all that are timed, by the names of their rows."""
    sets, gpu = batch.front_sets, batch.device.type == "cuda"
    default = by_default if batch.shape.varlen else settings("measured", job.table)
    found = {
        TORCH: Side(batch.with_torch, sets, torch_alone),
        DEFAULT: Side(batch.with_attnreg, sets, default),
        **{LED + name: Side(batch.with_attnreg, sets, led_by(name)) for name in job.backends},
        **{LED + name + IN_SCOPE: Side(batch.with_attnreg, sets, scoped(name)) for name in job.backends},
    }
    if batch.shape.varlen:
        for name in job.backends:
            front = functools.partial(batch.with_attnreg, backend=name)
            found[LED + name + BY_ARGUMENT] = Side(front, sets, by_default)
    for name in job.backends:
        kernels = _registry.find(name).kernels()
        direct = called_directly(kernels.forward, kernels.backward, batch.call)
        found[DIRECTLY + name] = Side(direct, batch.sets, by_default)
    if gpu:
        for name in (TORCH, DEFAULT):
            alone = functools.partial(in_the_callers_thread, found[name].within)
            found[f"{name}, {ALONE}"] = replace(found[name], within=alone)
    if gpu or not batch.shape.varlen:
        found[OP] = Side(aten_op(batch), sets, torch_alone)
    return found | {NOTHING: Side(lambda q, k, v: q.view_as(q), sets, torch_alone)}


def aten_op(batch: Batch) -> Front:
    """Return aten's flash op as a function of query, key and value."""
    if batch.shape.varlen:
        op: Any = torch.ops.aten._flash_attention_forward.default
        rest: tuple[Any, ...] = (*batch.offsets, 0.0, False, False)
    else:
        gpu = batch.device.type == "cuda"
        ops = torch.ops.aten
        op = (
            ops._scaled_dot_product_flash_attention
            if gpu
            else ops._scaled_dot_product_flash_attention_for_cpu
        )
        op, rest = op.default, ()
    return functools.partial(_first, op, rest)


def _first(op: Callable[..., Any], rest: tuple[Any, ...], *inputs: Tensor) -> Tensor:
    found: Tensor = op(*inputs, *rest)[0]
    return found


def _right(found: Mapping[str, Side], batch: Batch, job: Job) -> dict[str, Side]:
    """Return the sides that are right and run what their names say; what does nothing is right."""
    sample = batch.sample()

    def expected(name: str, results: list[Tensor]) -> tuple[Sample, dict[str, Tensor]]:
        return sample, named(results) if name.startswith(DIRECTLY) else batch.contract(results)

    def against(name: str, ran: dict[str, str]) -> str:
        backend = name.removeprefix(LED).removesuffix(IN_SCOPE).removesuffix(BY_ARGUMENT)
        return wrong_backend(backend, ran) if backend in job.backends else ""

    compared = {name: side for name, side in found.items() if name != NOTHING}
    right: dict[str, Checked] = checked(batch.shape, compared, expected, against, job)
    return {name: side for name, side in found.items() if name in right or name == NOTHING}


def _medians(found: Mapping[str, Side], job: Job) -> Medians:
    """Return the median microseconds of each side and step."""
    total = QUICK_CPU_SECONDS if job.quick else CPU_SECONDS

    def calls(side: Side, run: Step) -> int:
        return (
            CALLS if job.device.type == "cuda" else calls_for(total, side.timed(run, 3, "host")(), most=500)
        )

    medians: Medians = {name: {} for name in found}
    for step, run in STEPS.items():
        measures = {name: side.timed(run, calls(side, run), "host") for name, side in found.items()}
        for name, taken in interleaved(measures, job.rounds).items():
            medians[name][step] = statistics.median(taken) * 1e6
    return medians


def aim(what: str, step: str, taken: float, torchs: float | None) -> str:
    """Return whether a row through `varlen_attn` reaches its aims on a GPU."""
    limit, of_torchs = AIMS[step]
    line = f"{what}, {step}: {taken:.1f} µs, aim {limit:.0f}: {_reached(taken <= limit)}"
    if torchs is None:
        return line
    share, least = taken / torchs, limit / of_torchs
    return f"{line}; {share:.2f} of torch's, aim {least:.2f}: {_reached(share <= least)}"


def scoped_aims(front: str, taken: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return what naming each backend for some calls costs above registering it, a line for each row."""
    lines = []
    for name in taken:
        registered = name.removesuffix(IN_SCOPE).removesuffix(BY_ARGUMENT)
        if name != registered in taken:
            added = [taken[name][step] - taken[registered][step] for step in STEPS]
            words = ", ".join(f"{one:+.1f}" for one in added)
            reached = _reached(max(added) <= SCOPED_AIM)
            lines.append(
                f"{front}, {name}: {words} µs above registered, aim {SCOPED_AIM:+.0f} at most: {reached}"
            )
    return lines


def _reached(whether: bool) -> str:
    return "reached" if whether else "MISSED"
