"""Packed sequences on a GPU, in the setting of PyTorch's PR #164502: attnreg, torch's varlen_attn, SDPA.

    python benchmarks/varlen_gpu.py [--quick] [--rounds N] [--json FILE] [--plot FILE]

8 sequences, lengths random multiples of 64 up to 2048, 16 heads, bfloat16; head dim 64 and 128, causal
or not. Times are the device's, with the host ahead of it. The sides take turns; each is first held to
attention in float64. Padded SDPA gets its tensors already padded; without a mask it computes
something else, since its tokens see the padding, and is held to that. TFLOP/s count what the real
lengths need.
"""

from __future__ import annotations

import argparse
import functools
import random
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from _batch import TOLERANCE, Batch, Tensors, exact, far
from _gpu import gpu_per_call, matmul_rate, need_gpu
from _report import interleaved, median_ratio, save, show, show_machine
from _sides import STEPS, Side, available, by_default, led_by, misled, mixed, served, torch_alone
from torch.nn.utils.rnn import pad_sequence

import attnreg

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

HEADS, LONGEST = 16, 2048
TORCH, UNMASKED, MASKED = "torch varlen_attn", "SDPA, padded", "SDPA, padded, mask"
DEFAULT = "attnreg, default order"
AIMS = {"forward": 1.4, "forward + backward": 1.6}


