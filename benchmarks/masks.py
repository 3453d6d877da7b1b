"""Padded batches with a boolean mask: torch's own masked call against the same call with masks recognised.

    python benchmarks/masks.py [--device cpu|cuda] [--rounds N] [--unmasked] [--out FILE]

Each batch is padded on the right to its longest sequence, by 0, 33 and 67 %. Its mask hides the padded keys
(an encoder's), or these and later keys (a decoder's). Both sides get the same tensors (B, H, S, D), in memory
(B, S, H, D), as a model's projections are. The sides take turns: torch's own
`F.scaled_dot_product_attention`, and attnreg's with `masks = "recognise"`. The mask is recognised before the
clock starts, because that happens once for all layers of a step. The time of the first use, with the
read-back, is a column of its own. The figure is torch's time over attnreg's, by round, median.

`--unmasked` measures instead what the look costs a small call without a mask, as attnreg stands in the place
of SDPA: one batch that repeats, by both functions on the same backend.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from _program import parser_of, show, show_machine
from torch.nn.attention import SDPBackend

import attnreg
from attnreg.masks.cache import find
from attnreg.tools.bench.report import save
from attnreg.tools.measure import Case, Inputs, Sample, inputs
from attnreg.tools.measure.timing import calls_for, interleaved, median_ratio, per_call, timer_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

CALLS, BURSTS, WARM_UP = 40, 100, 10  # of the call without a mask

TORCHS = F.scaled_dot_product_attention  # before attnreg replaces it

# The lengths of sequences as shares of the longest, by the share of padding.
PADDINGS = {
    "0 %": (1.0,) * 8,
    "33 %": (1.0, 0.95, 0.85, 0.75, 0.6, 0.5, 0.4, 0.28),
    "67 %": (1.0, 0.6, 0.35, 0.25, 0.2, 0.12, 0.1, 0.05),
}


class Sizes(NamedTuple):
    """The tensors of a call."""

    batch: int
    heads: int
    length: int
    dim: int
    dtype: str


SIZES = {
    "cpu": [Sizes(8, 8, 512, 64, "float32"), Sizes(8, 8, 512, 64, "bfloat16")],
    "cuda": [
        Sizes(16, 16, 1024, 128, "bfloat16"),
        Sizes(8, 16, 2048, 128, "bfloat16"),
        Sizes(8, 16, 4096, 128, "bfloat16"),
    ],
}


def mask_of(sizes: Sizes, padding: str, causal: bool, device: torch.device) -> Tensor:
    """Return a mask of right-padded keys, causal or not."""
    counts = (torch.tensor(PADDINGS[padding]) * sizes.length).round().repeat(sizes.batch // 8)
    places = torch.arange(sizes.length)
    mask = (places < counts[:, None])[:, None, None]
    return ((mask & (places[:, None] >= places)) if causal else mask).to(device)


def measure(
    sizes: Sizes, padding: str, causal: bool, backward: bool, device: torch.device, rounds: int
) -> dict[str, Any]:
    """Time a batch on both sides; return milliseconds, and which kernels ran."""
    lengths, timer = (sizes.length,) * sizes.batch, timer_for(device)
    case = Case(
        name=padding, lens_q=lengths, lens_k=lengths, heads=(sizes.heads, sizes.heads),
        dims=(sizes.dim, sizes.dim), dtype=sizes.dtype,
    )  # fmt: skip
    drawn_inputs = inputs(case, device, drawn_on=device)
    tensors = [x.requires_grad_(backward).transpose(1, 2) for x in drawn_inputs[:3]]
    mask, grad_out = mask_of(sizes, padding, causal, device), drawn_inputs.grad_out.transpose(1, 2)

    def side(function: Callable[..., Tensor]) -> Callable[[], list[Tensor]]:
        def run() -> list[Tensor]:
            out = function(*tensors, attn_mask=mask)
            return [out, *(torch.autograd.grad(out, tensors, grad_out) if backward else ())]

        return run

    runs = {"torch": side(TORCHS), "attnreg": side(F.scaled_dot_product_attention)}
    attnreg.reset_stats()
    check(runs, case, drawn_inputs._replace(call=drawn_inputs.call._replace(attn_bias=mask)))
    stats = attnreg.stats()
    calls = calls_for(0.05, per_call(runs["attnreg"], 1))
    taken = interleaved(
        {name: lambda run=run: timer.back_to_back(run, calls) for name, run in runs.items()}, rounds
    )
    choice = torch._fused_sdp_choice(*tensors, attn_mask=mask)
    return {
        "length": sizes.length,
        "dtype": sizes.dtype,
        "padding": padding,
        "mask": "causal" if causal else "keys",
        "directions": "forward + backward" if backward else "forward",
        "keys_hidden": 1.0 - float(mask[:, 0, -1].float().mean()),
        "milliseconds": {name: statistics.median(seconds) * 1e3 for name, seconds in taken.items()},
        "ratio": median_ratio(taken["torch"], taken["attnreg"]),
        "look": look(mask, sizes, rounds) * 1e3,
        "torchs_kernels": [SDPBackend(choice).name.lower()],
        "seen": [row.seen for row in stats.masks],
        "backends": sorted(stats.calls),
    }


def check(runs: dict[str, Callable[[], list[Tensor]]], case: Case, drawn_inputs: Inputs) -> None:
    """Exit if a side breaks the accuracy rule."""
    sample = Sample(case, drawn_inputs)
    for name, run in runs.items():
        results = zip(("out", "dq", "dk", "dv"), run(), strict=False)
        if wrong := sample.verdict({which: x.detach().transpose(1, 2) for which, x in results}).wrong:
            sys.exit(f"{case}, {name}: {wrong}")


def look(mask: Tensor, sizes: Sizes, rounds: int) -> float:
    """Return the seconds of a mask's first use, with the read-back."""
    masks = [mask.clone() for _ in range(rounds + 1)]
    of_call = sizes.batch, sizes.length, sizes.length
    _warm_up, *seconds = (per_call(lambda x=x: find(x, of_call), 1) for x in masks)
    return statistics.median(seconds)


