"""Packed sequences in the setting of PyTorch's PR #164502: attnreg, torch's varlen_attn, padded SDPA.

8 sequences, lengths random multiples of 64 up to 2048, 16 heads, bfloat16; head dim 64 and 128, causal or
not; on a CPU 4 sequences up to 256, 4 heads, float32. Padded SDPA gets its tensors already padded;
without a mask its tokens see the padding, and it is compared with what attention gives then.
TFLOP/s count what the real lengths need.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from attnreg.bench.batches import Batch, named
from attnreg.bench.compare import checked, dtype_of, table, timed
from attnreg.bench.contexts import by_default, led_by, mixed, torch_alone
from attnreg.bench.report import Report
from attnreg.bench.shapes import BOTH, FORWARD, pull_request, pull_request_lengths
from attnreg.bench.sides import STEPS, Side, wrong_backend
from attnreg.errors import BackendUnavailableError
from attnreg.measure import Inputs, Sample
from attnreg.measure.timing import matmul_rate

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from attnreg.bench.batches import Tensors
    from attnreg.bench.report import Job
    from attnreg.contract.backend import Backend

TORCH, UNMASKED, MASKED = "torch varlen_attn", "SDPA, padded", "SDPA, padded, mask"
DEFAULT, LED = "attnreg, default", "attnreg, "
AIMS = {FORWARD: 1.4, BOTH: 1.6}


def measure(job: Job) -> Report:
    """Time every side of every case; the yardstick is torch's varlen_attn, padded SDPA where there is none.

    Raises:
        BackendUnavailableError: neither runs here.
    """
    shapes = pull_request(job.device.type)[: 1 if job.quick else None]
    lengths, rate = pull_request_lengths(job.device.type), matmul_rate(job.device, dtype_of(shapes[0]))
    report = Report({"lengths": lengths, "matmul_teraflops": rate / 1e12, "rows": []}, [])
    for number, shape in enumerate(shapes):
        job.advance(number, len(shapes), str(shape))
        if job.late:
            job.leave_out(str(shape), "the time was spent")
            continue
        batch = Batch(shape, job.device, sets=3)
        right = checked(shape, _sides(batch, job.backends), _Expected(batch), _against, job)
        yardstick = next((name for name in (TORCH, MASKED) if name in right), None)
        if yardstick is None:
            raise BackendUnavailableError(f"{TORCH} and {MASKED} are the yardsticks, and neither runs here")
        rows = timed(shape, right, yardstick, rate, job)
        case = f"head dim {shape.dim}{', causal' if shape.causal else ''}"
        report.results["rows"] += [{**row, "case": case, "panel": "", "yardstick": yardstick} for row in rows]
        job.keep(report.results)
        report.tables += [
            table(f"{case}, {step}", [row for row in rows if row["step"] == step], yardstick)
            for step in STEPS
        ]
    report.summary = [_aim(row) for row in report.results["rows"] if row["side"] == DEFAULT]
    return report


def _aim(row: dict[str, Any]) -> str:
    if row["yardstick"] != TORCH:
        return f"{row['case']}, {row['step']}: {row['times_yardstick']:.2f} x {row['yardstick']}"
    aim = AIMS[row["step"]]
    reached = "reached" if row["times_yardstick"] >= aim else "MISSED"
    return f"{row['case']}, {row['step']}: {row['times_yardstick']:.2f} x {TORCH}, aim {aim}: {reached}"


def _sides(batch: Batch, backends: tuple[str, ...]) -> dict[str, Side]:
    """Return all that are compared."""
    plain, sdpa = _padded(batch)
    found = {
        TORCH: Side(batch.with_torch, batch.sets, torch_alone),
        UNMASKED: Side(functools.partial(sdpa, is_causal=batch.shape.causal), plain, torch_alone),
        MASKED: Side(functools.partial(sdpa, attn_mask=_visible(batch)), plain, torch_alone),
        DEFAULT: Side(batch.with_attnreg, batch.sets, by_default),
    }
    led: list[str | Backend] = [*backends]
    if {"cuDNN", "FA4"} <= set(backends):
        led.append(mixed("cuDNN", "FA4"))
    for backend in led:
        name = backend if isinstance(backend, str) else backend.name
        found[LED + name] = Side(batch.with_attnreg, batch.sets, led_by(backend))
    return found


def _against(name: str, found: dict[str, str]) -> str:
    if name in (TORCH, UNMASKED, MASKED, DEFAULT):
        return ""
    return wrong_backend(name.removeprefix(LED), found)


def _padded(batch: Batch) -> tuple[list[Tensors], Callable[..., Tensor]]:
    """Return the batch's sets padded as (B, H, S, D), and SDPA over such tensors."""
    lengths = list(batch.shape.lengths_q)

    def pad(x: Tensor) -> Tensor:
        return pad_sequence(list(torch.split(x, lengths)), batch_first=True).transpose(1, 2)

    return [tensors.mapped(pad) for tensors in batch.sets], F.scaled_dot_product_attention


def _is_token(batch: Batch) -> Tensor:
    positions = torch.arange(batch.call.max_q, device=batch.device)
    lengths: Tensor = batch.offsets[0].diff()
    return positions < lengths[:, None]


def _visible(batch: Batch) -> Tensor:
    """Return the mask that hides the padding, (B, 1, 1 or S, S)."""
    visible, positions = (
        _is_token(batch)[:, None, None, :],
        torch.arange(batch.call.max_q, device=batch.device),
    )
    return visible & (positions[:, None] >= positions) if batch.shape.causal else visible


class _Expected:
    """What each side should give: they have different layouts, and unmasked SDPA sees the padding."""

    def __init__(self, batch: Batch) -> None:
        self._batch, case, batch_size = batch, batch.case, len(batch.case.lens_q)
        padded = replace(
            case, lens_q=(case.max_q,) * batch_size, lens_k=(case.max_k,) * batch_size, varlen=False
        )
        to_bshd = _padded(batch)[0][0].mapped(lambda x: x.transpose(1, 2).detach())
        call = batch.call._replace(cu_seqlens_q=None, cu_seqlens_k=None)
        self._packed = batch.sample()
        self._padded = Sample(padded, Inputs(*to_bshd, call))

    def __call__(self, name: str, results: list[Tensor]) -> tuple[Sample, dict[str, Tensor]]:
        if name not in (UNMASKED, MASKED):
            return self._packed, named(results)
        bshd = [x.transpose(1, 2) for x in results]
        if name == UNMASKED:
            return self._padded, named(bshd)
        return self._packed, named(x[_is_token(self._batch)] for x in bshd)
