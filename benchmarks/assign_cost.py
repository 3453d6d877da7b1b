"""What a call of an assigned module takes more than a call of a module that isn't assigned.

    python benchmarks/assign_cost.py [--device cpu|cuda] [--backend NAME] [--rounds N] [--out FILE]

Two modules of a class take turns, of which the second is assigned. The rows:

- A module that returns its argument, given by place or by keyword.
- A module that calls eight such modules inside it. The time is that of a single inner module.
- A module that calls SDPA: without a gradient, with a gradient, and forward + backward. Both modules run on a
  registered backend, to which the second is assigned, too.
- These calls of SDPA alone, in a block of `use_backend` and without.

A figure is the median in µs; of what is more, the median of the differences by round, and the quartiles. On a
CPU, with one thread, it is the thread's CPU time, to which other programs don't add. On a GPU it is the time
of the host, for so few calls that they don't fill the GPU's queue. The aim: at most 1 µs more.
"""

from __future__ import annotations

import statistics
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from _program import parser_of, show, show_machine
from torch import nn

import attnreg
from attnreg.core.dispatch import call_cache
from attnreg.tools.bench.report import save
from attnreg.tools.measure import Case, inputs
from attnreg.tools.measure.timing import interleaved, per_call, timer_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Run = Callable[[], object]

AIM, INNER = 1.0, 8
CALLS = {"cpu": 500, "cuda": 30}
# Lengths of the sequences, heads, head dim and dtype.
SHAPES = {"cpu": ((12,), 2, 16, "float32"), "cuda": ((128, 128), 8, 64, "bfloat16")}
BACKENDS = {"cpu": "cpu", "cuda": "FA2"}


class Returns(nn.Module):
    """Returns its argument."""

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`."""
        return x


class Calls(nn.Module):
    """Calls modules in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Returns() for _ in range(INNER)])

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`, as each part returns it."""
        for part in self.parts:
            x = part(x)
        return x


class Attends(nn.Module):
    """Calls SDPA on its argument, (B, H, S, D)."""

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, H, S, D)."""
        return F.scaled_dot_product_attention(x, x, x)


def pairs(device: torch.device, backend: str) -> dict[str, tuple[Run, Run, Any, int]]:
    """Return by name two functions, what the second runs in, and by how many their difference is divided."""
    lengths, heads, dim, dtype = SHAPES[device.type]
    case = Case(
        name="module", lens_q=lengths, lens_k=lengths, heads=(heads, heads), dims=(dim, dim), dtype=dtype
    )
    query, *_ = inputs(case, device, drawn_on=device)
    x = query.detach().transpose(1, 2).contiguous()
    leaf, grad = x.clone().requires_grad_(), torch.ones_like(x)
    kept = []

    def assigned(kind: type[nn.Module]) -> nn.Module:
        model = nn.Sequential(kind())
        kept.append(attnreg.assign(model, {"0": backend}))
        return model[0]

    def step(module: Callable[[Tensor], Tensor]) -> Run:
        return lambda: torch.autograd.grad(module(leaf), leaf, grad)

    plain, own, alone = Attends(), assigned(Attends), nullcontext()
    returns, own_returns, calls, own_calls = Returns(), assigned(Returns), Calls(), assigned(Calls)
    direct = plain.forward
    block = attnreg.use_backend(backend)
    return {
        "returns its argument": (lambda: returns(x), lambda: own_returns(x), alone, 1),
        "by keyword": (lambda: returns(x=x), lambda: own_returns(x=x), alone, 1),
        "a module inside": (lambda: calls(x), lambda: own_calls(x), alone, INNER),
        "SDPA, no gradient": (lambda: plain(x), lambda: own(x), alone, 1),
        "SDPA, gradient": (lambda: plain(leaf), lambda: own(leaf), alone, 1),
        "SDPA, forward + backward": (step(plain), step(own), alone, 1),
        "in a block, no gradient": (lambda: direct(x), lambda: direct(x), block, 1),
        "in a block, gradient": (lambda: direct(leaf), lambda: direct(leaf), block, 1),
        "in a block, forward + backward": (step(direct), step(direct), block, 1),
    }


def measure(device: torch.device, backend: str, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each pair of functions."""
    timer, often, rows = timer_for(device), CALLS[device.type], []

    def seconds(run: Run, within: Any) -> float:
        with within:
            run()  # the first call in a block reads the choice anew
            return timer.host(run, often) if device.type == "cuda" else per_call(run, often, time.thread_time)

    with attnreg.register_backend(backend):
        for name, (plain, assigned, within, parts) in pairs(device, backend).items():
            for side in (plain, assigned):
                for _ in range(20):  # builds, plans, and what the call cache keeps
                    side()
            attnreg.reset_stats()
            taken = interleaved(
                {
                    "plain": lambda plain=plain: seconds(plain, nullcontext()),
                    "assigned": lambda assigned=assigned, within=within: seconds(assigned, within),
                },
                rounds,
            )
            others = attnreg.stats().calls.keys() - {backend}
            if others:
                raise SystemExit(f"{name}: {', '.join(sorted(others))} ran, expected {backend} alone")
            plains, assigneds = ([x / parts * 1e6 for x in side] for side in taken.values())
            more = [after - before for before, after in zip(plains, assigneds, strict=True)]
            low, middle, high = statistics.quantiles(more, n=4, method="inclusive")
            rows.append(
                {
                    "what": name,
                    "plain": statistics.median(plains),
                    "assigned": statistics.median(assigneds),
                    "more": middle,
                    "quartiles": [low, high],
                }
            )
    return rows


def main() -> None:
    """Measure and print the table."""
    parser = parser_of(__doc__, rounds=101, devices=SHAPES)
    parser.add_argument("--backend", help="default: FA2 on a GPU, cpu on a CPU")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(options.device)
    show_machine()
    print("compiled part:", "loaded" if call_cache.load() is not None else "not loaded")
    results = measure(device, options.backend or BACKENDS[device.type], options.rounds)
    rows = [
        (
            row["what"], f"{row['plain']:.2f}", f"{row['assigned']:.2f}", f"{row['more']:.2f}",
            "{:.2f} to {:.2f}".format(*row["quartiles"]), "yes" if row["more"] <= AIM else "NO",
        )
        for row in results
    ]  # fmt: skip
    show("Time of a call, µs", ("what", "plain", "assigned", "more", "quartiles", "at most 1"), rows)
    save(options.out, results)


if __name__ == "__main__":
    main()