def lengths(batch: int, seed: int = 0) -> list[int]:
    """Return random multiples of 64, the last of them the longest."""
    draw = random.Random(seed)
    return [*(64 * draw.randint(1, LONGEST // 64) for _ in range(batch - 1)), LONGEST]


def padded(batch: Batch, masked: bool) -> tuple[list[Tensors], Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Return the batch's sets as (B, H, S, D), and SDPA over such tensors."""

    def pad(x: Tensor) -> Tensor:
        return pad_sequence(x.split(batch.lengths), batch_first=True).transpose(1, 2)

    positions = torch.arange(batch.longest, device="cuda")
    visible = (positions < batch.offsets.diff()[:, None])[:, None, None, :]
    if batch.causal:
        visible = visible & (positions[:, None] >= positions)
    options = {"attn_mask": visible} if masked else {"is_causal": batch.causal}
    sdpa = functools.partial(F.scaled_dot_product_attention, **options)
    return [tensors.mapped(pad) for tensors in batch.sets], sdpa


def packed(batch: Batch, x: Tensor, everything: bool) -> Tensor:
    """Return (B, H, S, D) as packed tensors, with or without the padding."""
    x = x.detach().transpose(1, 2)
    is_token = torch.arange(batch.longest, device="cuda") < batch.offsets.diff()[:, None]
    return x.flatten(0, 1) if everything else x[is_token]


def sides(batch: Batch, backends: list[str | attnreg.Backend]) -> dict[str, Side]:
    """Return all that are compared."""
    plain, sdpa = padded(batch, masked=False)
    found = {
        TORCH: Side(batch.with_torch, batch.sets, torch_alone),
        UNMASKED: Side(sdpa, plain, torch_alone),
        MASKED: Side(padded(batch, masked=True)[1], plain, torch_alone),
        DEFAULT: Side(batch.with_attnreg, batch.sets, by_default),
    }
    for backend in backends:
        name = backend if isinstance(backend, str) else backend.name
        found[f"attnreg, {name}"] = Side(batch.with_attnreg, batch.sets, led_by(backend))
    return found


def checked(batch: Batch, all_sides: dict[str, Side]) -> dict[str, tuple[Side, float]]:
    """Return the sides that are right, and how far they are off; prints why the others are left out."""
    truth = exact(batch.sets[0], batch.lengths, batch.causal)
    right = {}
    for name, side in all_sides.items():
        expected = truth
        attnreg.reset_stats()
        try:
            got = side.results()
            if name in (UNMASKED, MASKED):
                got = [packed(batch, x, everything=name == UNMASKED) for x in got]
            if name == UNMASKED:
                whole = Tensors(*(packed(batch, x, everything=True) for x in side.sets[0]))
                expected = exact(whole, [batch.longest] * len(batch.lengths), batch.causal)
            error = far(got, expected)
        except Exception as problem:  # noqa: BLE001 - one side that breaks must not hide the others
            print(f"left out: {name}: {type(problem).__name__}: {problem}")
            continue
        ran = served() if name.startswith("attnreg") else "torch"
        if not error <= TOLERANCE:
            print(f"left out: {name}: WRONG, relative error {error:.2g}, at most {TOLERANCE}; ran {ran}")
        elif ran != "torch" and name != DEFAULT and misled(name.removeprefix("attnreg, ")):
            print(f"left out: {name}: ran {ran}")
        else:
            right[name] = side, error
        if name == DEFAULT:
            print(f"{name}: ran {ran}")
    return right


def flops(batch: Batch, step: str) -> float:
    """Return what the scores of the real lengths cost."""
    whole = 4 * HEADS * batch.dim * sum(n * n for n in batch.lengths)
    return whole * (0.5 if batch.causal else 1.0) * (3.5 if "backward" in step else 1.0)


def measure(
    batch: Batch, backends: list[str | attnreg.Backend], rate: float, rounds: int, calls: int
) -> list[dict[str, Any]]:
    """Time all sides of one case; prints its table."""
    found = checked(batch, sides(batch, backends))
    if TORCH not in found:
        sys.exit(f"{TORCH} is what all is compared with, and it doesn't run here")
    timer = functools.partial(gpu_per_call, ahead=True)
    case = f"head dim {batch.dim}{', causal' if batch.causal else ''}"
    results = []
    for step, run in STEPS.items():
        taken = interleaved(
            {name: side.timed(run, calls, timer) for name, (side, _) in found.items()}, rounds
        )
        for name, seconds in taken.items():
            speed = flops(batch, step) / statistics.median(seconds)
            results.append(
                {
                    "case": case,
                    "step": step,
                    "side": name,
                    "milliseconds": statistics.median(seconds) * 1e3,
                    "fastest_and_slowest": [min(seconds) * 1e3, max(seconds) * 1e3],
                    "times_torch_varlen": median_ratio(taken[TORCH], seconds),
                    "teraflops": speed / 1e12,
                    "of_matmul_rate": speed / rate,
                    "relative_error": found[name][1],
                }
            )
    for step in STEPS:
        rows = [
            (row["side"], f"{row['milliseconds']:.3f}", f"{row['times_torch_varlen']:.2f}",
             f"{row['teraflops']:.0f}", f"{row['of_matmul_rate']:.0%}", f"{row['relative_error']:.1e}")
            for row in results if row["step"] == step
        ]  # fmt: skip
        header = ("side", "ms", "x torch", "TFLOP/s", "of matmul", "error")
        show(f"{case}, {step} (aim: {AIMS[step]} x torch)", header, rows)
    return results


def main() -> None:
    """Run every case, print its tables, and whether the aims are reached."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one case, a few rounds")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=10, help="per measurement")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    need_gpu()
    show_machine()
    rounds = 3 if options.quick else options.rounds
    cases = [(64, False)] if options.quick else [(d, c) for d in (64, 128) for c in (False, True)]
    drawn, rate = lengths(8), matmul_rate()
    used = sum(drawn) / (8 * LONGEST)
    print(f"matmul 8192^3 in bfloat16: {rate / 1e12:.0f} TFLOP/s; lengths {drawn}, {used:.0%} of the padded")
    backends: list[str | attnreg.Backend] = [*available()]
    if {"cuDNN", "FA4"} <= set(backends):
        backends.append(mixed("cuDNN", "FA4"))
    results: list[dict[str, Any]] = []
    for dim, causal in cases:
        results += measure(Batch(drawn, HEADS, dim, causal, sets=3), backends, rate, rounds, options.calls)
        save(options.json, {"lengths": drawn, "matmul_teraflops": rate / 1e12, "rows": results})
    for row in results:
        if row["side"] == DEFAULT:
            reached = "reached" if row["times_torch_varlen"] >= AIMS[row["step"]] else "MISSED"
            print(f"{row['case']}, {row['step']}: {row['times_torch_varlen']:.2f} x torch, aim {reached}")
    if options.plot is not None:
        from _plot import draw

        title = f"8 packed sequences of 64 to 2048 tokens, 16 heads, bfloat16, {torch.cuda.get_device_name()}"
        draw(results, TORCH, title, options.plot)


if __name__ == "__main__":
    main()
