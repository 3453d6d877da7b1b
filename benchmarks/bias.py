"""The cost of a bias, or of dropout, in SDPA: on cuDNN, and on the torch kernel that has it, too.

    python benchmarks/bias.py [--dropout P] [--rounds N] [--out FILE]

Calls are dense, in bfloat16. Without `--dropout` they have a bias that the sequences share and that SDPA
expands, and cuDNN is compared with torch's efficient kernel. With it they have no bias, and cuDNN is compared
with FA2, torch's own. Both backends run below `F.scaled_dot_product_attention`, by `use_backend`, and take
turns. The figures are the time on the device of a call, and its memory at the peak, results included. The
first call of a shape, for which cuDNN builds an execution plan for each direction, is a column of its own.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from _program import parser_of, show, show_machine
from torch.nn.attention import SDPBackend, sdpa_kernel

import attnreg
from attnreg.tools.bench.report import save
from attnreg.tools.measure import Case, inputs
from attnreg.tools.measure.timing import calls_for, interleaved, median_ratio, per_call, timer_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# The backend with which cuDNN is compared, and the op that both run.
EFFICIENT, FLASH = ("efficient", SDPBackend.EFFICIENT_ATTENTION), ("FA2", SDPBackend.FLASH_ATTENTION)
FORWARD, BACKWARD, WITH_BIAS = "forward", "forward + backward", "forward + backward with the bias's"


class Size(NamedTuple):
    """A batch of sequences of one length."""

    batch: int
    length: int
    heads: int
    dim: int

    def __str__(self) -> str:
        return f"{self.batch} x {self.length}, {self.heads} x {self.dim}"


SIZES = (Size(2, 256, 12, 64), Size(8, 512, 12, 64), Size(4, 1024, 16, 64), Size(2, 2048, 16, 128))


def call_of(size: Size, step: str, dropout: float) -> Callable[[], object]:
    """Return a call of SDPA, forward or both directions, with dropout or with a bias."""
    lengths, device = (size.length,) * size.batch, torch.device("cuda")
    case = Case(
        name="bias", lens_q=lengths, lens_k=lengths, heads=(size.heads, size.heads),
        dims=(size.dim, size.dim), dtype="bfloat16", bias="none" if dropout else "additive",
    )  # fmt: skip
    *tensors, grad, call = inputs(case, device, drawn_on=device)
    leaves = [x.transpose(1, 2).requires_grad_(step != FORWARD) for x in tensors]
    query, key, value = leaves
    bias = call.attn_bias
    if bias is not None:
        leaves.append(bias.requires_grad_(step == WITH_BIAS))
    leaves = [x for x in leaves if x.requires_grad]

    def run() -> object:
        mask = None if bias is None else bias.expand(size.batch, -1, -1, -1)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)
        return torch.autograd.grad(out, leaves, grad.transpose(1, 2)) if leaves else out

    return run


@contextlib.contextmanager
def within(backend: str, op: SDPBackend) -> Iterator[None]:
    """Have a backend run the calls that torch's selector sends to the kernel of an op."""
    with attnreg.use_backend(backend), sdpa_kernel(op):
        yield


def first_call(run: Callable[[], object]) -> float:
    """Return the seconds of a call, the device's included."""

    def run_whole() -> None:
        run()
        torch.cuda.synchronize()

    torch.cuda.synchronize()
    return per_call(run_whole, 1)


def peak(run: Callable[[], object]) -> int:
    """Return the bytes on the GPU of a call at its peak, its results included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = run()
    torch.cuda.synchronize()
    del results
    return torch.cuda.max_memory_allocated() - before


def measure(size: Size, step: str, dropout: float, rounds: int) -> list[dict[str, Any]]:
    """Time both backends on a size; raises RuntimeError if another one has run."""
    run, first, bytes_of, once = call_of(size, step, dropout), {}, {}, 0.0
    other, op = FLASH if dropout else EFFICIENT
    names = "cuDNN", other
    for name in names:
        attnreg.reset_stats()
        with within(name, op):
            first[name] = first_call(run)
            once, bytes_of[name] = max(once, per_call(run, 2)), peak(run)
        if (ran := attnreg.stats().calls.keys()) != {name}:
            raise RuntimeError(f"{step} of {size}: got {', '.join(ran)}, expected {name}")
    timer, often = timer_for(torch.device("cuda")), calls_for(0.01, once, most=20)

    def seconds(name: str) -> float:
        with within(name, op):
            return timer.device_and_host(run, often).device

    taken = interleaved({name: functools.partial(seconds, name) for name in names}, rounds)
    return [
        {
            "backend": name, "size": str(size), "step": step, "first call": first[name] * 1e3,
            "milliseconds": statistics.median(taken[name]) * 1e3, "bytes": bytes_of[name],
            "over torch": median_ratio(taken[name], taken[other]),
        }
        for name in names
    ]  # fmt: skip


def main() -> None:
    """Measure every size and print the table."""
    parser = parser_of(__doc__, rounds=9)
    parser.add_argument("--dropout", type=float, default=0.0)
    options = parser.parse_args()
    show_machine()
    rows: list[dict[str, Any]] = []
    for size in SIZES:
        for step in (FORWARD, BACKWARD) if options.dropout else (FORWARD, BACKWARD, WITH_BIAS):
            rows += measure(size, step, options.dropout, options.rounds)
            save(options.out, rows)
    cells = [
        (
            row["size"], row["step"], row["backend"], f"{row['milliseconds']:.3f}",
            f"{row['over torch']:.2f}", f"{row['bytes'] / 2**20:.0f}", f"{row['first call']:.0f}",
        )
        for row in rows
    ]  # fmt: skip
    show(
        f"{'Dropout' if options.dropout else 'A bias'}: time on the device, and memory",
        ("size", "step", "backend", "ms", "over torch", "MiB", "first call, ms"),
        cells,
    )


if __name__ == "__main__":
    main()
