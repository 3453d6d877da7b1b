"""What attnreg costs the host per call.

    python benchmarks/overhead.py [--rounds N] [--json FILE]

Three questions, each answered in one run with the sides taking turns, on tensors so small that the
host's work is all there is:

1. The same aten op, and `F.scaled_dot_product_attention`, with and without attnreg.
2. `attnreg.varlen_attn` and `torch.nn.attention.varlen.varlen_attn` above kernels that do nothing.
3. `attnreg.varlen_attn` and a `varlen_attn` that calls the same backend by hand.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from _report import interleaved, machine, median_ratio, per_call, save, show
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn as torch_varlen_attn

import attnreg
from attnreg import aten
from attnreg.backend import Call

if TYPE_CHECKING:
    from collections.abc import Callable

Rows = dict[str, list[float]]


def routers(calls: int, rounds: int) -> Rows:
    """Measure op and SDPA without attnreg, with idle routers, and with everything active."""
    query = torch.randn(1, 1, 2, 8)
    learned = query.clone().requires_grad_()
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    runs: dict[str, Callable[[], object]] = {
        "aten op": lambda: op(query, query, query),
        "SDPA": lambda: F.scaled_dot_product_attention(query, query, query),
        "SDPA, with grad": lambda: F.scaled_dot_product_attention(learned, learned, learned),
    }

    def without(run: Callable[[], object]) -> float:
        attnreg.uninstall()
        return per_call(run, calls)

    def idle(run: Callable[[], object]) -> float:
        aten.ensure()
        return per_call(run, calls)

    def active(run: Callable[[], object]) -> float:
        attnreg.install()
        return per_call(run, calls)

    return interleaved(
        {
            f"{name}, {state}": lambda measure=measure, run=run: measure(run)
            for name, run in runs.items()
            for state, measure in (("torch alone", without), ("nothing registered", idle), ("active", active))
        },
        rounds,
    )


def nothing_forward(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Return tensors of the right shapes and no values."""
    return torch.empty_like(query), query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32)


def nothing_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    """Return gradients of the right shapes and no values."""
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def aten_nothing() -> torch.library.Library:
    """Put kernels that do nothing straight under aten's flash ops, for torch's own varlen_attn."""

    def forward(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
        random_state = query.new_empty(2, dtype=torch.uint64), query.new_empty((), dtype=torch.uint64)
        return (*nothing_forward(query, key, value, None), *random_state, query.new_empty(0))  # type: ignore[arg-type]

    def backward(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
        return nothing_backward(grad_out, query, key, value)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    return library


def varlen_fronts(calls: int, rounds: int) -> Rows:
    """Measure both fronts above kernels that do nothing."""
    limits = attnreg.Capabilities(devices=("cpu",), dtypes=("float32",), varlen=True)
    nothing = attnreg.Backend(
        name="nothing",
        forward=limits,
        backward=limits,
        load=lambda: attnreg.Kernels(nothing_forward, nothing_backward),  # type: ignore[arg-type]
    )
    tokens = torch.randn(4, 2, 8, requires_grad=True)
    offsets, grad = torch.tensor([0, 2, 4], dtype=torch.int32), torch.ones(4, 2, 8)

    def forward(front: Callable[..., Tensor]) -> Tensor:
        return front(tokens, tokens, tokens, offsets, offsets, 2, 2)

    def ours(run: Callable[[], object]) -> float:
        with attnreg.register_backend(nothing):
            taken = per_call(run, calls)
        attnreg.uninstall()
        return taken

    def theirs(run: Callable[[], object]) -> float:
        library = aten_nothing()
        taken = per_call(run, calls)
        library._destroy()
        return taken

    attnreg.uninstall()
    return interleaved(
        {
            "forward with grad, torch": lambda: theirs(lambda: forward(torch_varlen_attn)),
            "forward with grad, attnreg": lambda: ours(lambda: forward(attnreg.varlen_attn)),
            "forward + backward, torch": lambda: theirs(lambda: forward(torch_varlen_attn).backward(grad)),
            "forward + backward, attnreg": lambda: ours(lambda: forward(attnreg.varlen_attn).backward(grad)),
        },
        rounds,
    )


class ByHand(torch.autograd.Function):
    """The least that a varlen_attn needs which knows its one backend: no checks, no choice."""

    @staticmethod
    def forward(
        ctx: Any, kernels: attnreg.Kernels, query: Tensor, key: Tensor, value: Tensor, call: Call
    ) -> Any:
        """Call the backend's forward."""
        out, lse = kernels.forward(query, key, value, call)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.kernels, ctx.call = kernels, call
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        """Call the backend's backward."""
        return None, *ctx.kernels.backward(grad_out, *ctx.saved_tensors, ctx.call), None


def one_backend(calls: int, rounds: int) -> Rows:
    """Measure attnreg.varlen_attn against the `cpu` backend called by hand, at a small real shape."""
    from attnreg.backends.cpu import BACKEND

    kernels = BACKEND.load()
    lengths = [40, 64, 17, 33]
    query, key, value = (torch.randn(sum(lengths), 4, 64, requires_grad=True) for _ in range(3))
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    grad = torch.ones_like(query)

    def by_hand() -> Tensor:
        call = Call(64**-0.5, 64, 64, (-1, -1), offsets, offsets)
        return ByHand.apply(kernels, query, key, value, call)  # type: ignore[no-untyped-call, no-any-return]

    def attnregs() -> Tensor:
        return attnreg.varlen_attn(query, key, value, offsets, offsets, 64, 64)  # type: ignore[return-value]

    attnreg.install()
    return interleaved(
        {
            "forward, by hand": lambda: per_call(by_hand, calls // 10),
            "forward, attnreg": lambda: per_call(attnregs, calls // 10),
            "forward + backward, by hand": lambda: per_call(lambda: by_hand().backward(grad), calls // 10),
            "forward + backward, attnreg": lambda: per_call(lambda: attnregs().backward(grad), calls // 10),
        },
        rounds,
    )


def table(title: str, taken: Rows, base: str) -> list[dict[str, Any]]:
    """Print medians beside those of the side that is the yardstick; returns them."""
    results, rows = [], []
    for name, seconds in taken.items():
        what = name.rpartition(", ")[0]
        against = taken[f"{what}, {base}"]
        median, ratio = statistics.median(seconds) * 1e6, median_ratio(seconds, against)
        added = statistics.median(a - b for a, b in zip(seconds, against, strict=True)) * 1e6
        results.append({"name": name, "microseconds": median, "added": added, "ratio": ratio})
        rows.append((name, f"{median:.2f}", f"{added:+.2f}", f"{ratio:.3f}"))
    show(title, ("call", "µs", f"above {base}", "ratio"), rows)
    return results


def main() -> None:
    """Run all three and print their tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(" · ".join(f"{key} {value}" for key, value in machine().items()))
    size = options.calls, options.rounds
    results = {
        "routers": table("Routers over torch's ops", routers(*size), "torch alone"),
        "varlen": table("varlen_attn above kernels that do nothing", varlen_fronts(*size), "torch"),
        "by_hand": table("varlen_attn above the cpu backend", one_backend(*size), "by hand"),
    }
    save(options.json, results)


if __name__ == "__main__":
    main()
