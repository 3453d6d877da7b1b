"""A step of `flash_attn_with_kvcache` on each backend, by the size of the cache and how many heads share it.

    python benchmarks/decoding.py [--backends FA4,FA2] [--rounds N] [--by-index] [--packed] [--out FILE]

Caches are three quarters full, bfloat16, head dim 128. A step appends nothing. Each figure is the median of
rounds in µs: of calls that follow each other, and of calls in a CUDA graph, where the host doesn't count.
One step repeats. Outputs of all backends are compared with the first one's. With `--by-index` a step has a
`cache_batch_idx`, by which each cached sequence is a page. With `--packed` it is a step of `varlen_attn` over
the keys that count. Each call then has new offsets of keys, with the same numbers.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from _program import parser_of, show, show_machine

import attnreg
from attnreg.flash_attn import flash_attn_with_kvcache
from attnreg.tools.bench.compare import short
from attnreg.tools.bench.report import save
from attnreg.tools.measure import Case, inputs
from attnreg.tools.measure.timing import interleaved, timer_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

DIM, CALLS, NEAR = 128, 50, 2e-2
HEADS, BATCHES, ROOMS = ((32, 8), (8, 8)), (1, 4, 8, 16, 32), (1024, 4096, 8192, 16384)
# Speculative decoding checks a few tokens at once, for which FA2 doesn't split keys.
FEW = 4


class Shape(NamedTuple):
    """A step: sequences, queries of each, query heads and key heads, tokens that a sequence has room for."""

    batch: int
    queries: int
    heads: tuple[int, int]
    room: int

    def __str__(self) -> str:
        query = f", {self.queries} queries" if self.queries > 1 else ""
        return f"{self.batch} sequences of {self.room:,}, heads {self.heads[0]}:{self.heads[1]}{query}"


SHAPES = [Shape(*x) for x in itertools.product(BATCHES, (1,), HEADS, ROOMS)] + [
    Shape(*x) for x in itertools.product((1, 4, 16), (FEW,), HEADS, (4096, 8192))
]


def packed_step_of(shape: Shape, device: torch.device) -> Callable[[], Tensor]:
    """Return a step of decoding by `varlen_attn`, whose calls have new offsets of keys."""
    length, batch = shape.room * 3 // 4, shape.batch
    case = Case(
        name=str(shape), lens_q=(shape.queries,) * batch, lens_k=(length,) * batch, heads=shape.heads,
        dims=(DIM, DIM), dtype="bfloat16", varlen=True,
    )  # fmt: skip
    query, key, value = inputs(case, device, drawn_on=device)[:3]
    ends = torch.arange(batch + 1, dtype=torch.int32, device=device)
    # More than the call cache keeps: each call finds its offsets new.
    offsets = itertools.cycle([ends * length for _ in range(200)])

    rows = ends * shape.queries

    def step() -> Tensor:
        given = rows, next(offsets), shape.queries, length
        out: Tensor = attnreg.varlen_attn(query, key, value, *given, is_causal=True, enable_gqa=True)
        return out

    return step


def step_of(shape: Shape, device: torch.device, by_index: bool) -> Callable[[], Tensor]:
    """Return a step of decoding with a cache."""
    case = Case(
        name=str(shape), lens_q=(shape.queries,) * shape.batch, lens_k=(shape.room,) * shape.batch,
        heads=shape.heads, dims=(DIM, DIM), dtype="bfloat16",
    )  # fmt: skip
    query, *caches = inputs(case, device, drawn_on=device)[:3]
    used = torch.full((shape.batch,), shape.room * 3 // 4, dtype=torch.int32, device=device)
    places = torch.arange(shape.batch, dtype=torch.int32, device=device).flip(0) if by_index else None
    step = functools.partial(flash_attn_with_kvcache, query, *caches, cache_batch_idx=places)
    return functools.partial(step, cache_seqlens=used, causal=True)


def graph_of(step: Callable[[], Tensor]) -> torch.cuda.CUDAGraph:
    """Return a CUDA graph of `CALLS` steps."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(4):
            step()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            step()
    return graph


def measure(
    shape: Shape, step: Callable[[], Tensor], backends: list[str], rounds: int, device: torch.device
) -> dict[str, Any]:
    """Return the microseconds of a step by backend, eager and in a graph, and why a backend has none."""
    timer = timer_for(device)
    result: dict[str, Any] = {"shape": shape._asdict(), "microseconds": {}, "failed": {}, "off": {}}
    clocks: dict[tuple[str, str], Callable[[], float]] = {}
    expected = None

    def eager(name: str) -> float:
        with attnreg.use_backend(name):
            for _ in range(4):
                step()
            return timer.back_to_back(step, CALLS)

    for name in backends:
        try:
            with attnreg.use_backend(name):
                out = step()
                graph = graph_of(step)
        except Exception as error:  # noqa: BLE001 - a backend that can't run a step has no figure
            result["failed"][name] = short(error)
            continue
        expected = out if expected is None else expected
        result["off"][name] = float((out.float() - expected.float()).abs().max())
        if result["off"][name] > NEAR:
            raise SystemExit(f"{shape}: {name} is off by {result['off'][name]}")
        clocks[name, "eager"] = functools.partial(eager, name)
        clocks[name, "graph"] = lambda graph=graph: timer.back_to_back(graph.replay, 2) / CALLS  # type: ignore[misc]
    for (name, way), seconds in interleaved(clocks, rounds).items():
        result["microseconds"].setdefault(name, {})[way] = statistics.median(seconds) * 1e6
    return result


def main() -> None:
    """Measure all shapes and print the table."""
    parser = parser_of(__doc__, rounds=5, devices=("cuda",))
    parser.add_argument("--backends", default="FA4,FA2", help="comma list")
    parser.add_argument("--by-index", action="store_true", help="with a cache_batch_idx")
    parser.add_argument("--packed", action="store_true", help="steps of varlen_attn with new offsets")
    options = parser.parse_args()
    show_machine()
    backends, results = options.backends.split(","), []
    device = torch.device(options.device)
    for shape in SHAPES:
        step = packed_step_of(shape, device) if options.packed else step_of(shape, device, options.by_index)
        results.append(measure(shape, step, backends, options.rounds, device))
        save(options.out, results)
    cells = [
        (
            str(Shape(**result["shape"])),
            *(
                f"{taken['eager']:.1f} ({taken['graph']:.1f})" if taken else "failed"
                for taken in map(result["microseconds"].get, backends)
            ),
        )
        for result in results
    ]
    show("a step, µs (in a CUDA graph)", ("shape", *backends), cells)
    for result in results:
        for name, why in result["failed"].items():
            print(f"{Shape(**result['shape'])}, {name}: {why}")


if __name__ == "__main__":
    main()
