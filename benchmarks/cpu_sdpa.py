"""Dense attention on a CPU: torch's kernel against the compiled one, on shapes drawn at random.

    python benchmarks/cpu_sdpa.py [--shapes N] [--seed N] [--threads N] [--rounds N] [--json FILE]

Both sides get the tensors of an SDPA call, (B, H, S, D) in memory, and return what its op returns: torch's
kernel as attnreg captures it, the compiled one (`attnreg build`) through its launcher, adapter included. They
take turns, forward and backward apart. A ratio is torch's time over the compiled kernel's, the median over
the rounds.

`attnreg/backends/cpu/choice.py` decides by what was measured here. The table shows how good its decisions
are: of the calls that it moves to the compiled kernel the geometric mean and the worst of the ratios, of
those that it leaves to torch the geometric mean and the best.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from attnreg.backends import cpu
from attnreg.backends.cpu import choice, compiled
from attnreg.backends.cpu.flash import Flash
from attnreg.bench.report import save, show, show_machine
from attnreg.bench.timing import calls_for, interleaved, median_ratio
from attnreg.contract.backend import Call
from attnreg.contract.spec import AttentionSpec, Device

if TYPE_CHECKING:
    from collections.abc import Callable

DTYPES = ("float32", "bfloat16", "float16")
# Products of one forward at most: larger calls take long, and are like these.
MOST_WORK = 3e9
# Seconds of one side in one round.
ROUND = 0.01


class Shape(NamedTuple):
    """A dense call."""

    dtype: str
    batch: int
    heads: int
    heads_k: int
    len_q: int
    len_k: int
    dim: int
    causal: bool

    def spec(self) -> AttentionSpec:
        """Return what selection reads of it."""
        return AttentionSpec(
            device=Device("cpu"), dtype=self.dtype, batch=self.batch, max_q=self.len_q, max_k=self.len_k,
            heads_q=self.heads, heads_k=self.heads_k, head_dim=self.dim, head_dim_v=self.dim,
            window=(-1, 0) if self.causal else (-1, -1),
        )  # fmt: skip


def drawn(draw: random.Random, dtype: str) -> Shape:
    """Draw a shape that doesn't take too long."""
    while True:
        length = round(2 ** draw.uniform(4, 12))
        other = round(2 ** draw.uniform(0, 12)) if draw.random() < 0.2 else length
        group, heads_k = draw.choice((1, 1, 2, 4, 8)), draw.choice((1, 2, 4, 8, 16))
        dim, batch = draw.choice((32, 64, 64, 80, 128, 128, 256)), draw.randint(1, 8)
        causal = other == length and draw.random() < 0.5
        found = Shape(dtype, batch, group * heads_k, heads_k, other, length, dim, causal)
        if 4.0 * batch * found.heads * other * length * dim <= MOST_WORK:
            return found


def sides(shape: Shape) -> dict[str, dict[str, Callable[[], Any]]]:
    """Return what runs the call, by direction and side."""
    dtype, scale = getattr(torch, shape.dtype), shape.dim**-0.5
    q = torch.randn(shape.batch, shape.heads, shape.len_q, shape.dim).to(dtype)
    k, v = torch.randn(2, shape.batch, shape.heads_k, shape.len_k, shape.dim).to(dtype)
    grad = torch.randn(q.shape).to(dtype)
    flash, kernel = Flash.captured(), compiled.load()
    if kernel is None:
        sys.exit("there is no compiled kernel: run `attnreg build`")
    out, lse = flash.forward_kernel(q, k, v, 0.0, shape.causal, scale=scale)
    call = Call(scale, shape.len_q, shape.len_k, shape.spec().window)
    given = tuple(x.transpose(1, 2) for x in (q, k, v))
    back = (grad.transpose(1, 2), *given, out.transpose(1, 2), lse)
    forward, backward = kernel.specialize("forward", given, call), kernel.specialize("backward", back, call)
    assert forward is not None
    assert backward is not None
    torch.testing.assert_close(forward(*given)[0], out.transpose(1, 2), atol=0.02, rtol=0.02)  # type: ignore[index]
    return {
        "forward": {
            "torch": lambda: flash.forward_kernel(q, k, v, 0.0, shape.causal, scale=scale),
            "compiled": lambda: forward(*given),
        },
        "backward": {
            "torch": lambda: flash.backward_kernel(grad, q, k, v, out, lse, 0.0, shape.causal, scale=scale),
            "compiled": lambda: backward(*back),
        },
    }


def per_call(run: Callable[[], Any], calls: int) -> float:
    """Return the seconds of one call; with one thread those of the CPU, which other programs can't add to."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    for _ in range(calls):
        run()
    return (clock() - start) / calls


def measure(shape: Shape, rounds: int) -> list[dict[str, Any]]:
    """Time both directions of a shape."""
    results = []
    for direction, runs in sides(shape).items():
        calls = {name: calls_for(ROUND, per_call(run, 1)) for name, run in runs.items()}
        taken = interleaved(
            {name: lambda run=run, n=calls[name]: per_call(run, n) for name, run in runs.items()}, rounds
        )
        results.append(
            shape._asdict()
            | {
                "direction": direction,
                "threads": torch.get_num_threads(),
                "microseconds": {name: statistics.median(times) * 1e6 for name, times in taken.items()},
                "ratio": median_ratio(taken["torch"], taken["compiled"]),
                "moved": choice.replaces_torch(direction, shape.spec()),
            }
        )
    return results


def summary(results: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return a row for each direction and dtype: how many calls are moved, what these gain, what is left."""
    rows = []
    for direction in ("forward", "backward"):
        for dtype in DTYPES:
            row = [f"{dtype} {direction}"]
            for moved in (True, False):
                found = [
                    each["ratio"] for each in results
                    if (each["direction"], each["dtype"], each["moved"]) == (direction, dtype, moved)
                ]  # fmt: skip
                mean = f"{statistics.geometric_mean(found):.2f}" if found else "-"
                row += [str(len(found)), mean, f"{(min if moved else max)(found):.2f}" if found else "-"]
            rows.append(tuple(row))
    return rows


def main() -> None:
    """Draw shapes, time them, and print what the rule makes of them."""
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
    for _ in range(options.shapes):
        for dtype in DTYPES:
            results += measure(drawn(draw, dtype), options.rounds)
    header = ("calls", "moved", "they gain", "worst", "left", "would gain", "best")
    show(
        f"{cpu.BACKEND.version()}, {options.threads} threads: torch's time over the compiled kernel's",
        header,
        summary(results),
    )
    save(options.json, results)


if __name__ == "__main__":
    main()
