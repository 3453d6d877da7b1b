"""The cost of `varlen_attn`'s options: a call with an option and without, on each backend that supports it.

    python benchmarks/options.py [--device cpu|cuda] [--backends FA2,FA4,cuDNN] [--rounds N] [--threads N]
                                 [--out FILE]

Calls are packed and causal, in bfloat16, on a CPU also in float32. Options: softcap, sinks with their
gradient, ALiBi, dropout, keys in pages of 16 tokens and of a single token, and the LSE with a gradient of its
own. Calls take turns. The figure is the ratio of times on the device, by round, median. On a CPU with one
thread the time is the thread's CPU time, to which other programs don't add. The aim, on a GPU: at most 1.10
if the kernel itself has the option. A refusal is a row with its reason.
"""

from __future__ import annotations

import statistics
import time
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from _program import parser_of, show, show_machine

import attnreg
from attnreg.tools.bench.report import save
from attnreg.tools.measure import Case, inputs
from attnreg.tools.measure.timing import calls_for, interleaved, median_ratio, per_call, timer_for

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
        Sizes((2048, 1500, 4000, 700, 3100), (16, 8), 256, "bfloat16"),  # as Gemma 2, which has a softcap
    ],
    "cpu": [
        Sizes((300, 180, 512, 77), (8, 2), 64, "float32"),
        Sizes((300, 180, 512, 77), (8, 2), 64, "bfloat16"),
    ],
}


def options_of(sizes: Sizes, device: torch.device, backward: bool) -> dict[str, dict[str, Any]]:
    """Return the arguments that each option adds to a call."""
    heads = sizes.heads[0]
    sinks = torch.randn(heads, device=device).to(getattr(torch, sizes.dtype)).requires_grad_(backward)
    slopes = torch.rand(heads, device=device)
    options: dict[str, dict[str, Any]] = {
        PLAIN: {},
        "softcap": {"softcap": 20.0},
        "sinks": {"sinks": sinks},
        "ALiBi": {"alibi_slopes": slopes},
        "dropout": {"dropout_p": 0.1},
    }
    return options | (
        {"gradient of the LSE": {"return_aux": attnreg.AuxRequest(lse=True)}} if backward else {}
    )


def in_pages(lengths: tuple[int, ...], size: int, *tensors: Tensor) -> tuple[list[Tensor], dict[str, Any]]:
    """Return keys and values in pages, in random order, and the arguments that describe the pages."""
    counts = [-(-length // size) for length in lengths]
    order = torch.randperm(sum(counts)).to(tensors[0].device)
    pools = [x.new_zeros(sum(counts), size, *x.shape[1:]) for x in tensors]
    table = order.new_zeros(len(lengths), max(counts), dtype=torch.int32)
    begin = first = 0
    for number, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        pages = table[number, :count] = order[first : first + count]
        places = torch.arange(length, device=order.device)
        for pool, x in zip(pools, tensors, strict=True):
            pool[pages[places // size], places % size] = x[begin : begin + length].detach()
        begin, first = begin + length, first + count
    used = torch.tensor(lengths, dtype=torch.int32, device=order.device)
    pools = [pool.requires_grad_(x.requires_grad) for pool, x in zip(pools, tensors, strict=True)]
    return pools, {"block_table": table, "seqused_k": used}


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
    offsets, longest = call.cu_seqlens_q, call.max_q

    def of(arguments: dict[str, Any], keys: list[Tensor] = rest) -> Callable[[], object]:
        of_keys = None if "block_table" in arguments else offsets
        leaves = [
            query,
            *keys,
            *(x for x in arguments.values() if isinstance(x, torch.Tensor) and x.requires_grad),
        ]

        def run() -> object:
            out = attnreg.varlen_attn(
                query,
                *keys,
                offsets,
                of_keys,
                longest,
                longest,
                True,
                enable_gqa=True,
                backend=backend,
                **arguments,
            )
            if not backward:
                return out
            results: list[Tensor] = list(out) if isinstance(out, tuple) else [out]
            return torch.autograd.grad(results, leaves, [grad, *map(torch.ones_like, results[1:])])

        return run

    runs = {name: of(arguments) for name, arguments in options_of(sizes, device, backward).items()}
    for size in (16, 1):
        keys, arguments = in_pages(sizes.lengths, size, *rest)
        runs[f"pages of {size}"] = of(arguments, keys)
    return runs


def measure(
    sizes: Sizes, backend: str, device: torch.device, backward: bool, rounds: int
) -> list[dict[str, Any]]:
    """Time each option on a backend; a refusal has its reason instead of a time."""
    timer, rows, able = timer_for(device), [], {}
    step = BOTH if backward else FORWARD
    about: dict[str, Any] = {"backend": backend, "longest": max(sizes.lengths), "head dim": sizes.dim}
    about |= {"dtype": sizes.dtype, "step": step}
    for name, run in calls(sizes, backend, device, backward).items():
        try:
            run()
            able[name] = run
        except attnreg.AttnregError as problem:
            of_backends = getattr(problem, "rejected", {})
            reasons = of_backends.get(backend) or (str(problem).splitlines()[0],)
            rows.append(about | {"option": name, "refused": "; ".join(reasons)})
    if PLAIN not in able:
        return rows
    often = calls_for(0.01, per_call(able[PLAIN], 2), most=20)

    def seconds(run: Callable[[], object]) -> float:
        if device.type == "cpu" and torch.get_num_threads() == 1:
            return per_call(run, often, time.thread_time)
        return timer.device_and_host(run, often).device

    taken = interleaved({name: lambda run=run: seconds(run) for name, run in able.items()}, rounds)
    for name, times in taken.items():
        ratio = median_ratio(times, taken[PLAIN])
        rows.append(about | {"option": name, "milliseconds": statistics.median(times) * 1e3, "ratio": ratio})
    return rows


def main() -> None:
    """Measure every backend and print the table."""
    parser = parser_of(__doc__, rounds=9, devices=SIZES)
    parser.add_argument("--backends", help="comma list; default: FA2,FA4,cuDNN on a GPU, cpu on a CPU")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    names = (options.backends or ("FA2,FA4,cuDNN" if device.type == "cuda" else "cpu")).split(",")
    show_machine()
    rows: list[dict[str, Any]] = []
    for sizes, backend, backward in product(SIZES[options.device], names, (False, True)):
        rows += measure(sizes, backend, device, backward, options.rounds)
        save(options.out, rows)  # FA4 compiles a kernel for each option, which takes minutes in all
    cells = [
        (
            row["backend"], str(row["longest"]), str(row["head dim"]), row["dtype"],
            row["step"], row["option"],
            f"{row['milliseconds']:.3f}" if "ratio" in row else row["refused"][:90],
            f"{row['ratio']:.2f}" if "ratio" in row else "",
        )
        for row in rows
    ]  # fmt: skip
    header = ("backend", "longest", "head dim", "dtype", "step", "option", "ms", "over no option")
    show("What each option costs, on the device", header, cells)


if __name__ == "__main__":
    main()