def unmasked(device: torch.device, rounds: int) -> tuple[float, float]:
    """Return the microseconds of a small call without a mask: through attnreg's SDPA, and through torch's."""
    timer, ways = timer_for(device), {"attnreg": F.scaled_dot_product_attention, "torch": TORCHS}
    case = Case(name="small", lens_q=(8,), lens_k=(8,), heads=(4, 4), dims=(64, 64), dtype="bfloat16")
    tensors = [x.transpose(1, 2) for x in inputs(case, device)[:3]]

    def burst(function: Callable[..., Tensor]) -> float:
        return timer.back_to_back(lambda: function(*tensors, is_causal=True), CALLS)

    bursts = {name: lambda function=function: burst(function) for name, function in ways.items()}
    interleaved(bursts, WARM_UP)
    taken = interleaved(bursts, BURSTS * rounds)
    attnregs, torchs = (statistics.median(taken[name]) * 1e6 for name in ways)
    return attnregs, torchs


def row(result: dict[str, Any]) -> tuple[str, ...]:
    """Return a result as a row of the table."""
    what = f"{result['length']}, {result['dtype']}, {result['mask']}, {result['directions']}"
    times = (f"{result['milliseconds'][side]:.2f}" for side in ("torch", "attnreg"))
    return (what, result["padding"], *times, f"{result['ratio']:.2f}", f"{result['look']:.2f}")


def main() -> None:
    """Measure every batch and print the table."""
    parser = parser_of(__doc__, rounds=11, devices=SIZES)
    parser.add_argument("--unmasked", action="store_true", help="measure a call without a mask")
    options = parser.parse_args()
    show_machine()
    attnreg.configure({"masks": "recognise"})
    device, results = torch.device(options.device), []
    if options.unmasked:
        attnregs, torchs = unmasked(device, options.rounds)
        print(f"microseconds: {attnregs:.2f} through attnreg's SDPA, {torchs:.2f} through torch's")
        save(options.out, {"attnreg": attnregs, "torch": torchs})
        return
    cases = itertools.product(SIZES[options.device], (False, True), (False, True), PADDINGS)
    for sizes, causal, backward, padding in cases:
        results.append(measure(sizes, padding, causal, backward, device, options.rounds))
        print(" · ".join(row(results[-1])), file=sys.stderr, flush=True)
    header = ("length, dtype, mask, directions", "padding", "torch", "attnreg", "times as fast", "first look")
    show("ms; last, what a mask takes once for all layers", header, [row(result) for result in results])
    kernels, backends, kinds = (
        sorted({name for result in results for name in result[key]})
        for key in ("torchs_kernels", "backends", "seen")
    )
    print(
        f"torch's kernels {', '.join(kernels)}; backends {', '.join(backends)}; masks were {'; '.join(kinds)}"
    )
    save(options.out, results)


if __name__ == "__main__":
    main()
