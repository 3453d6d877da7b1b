"""Dense attention on a CPU: torch's kernel against the compiled one, on shapes drawn at random.

    python benchmarks/cpu_sdpa.py [--shapes N] [--seed N] [--threads N] [--rounds N] [--json FILE]

Both get the tensors of an SDPA call, (B, H, S, D) in memory, and return what its op returns: torch's kernel
as attnreg captures it, the compiled one (`attnreg build`) through its launcher. They take turns, forward and
backward separately. A ratio is torch's time over the compiled kernel's, the median over the rounds.

`attnreg/backends/cpu/choice.py` decides by what was measured here. The table shows how good its decisions
are: geometric mean and worst ratio of the calls that it moves to the compiled kernel, geometric mean and best
of those that it leaves to torch.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from attnreg.backends import cpu
from attnreg.backends.cpu import choice, compiled
from attnreg.backends.cpu.flash import Flash
from attnreg.bench.report import save, show, show_machine
from attnreg.contract.backend import Call
from attnreg.contract.spec import AttentionSpec, Device
from attnreg.measure.timing import calls_for, interleaved, median_ratio

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Sides = dict[str, Callable[[], Any]]

# Operations of a forward at most: larger calls take long, and are like these.
MOST_WORK = 3e9
# Seconds of one side in one round.
ROUND = 0.01


def drawn(draw: random.Random, dtype: str) -> AttentionSpec:
    """Draw a call that doesn't take too long."""
    while True:
        length = round(2 ** draw.uniform(4, 12))
        other = round(2 ** draw.uniform(0, 12)) if draw.random() < 0.2 else length
        heads_k, dim = draw.choice((1, 2, 4, 8, 16)), draw.choice((32, 64, 64, 80, 128, 128, 256))
        heads, batch = heads_k * draw.choice((1, 1, 2, 4, 8)), draw.randint(1, 8)
        is_causal = other == length and draw.random() < 0.5
        if 4.0 * batch * heads * other * length * dim <= MOST_WORK:
            return AttentionSpec(
                device=Device("cpu"), dtype=dtype, batch=batch, max_q=other, max_k=length, heads_q=heads,
                heads_k=heads_k, head_dim=dim, head_dim_v=dim, window=(-1, 0) if is_causal else (-1, -1),
            )  # fmt: skip


def sides(spec: AttentionSpec) -> Iterator[tuple[str, Sides]]:
    """Yield each direction with the functions that run the call."""
    dtype, scale = getattr(torch, spec.dtype), spec.head_dim**-0.5
    q, grad = torch.randn(2, spec.batch, spec.heads_q, spec.max_q, spec.head_dim).to(dtype)
    k, v = torch.randn(2, spec.batch, spec.heads_k, spec.max_k, spec.head_dim).to(dtype)
    flash, kernel = Flash.captured(), compiled.load()
    if kernel is None:
        sys.exit("there is no compiled kernel: run `attnreg build`")
    out, lse = flash.forward_kernel(q, k, v, 0.0, spec.causal, scale=scale)
    call = Call(scale, spec.max_q, spec.max_k, spec.window)
    given = tuple(x.transpose(1, 2) for x in (q, k, v))
    back = (grad.transpose(1, 2), *given, out.transpose(1, 2), lse)
    forward: Any = kernel.specialize("forward", given, call)
    backward: Any = kernel.specialize("backward", back, call)
    torch.testing.assert_close(forward(*given)[0], out.transpose(1, 2), atol=0.02, rtol=0.02)
    yield (
        "forward",
        {
            "torch": lambda: flash.forward_kernel(q, k, v, 0.0, spec.causal, scale=scale),
            "compiled": lambda: forward(*given),
        },
    )
    gradients = (grad, q, k, v, out, lse, 0.0, spec.causal)
    yield (
        "backward",
        {
            "torch": lambda: flash.backward_kernel(*gradients, scale=scale),
            "compiled": lambda: backward(*back),
        },
    )


def per_call(run: Callable[[], Any], calls: int) -> float:
    """Return the seconds of one call; with one thread those of the CPU, which other programs don't add to."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    for _ in range(calls):
        run()
    return (clock() - start) / calls


def measure(spec: AttentionSpec, direction: str, runs: Sides, rounds: int) -> dict[str, Any]:
    """Time one direction of a call."""
    calls = {name: calls_for(ROUND, per_call(run, 1)) for name, run in runs.items()}
    taken = interleaved({name: lambda name=name: per_call(runs[name], calls[name]) for name in runs}, rounds)
    return {
        "call": str(spec),
        "dtype": spec.dtype,
        "direction": direction,
        "threads": torch.get_num_threads(),
        "microseconds": {name: statistics.median(times) * 1e6 for name, times in taken.items()},
        "ratio": median_ratio(taken["torch"], taken["compiled"]),
        "moved": choice.replaces_torch(direction, spec),  # type: ignore[arg-type]
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
    """Draw calls, time them, and print what the rule makes of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("shapes", 40), ("seed", 0), ("threads", torch.get_num_threads()), ("rounds", 9)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    show_machine()
    draw, results = random.Random(options.seed), []
    for dtype in ("float32", "bfloat16", "float16") * options.shapes:
        spec = drawn(draw, dtype)
        results += [measure(spec, *each, options.rounds) for each in sides(spec)]
    header = ("calls", "moved", "their ratio", "worst", "left", "their ratio", "best")
    title = f"cpu {cpu.BACKEND.version()}, {options.threads} threads: torch's time over the compiled kernel's"
    show(title, header, list(summary(results)))
    save(options.json, results)


if __name__ == "__main__":
    main()
