"""What the options of `varlen_attn` cost: a call with an option and without, on each backend that takes it.

    python benchmarks/options.py [--device cpu|cuda] [--backends FA2,FA4,cuDNN] [--rounds N] [--out FILE]

Packed, causal, bfloat16 on a GPU and float32 on a CPU. Options: softcap, sinks with their gradient, ALiBi,
dropout, and the LSE with a gradient of its own. Calls take turns, and the figure is the ratio of the times
on the device, round by round, median. The aim, on a GPU: at most 1.10 where the kernel itself has the option.
A refusal is a row with its reason.
"""

from __future__ import annotations

import argparse
import statistics
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import attnreg
from attnreg.bench.report import save, show, show_machine
from attnreg.measure import Case, inputs
from attnreg.measure.timing import calls_for, interleaved, median_ratio, per_call, timer_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

PLAIN = "no option"
FORWARD, BOTH = "forward", "forward + backward"


class Sizes(NamedTuple):
    """The tensors of a call: lengths of the sequences, query and key heads, head dim."""

    lengths: tuple[int, ...]
    heads: tuple[int, int]
    dim: int
    dtype: str


SIZES = {
    "cuda": [
        Sizes((2048, 1500, 4000, 700, 3100), (16, 4), 128, "bfloat16"),
        Sizes((300, 180, 512, 77), (16, 4), 64, "bfloat16"),
    ],
    "cpu": [Sizes((300, 180, 512, 77), (8, 2), 64, "float32")],
}


def options_of(sizes: Sizes, device: torch.device, backward: bool) -> dict[str, dict[str, Any]]:
    """Return what each option adds to the arguments of a call."""
    heads = sizes.heads[0]
    sinks = torch.randn(heads, device=device).to(getattr(torch, sizes.dtype)).requires_grad_(backward)
    slopes = torch.rand(heads, device=device)
    found: dict[str, dict[str, Any]] = {
        PLAIN: {},
        "softcap": {"softcap": 20.0},
        "sinks": {"sinks": sinks},
        "ALiBi": {"alibi_slopes": slopes},
        "dropout": {"dropout_p": 0.1},
    }
    return found | ({"gradient of the LSE": {"return_aux": attnreg.AuxRequest(lse=True)}} if backward else {})


def calls(
    sizes: Sizes, backend: str, device: torch.device, backward: bool
) -> dict[str, Callable[[], object]]:
    """Return a call with each option, forward or both directions."""
    torch.manual_seed(0)
    case = Case(
        name="options", lens_q=sizes.lengths, lens_k=sizes.lengths, varlen=True, heads=sizes.heads,
        dims=(sizes.dim, sizes.dim), dtype=sizes.dtype, one_cu_seqlens=True,
    )  # fmt: skip
    *tensors, grad, call = inputs(case, device, drawn_on=device)
    query, *rest = (x.requires_grad_(backward) for x in tensors)
    ends, longest = call.cu_seqlens_q, call.max_q

    def of(given: dict[str, Any]) -> Callable[[], object]:
        leaves = [
            query,
            *rest,
            *(x for x in given.values() if isinstance(x, torch.Tensor) and x.requires_grad),
        ]

        def run() -> object:
            out = attnreg.varlen_attn(
                query, *rest, ends, ends, longest, longest, True, enable_gqa=True, backend=backend, **given
            )
            if not backward:
                return out
            results: list[Tensor] = list(out) if isinstance(out, tuple) else [out]
            return torch.autograd.grad(results, leaves, [grad, *map(torch.ones_like, results[1:])])

        return run

    return {name: of(given) for name, given in options_of(sizes, device, backward).items()}


def measure(
    sizes: Sizes, backend: str, device: torch.device, backward: bool, rounds: int
) -> list[dict[str, Any]]:
    """Time each option on one backend; a refusal has its reason instead of a time."""
    timer, rows, able = timer_for(device), [], {}
    step = BOTH if backward else FORWARD
    for name, run in calls(sizes, backend, device, backward).items():
        try:
            run()
            able[name] = run
        except attnreg.AttnregError as problem:
            row = {"backend": backend, "longest": max(sizes.lengths), "step": step, "option": name}
            rows.append(row | {"refused": str(problem).splitlines()[0]})
    if PLAIN not in able:
        return rows
    often = calls_for(0.01, per_call(able[PLAIN], 2), most=20)
    taken = interleaved(
        {name: lambda run=run: timer.device_and_host(run, often).device for name, run in able.items()}, rounds
    )
    for name, seconds in taken.items():
        ratio = median_ratio(seconds, taken[PLAIN])
        rows.append(
            {
                "backend": backend, "longest": max(sizes.lengths), "step": step, "option": name,
                "milliseconds": statistics.median(seconds) * 1e3, "ratio": ratio,
            }
        )  # fmt: skip
    return rows


def main() -> None:
    """Measure every backend and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=SIZES, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backends", help="comma list; default: FA2,FA4,cuDNN on a GPU, cpu on a CPU")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    names = (options.backends or ("FA2,FA4,cuDNN" if device.type == "cuda" else "cpu")).split(",")
    show_machine()
    rows: list[dict[str, Any]] = []
    for sizes, backend, backward in product(SIZES[options.device], names, (False, True)):
        rows += measure(sizes, backend, device, backward, options.rounds)
        save(options.out, rows)  # FA4 compiles a kernel for each option, which takes minutes in all
    cells = [
        (
            row["backend"], str(row["longest"]), row["step"], row["option"],
            f"{row['milliseconds']:.3f}" if "ratio" in row else row["refused"][:90],
            f"{row['ratio']:.2f}" if "ratio" in row else "",
        )
        for row in rows
    ]  # fmt: skip
    header = ("backend", "longest", "step", "option", "ms", "over no option")
    show("What each option costs, on the device", header, cells)


if __name__ == "__main__":
    main()
