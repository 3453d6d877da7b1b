"""Packed sequences in the setting of PyTorch's PR #164502: attnreg, torch's varlen_attn, padded SDPA.

On a GPU: 8 sequences, lengths random multiples of 64 up to 2048, 16 heads, head dim 64 and 128, causal or
not, bfloat16. On a CPU: 4 sequences up to 256, 4 heads, float32. Padded SDPA gets tensors that are padded
already. Without a mask its tokens see the padding, so its reference sees the padding, too. TFLOP/s count only
the work of the real lengths.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from attnreg import api
from attnreg.errors import BackendUnavailableError
from attnreg.tools.bench.compare import Batch, checked, named, table, timed
from attnreg.tools.bench.report import Job
from attnreg.tools.bench.shapes import pull_request
from attnreg.tools.bench.sides import STEPS, Side, Tensors, by_default, torch_alone
from attnreg.tools.measure import Inputs, Sample
from attnreg.tools.measure.sample import Verdict
from attnreg.tools.measure.timing import matmul_rate

TORCH, UNMASKED, MASKED = "torch varlen_attn", "SDPA, padded", "SDPA, padded, mask"
DEFAULT, LED = "attnreg, default", "attnreg, "


def measure(job: Job) -> None:
    """Time every side of every case; the yardstick is torch's varlen_attn, else padded SDPA."""
    shapes = pull_request(job.device.type)[: 1 if job.quick else None]
    rate = matmul_rate(job.device, getattr(torch, shapes[0].dtype))
    measured: list[dict[str, Any]] = []
    results = {"lengths": list(shapes[0].lens_q), "matmul_teraflops": rate / 1e12, "rows": measured}
    for shape in job.in_time(shapes):
        batch = Batch(shape, job.device, sets=3)
        padded = [tensors.mapped(functools.partial(_pad, batch)) for tensors in batch.sets]
        verdict = functools.partial(_verdict, batch, _padded_sample(batch, padded[0]))
        right = checked(batch, _sides(batch, padded, job.backends), job, verdict)
        yardstick = next((name for name in (TORCH, MASKED) if name in right), None)
        if yardstick is None:
            raise BackendUnavailableError(f"{TORCH} and {MASKED} are the yardsticks, and neither runs here")
        rows = timed(shape, right, yardstick, rate, job)
        case = f"head dim {shape.dims[0]}{', causal' if shape.is_causal else ''}"
        measured += [{**row, "case": case, "panel": "", "yardstick": yardstick} for row in rows]
        job.keep(results)
        job.tables += [
            table(f"{case}, {step}", [row for row in rows if row["step"] == step], yardstick)
            for step in STEPS
        ]
    job.summary = [
        f"{row['case']}, {row['step']}: {row['times_yardstick']:.2f} x {row['yardstick']}"
        for row in measured
        if row["side"] == DEFAULT
    ]
    job.keep(results)


def _sides(batch: Batch, padded: list[Tensors], backends: tuple[str, ...]) -> dict[str, Side]:
    sdpa, visible = F.scaled_dot_product_attention, _is_token(batch)[:, None, None, :]  # (B, 1, 1, S)
    if batch.case.is_causal:
        longest = batch.call.max_q
        visible = visible & torch.ones(longest, longest, dtype=torch.bool, device=batch.device).tril()
    compared = {
        TORCH: Side(batch.with_torch, batch.sets, torch_alone),
        UNMASKED: Side(functools.partial(sdpa, is_causal=batch.case.is_causal), padded, torch_alone),
        MASKED: Side(functools.partial(sdpa, attn_mask=visible), padded, torch_alone),
        DEFAULT: Side(batch.with_attnreg, batch.sets, by_default),
    }
    for name in backends:
        within = functools.partial(api.register_backend, name)
        compared[LED + name] = Side(batch.with_attnreg, batch.sets, within, wanted=name)
    return compared


def _pad(batch: Batch, x: Tensor) -> Tensor:
    """Return packed rows padded, (B, H, S, D)."""
    return pad_sequence(list(torch.split(x, list(batch.case.lens_q))), batch_first=True).transpose(1, 2)


def _is_token(batch: Batch) -> Tensor:
    """Return what of the padded rows isn't padding, (B, S)."""
    positions = torch.arange(batch.call.max_q, device=batch.device)
    lengths: Tensor = batch.offsets[0].diff()
    return positions < lengths[:, None]


def _padded_sample(batch: Batch, padded: Tensors) -> Sample:
    """Return what attention that sees the padding gives."""
    case, count = batch.case, len(batch.case.lens_q)
    padded_case = replace(case, lens_q=(case.max_q,) * count, lens_k=(case.max_k,) * count, varlen=False)
    call = batch.call._replace(cu_seqlens_q=None, cu_seqlens_k=None)
    return Sample(padded_case, Inputs(*padded.mapped(lambda x: x.transpose(1, 2).detach()), call))


def _verdict(batch: Batch, padded: Sample, name: str, results: list[Tensor]) -> Verdict:
    """Return how wrong a side is: SDPA's have another layout, and without a mask it sees the padding."""
    if name not in (UNMASKED, MASKED):
        return batch.verdict(results, batch.sets)
    bshd = [x.transpose(1, 2) for x in results]
    if name == UNMASKED:
        return padded.verdict(named(bshd))
    return batch.sample.verdict(named(x[_is_token(batch)] for x in bshd))
