"""What a front takes of the host on a GPU, at a shape so small that the host is all there is.

2 sequences of 128 tokens, 8 heads of 64, bfloat16. Wall time of a few calls without waiting for the
device, too few to fill its queue: torch's `varlen_attn` and SDPA, attnreg's by default and led by each
backend, and aten's flash op with its C++ autograd. Autograd hands a backward on a GPU to a thread of its own,
which is most of what it costs; torch's and attnreg's stand there without that, too.
"""

from __future__ import annotations

import functools
import statistics
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from attnreg.bench.compare import checked, wrong_backend
from attnreg.bench.contexts import by_default, in_the_callers_thread, led_by, settings, torch_alone
from attnreg.bench.fronts import SHAPES
from attnreg.bench.inputs import Batch
from attnreg.bench.report import Report, Table
from attnreg.bench.shapes import BOTH
from attnreg.bench.sides import Side, forward, forward_backward
from attnreg.bench.timing import host_per_call, interleaved
from attnreg.bench.truth import Truth

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from attnreg.bench.inputs import Tensors
    from attnreg.bench.report import Job

__all__ = ["ALONE", "OP", "aten_op", "measure"]

CALLS, TORCH, OP = 30, "torch", "aten op, C++ autograd"
ALONE = "autograd in the caller's thread"
# Microseconds of attnreg's `varlen_attn`, and of torch's on the host that they were set for: hosts differ by
# a factor of two.
AIMS = {"forward, grad": (30.0, 84.0), BOTH: (110.0, 256.0)}


def _with_grad(front: Callable[..., Tensor], tensors: Tensors) -> Tensor:
    return front(*tensors.inputs())


STEPS = {"forward, no grad": forward, "forward, grad": _with_grad, BOTH: forward_backward}


def measure(job: Job) -> Report:
    """Measure both fronts."""
    report = Report({}, [])
    fronts = tuple(zip(("varlen_attn", "SDPA"), SHAPES, strict=True))
    for number, (name, shape) in enumerate(fronts):
        job.advance(number, len(fronts), name)
        batch = Batch(shape, job.device)
        report.results[name] = taken = _timed(batch, job)
        rows = [(side, *(f"{found[step]:.1f}" for step in STEPS)) for side, found in taken.items()]
        report.tables.append(Table(f"Host time per call through {name}, µs", ("side", *STEPS), rows))
        job.keep(report.results)
        if shape.varlen:
            report.told += [
                _aim(side, step, found[step], taken.get(TORCH, {}).get(step))
                for side, found in taken.items()
                if side.startswith("attnreg")
                for step in AIMS
            ]
    return report


def _aim(what: str, step: str, taken: float, torchs: float | None) -> str:
    aim, of_torchs = AIMS[step]
    told = f"{what}, {step}: {taken:.1f} µs, aim {aim:.0f}: {_reached(taken <= aim)}"
    if torchs is None:
        return told
    share, least = taken / torchs, aim / of_torchs
    return f"{told}; {share:.2f} of torch's, aim {least:.2f}: {_reached(share <= least)}"


def _reached(whether: bool) -> str:
    return "reached" if whether else "MISSED"


def _timed(batch: Batch, job: Job) -> dict[str, dict[str, float]]:
    """Return the median microseconds of each side and step."""
    truth, sets = Truth(batch.shape, batch.sets[0], True), batch.front_sets
    default = by_default if batch.shape.varlen else settings("measured", job.table)
    sides = {
        TORCH: Side(batch.with_torch, sets, torch_alone),
        "attnreg": Side(batch.with_attnreg, sets, default),
        **{f"attnreg, {name}": Side(batch.with_attnreg, sets, led_by(name)) for name in job.backends},
    }
    for name in (TORCH, "attnreg"):
        side = sides[name]
        alone = functools.partial(in_the_callers_thread, side.within)
        sides[f"{name}, {ALONE}"] = replace(side, within=alone)
    if batch.shape.varlen:
        sides[OP] = Side(aten_op(batch), sets, torch_alone)

    def against(name: str, found: dict[str, Any]) -> str:
        led = name.partition(", ")[2] if name.startswith("attnreg, ") and ALONE not in name else ""
        return wrong_backend(led, found) if led else ""

    right = checked(batch.shape, sides, lambda _, results: truth.error(batch.contract(results)), against, job)
    medians: dict[str, dict[str, float]] = {name: {} for name in right}
    for step, run in STEPS.items():
        measures = {name: one.side.timed(run, CALLS, host_per_call) for name, one in right.items()}
        for name, seconds in interleaved(measures, job.rounds).items():
            medians[name][step] = statistics.median(seconds) * 1e6
    return medians


def aten_op(batch: Batch) -> Callable[..., Tensor]:
    """Return aten's flash op as a function of query, key and value."""
    op = torch.ops.aten._flash_attention_forward.default
    rest = (batch.offsets_q, batch.offsets_k, batch.max_q, batch.max_k, 0.0, False, False)
    return functools.partial(_first, op, rest)


def _first(op: Callable[..., Any], rest: tuple[Any, ...], *inputs: Tensor) -> Tensor:
    found: Tensor = op(*inputs, *rest)[0]
    return found
