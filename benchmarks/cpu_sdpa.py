"""Dense attention on a CPU: torch's kernel against the compiled one, on shapes drawn at random.

    python benchmarks/cpu_sdpa.py [--shapes N] [--seed N] [--threads N] [--rounds N]
                                  [--masked | --decode] [--out FILE]

Both kernels get the tensors of an SDPA call, (B, H, S, D) in memory, and return the results of its op.
Torch's kernel is called as attnreg captures it, the compiled kernel (`attnreg build`) through its launcher.
They take turns, forward and backward separately. A ratio is torch's time over the compiled kernel's, the
median over the rounds.

With `--masked` each call has a boolean mask of padded keys, which torch's kernel gets as numbers to add. The
compiled kernel has no masks: it gets the number of keys of each sequence that count. With `--decode` calls
are forwards of one to four queries.

`backends/cpu/choice.py` decides by results of this script. The table shows how good its decisions are:
geometric mean and worst ratio of calls moved to the compiled kernel, geometric mean and best ratio of calls
left to torch.
"""

from __future__ import annotations

import functools
import itertools
import random
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

import torch
from _program import parser_of, show, show_machine

from attnreg.backends import cpu
from attnreg.backends.cpu import choice, compiled
from attnreg.backends.cpu.flash import Flash
from attnreg.core.contract.spec import AttentionSpec, Device, Direction
from attnreg.tools.bench.report import save
from attnreg.tools.measure import Case, Inputs, Sample, inputs
from attnreg.tools.measure.reference import Results
from attnreg.tools.measure.timing import calls_for, interleaved, median_ratio, per_call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Sides = dict[str, Callable[[], Any]]

# The most operations of a forward: larger calls take long, and behave like these.
MOST_WORK = 3e9
# The most numbers of the keys of a decode: 200 MB of float32.
MOST_NUMBERS = 5e7
# Seconds of a side in a round.
ROUND = 0.01


def drawn(draw: random.Random, dtype: str, masked: bool) -> AttentionSpec:
    """Draw a call that doesn't take too long."""
    while True:
        length = round(2 ** draw.uniform(4, 12))
        other = round(2 ** draw.uniform(0, 12)) if draw.random() < 0.2 else length
        heads_k, dim = draw.choice((1, 2, 4, 8, 16)), draw.choice((32, 64, 64, 80, 128, 128, 256))
        heads, batch = heads_k * draw.choice((1, 1, 2, 4, 8)), draw.randint(1, 8)
        is_causal = other == length and draw.random() < 0.5 and not masked
        if 4.0 * batch * heads * other * length * dim <= MOST_WORK:
            return AttentionSpec(
                device=Device("cpu"), dtype=dtype, batch=batch, max_q=other, max_k=length, heads_q=heads,
                heads_k=heads_k, head_dim=dim, head_dim_v=dim, window=(-1, 0) if is_causal else (-1, -1),
                bias=masked,
            )  # fmt: skip


def drawn_decode(draw: random.Random, dtype: str) -> AttentionSpec:
    """Draw a call of few queries, as in a step of decoding."""
    while True:
        length, batch = round(2 ** draw.uniform(6, 13)), draw.randint(1, 16)
        heads, dim = draw.choice((4, 8, 12, 16, 24, 32)), draw.choice((32, 64, 64, 80, 96, 128, 128, 256))
        heads_k = draw.choice([number for number in range(1, heads + 1) if heads % number == 0])
        if batch * length * heads_k * dim <= MOST_NUMBERS:
            return AttentionSpec(
                device=Device("cpu"), dtype=dtype, batch=batch, max_q=draw.randint(1, 4), max_k=length,
                heads_q=heads, heads_k=heads_k, head_dim=dim, head_dim_v=dim,
            )  # fmt: skip


def case_of(spec: AttentionSpec) -> Case:
    """Return a drawn call as a `Case`, (B, H, S, D) in memory as those of SDPA are."""
    return Case(
        name="drawn", lens_q=(spec.max_q,) * spec.batch, lens_k=(spec.max_k,) * spec.batch,
        heads=(spec.heads_q, spec.heads_k), dims=(spec.head_dim, spec.head_dim), window=spec.window,
        dtype=spec.dtype, layout="bhsd", grad_layout="bhsd", bias="key padding" if spec.bias else "none",
    )  # fmt: skip


