"""A check that memory doesn't grow over calls of ever new lengths, forward and backward.

    python benchmarks/fresh_memory.py [--device cpu|cuda] [--backend NAME] [--calls N]
                                      [--kinds packed,dense] [--out FILE]

Memory kept for lengths that never recur would add up. Ten times in a run this prints the memory of the
process, and the GPU's memory in use. The exit code is 1 if either has grown by more than 5 % and 20 MB since
a fifth of the calls. No two packed calls have the same number of tokens and the same longest lengths. No two
dense calls have the same lengths of query and key.
"""

from __future__ import annotations

import argparse
import resource
import sys
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

import attnreg
from attnreg.tools.bench.report import machine_line, save

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

TIMES, UNTIL_STEADY = 10, 2  # readings, and the reading from which on memory has to be steady
SHARE, MEGABYTES = 0.05, 20.0
# Packed calls have up to so many tokens, in two sequences; `max_q` and `max_k` may be larger than needed.
TOKENS, LONGEST = 120, 64
QUERIES = 300


class Reading(NamedTuple):
    """Megabytes after so many calls."""

    calls: int
    process: float
    gpu: float


class Calls:
    """Calls of ever new lengths, on the first rows of the same tensors."""

    def __init__(self, device: str, kinds: list[str]) -> None:
        gpu = device == "cuda"
        heads, dim, dtype = (2, 64, torch.bfloat16) if gpu else (1, 8, torch.float32)
        self._kinds = kinds
        self._rows = torch.ones(2000, heads, dim, device=device, dtype=dtype)

    def __iter__(self) -> Iterator[Tensor]:
        """Make a call, with its backward, at each step; yield the gradient of the query."""
        made = {"packed": self._packed, "dense": self._dense}
        number = 0
        while True:
            for kind in self._kinds:
                yield made[kind](number)
            number += 1

    def _packed(self, number: int) -> Tensor:
        tokens, longest = 2 + number % (TOKENS - 1), LONGEST + number // (TOKENS - 1)
        offsets = torch.tensor([0, tokens // 2, tokens], dtype=torch.int32, device=self._rows.device)
        query = self._first(tokens)
        out: Tensor = attnreg.varlen_attn(  # type: ignore[assignment]
            query, query, query, offsets, offsets, longest, longest, is_causal=True
        )
        return torch.autograd.grad(out, query, out.detach())[0]

    def _dense(self, number: int) -> Tensor:
        query, key = self._first(1 + number % QUERIES), self._first(1 + number // QUERIES)
        q, k = (x[None].transpose(1, 2) for x in (query, key))
        out = F.scaled_dot_product_attention(q, k, k)
        return torch.autograd.grad(out, query, out.detach())[0]

    def _first(self, rows: int) -> Tensor:
        return self._rows[:rows].detach().requires_grad_()


def read(calls: int, device: str) -> Reading:
    """Read the memory of the process, and the GPU's memory in use."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    gpu = 0.0
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        gpu = (total - free) / 2**20
    return Reading(calls, pages * resource.getpagesize() / 2**20, gpu)


def grown(readings: list[Reading]) -> list[str]:
    """Return sentences on memory that has grown since the steady reading."""
    steady, last = readings[UNTIL_STEADY - 1], readings[-1]
    named = {"the process": (steady.process, last.process), "the GPU": (steady.gpu, last.gpu)}
    return [
        f"memory of {name}: {after - before:+.0f} MB since {steady.calls:,} calls"
        for name, (before, after) in named.items()
        if after > before * (1 + SHARE) + MEGABYTES
    ]


def measure(device: str, backend: str, calls: int, kinds: list[str]) -> list[Reading]:
    """Make the calls on a backend, and return ten readings; exit if another backend ran a call."""
    readings, steps = [], iter(Calls(device, kinds))
    with attnreg.register_backend(backend) as handle:
        attnreg.reset_stats()
        for number in range(1, TIMES + 1):
            for _ in islice(steps, calls // TIMES):
                pass
            readings.append(read(number * (calls // TIMES), device))
            print(f"{readings[-1].calls:9,} calls: {readings[-1].process:8.1f} MB", end="")
            print(f", GPU {readings[-1].gpu:8.1f} MB" if device == "cuda" else "", flush=True)
        ran = attnreg.stats().calls
        if ran != {handle.backend: dict.fromkeys(("forward", "backward"), readings[-1].calls)}:
            sys.exit(f"expected {readings[-1].calls} calls of {handle.backend} in each direction, got {ran}")
    return readings


def main() -> None:
    """Make the calls; exit with 1 if memory has grown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--backend", help="default: FA4 on a GPU, cpu on a CPU")
    parser.add_argument("--calls", type=int, default=200_000)
    parser.add_argument("--kinds", default="packed,dense")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    backend = options.backend or ("FA4" if options.device == "cuda" else "cpu")
    print(machine_line())
    readings = measure(options.device, backend, options.calls, options.kinds.split(","))
    save(options.out, {"backend": backend, "readings": [reading._asdict() for reading in readings]})
    if problems := grown(readings):
        sys.exit("; ".join(problems))


if __name__ == "__main__":
    main()