def sides(spec: AttentionSpec) -> Iterator[tuple[Direction, Sides]]:
    """Yield each direction with the functions that run the call."""
    flash, kernel, case = Flash.captured(), compiled.load(), case_of(spec)
    if kernel is None:
        sys.exit("there is no compiled kernel: run `attnreg build`")
    drawn_inputs = inputs(case)
    *tensors, grad, call = drawn_inputs
    options: dict[str, Any] = {"scale": call.scale}
    ours = call
    if (mask := call.attn_bias) is not None:
        options["attn_mask"] = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf).to(grad.dtype)
        ours = call._replace(attn_bias=None, seqused_k=mask.sum(-1, dtype=torch.int32).flatten())
    dense, grad_dense = [x.transpose(1, 2) for x in tensors], grad.transpose(1, 2)
    out, lse = flash.forward_kernel(*dense, 0.0, spec.causal, **options)
    gradients, back = (grad_dense, *dense, out, lse), (grad, *tensors, out.transpose(1, 2), lse)
    forward: Any = kernel.specialize("forward", tuple(tensors), ours)
    backward: Any = kernel.specialize("backward", back, ours)
    if forward is None or backward is None:  # calls with `seqused_k` have no launchers
        forward, backward = (functools.partial(run, call=ours) for run in (kernel.forward, kernel.backward))
    check(case, drawn_inputs, Results(*forward(*tensors), *backward(*back)))
    yield (
        "forward",
        {
            "torch": lambda: flash.forward_kernel(*dense, 0.0, spec.causal, **options),
            "compiled": lambda: forward(*tensors),
        },
    )
    yield (
        "backward",
        {
            "torch": lambda: flash.backward_kernel(*gradients, 0.0, spec.causal, **options),
            "compiled": lambda: backward(*back),
        },
    )


def check(case: Case, drawn_inputs: Inputs, results: Results) -> None:
    """Exit if the compiled kernel breaks the accuracy rule."""
    named = {name: result for name, result in results._asdict().items() if result is not None}
    if wrong := Sample(case, drawn_inputs).verdict(named).wrong:
        sys.exit(f"{case} {case.lens_q} {case.lens_k} {case.heads} {case.dims}: {wrong}")


def once(run: Callable[[], Any], calls: int) -> float:
    """Return the seconds of a call; with one thread its CPU time, to which other programs don't add."""
    return per_call(run, calls, time.thread_time if torch.get_num_threads() == 1 else None)


def measure(spec: AttentionSpec, direction: Direction, runs: Sides, rounds: int) -> dict[str, Any]:
    """Time one direction of a call."""
    calls = {name: calls_for(ROUND, once(run, 1)) for name, run in runs.items()}
    taken = interleaved({name: lambda name=name: once(runs[name], calls[name]) for name in runs}, rounds)
    return {
        "call": str(spec),
        "dtype": spec.dtype,
        "direction": direction,
        "threads": torch.get_num_threads(),
        "microseconds": {name: statistics.median(times) * 1e6 for name, times in taken.items()},
        "ratio": median_ratio(taken["torch"], taken["compiled"]),
        "moved": not spec.bias and choice.replaces_torch(direction, spec),
    }


def summary(results: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each direction and dtype."""
    for what in sorted({(each["direction"], each["dtype"]) for each in results}, reverse=True):
        row = [" ".join(reversed(what))]
        for moved, extreme in ((True, min), (False, max)):
            alike = [each for each in results if (each["direction"], each["dtype"]) == what]
            ratios = [each["ratio"] for each in alike if each["moved"] is moved]
            row.append(str(len(ratios)))
            row += [f"{f(ratios):.2f}" if ratios else "-" for f in (statistics.geometric_mean, extreme)]
        yield tuple(row)


def main() -> None:
    """Draw calls, time them, and print how good the decisions about them are."""
    parser = parser_of(__doc__)
    for name, default in (("shapes", 40), ("seed", 0), ("threads", torch.get_num_threads()), ("rounds", 9)):
        parser.add_argument(f"--{name}", type=int, default=default)
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--masked", action="store_true")
    kinds.add_argument("--decode", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    show_machine()
    draw, results = random.Random(options.seed), []
    for dtype in ("float32", "bfloat16", "float16") * options.shapes:
        spec = drawn_decode(draw, dtype) if options.decode else drawn(draw, dtype, options.masked)
        directions = itertools.islice(sides(spec), 1 if options.decode else 2)
        results += [measure(spec, *each, options.rounds) for each in directions]
    header = ("calls", "moved", "their ratio", "worst", "left", "their ratio", "best")
    title = f"cpu {cpu.BACKEND.version()}, {options.threads} threads: torch's time over the compiled kernel's"
    show(title, header, list(summary(results)))
    save(options.out, results)


if __name__ == "__main__":
    main()
