"""Programs with flash-attn's functions, PyTorch's modules and diffusers' models: PyTorch alone, and attnreg.

    python benchmarks/clients.py [--device cpu|cuda] [--backends measured,FA4] [--rounds N] [--out FILE]
        [--clients flash-attn,modules,diffusers] [--threads N]

For flash-attn's functions PyTorch's side is usual code without flash-attn, the fastest of several if there
are several; attnreg's side is `attnreg.flash_attn`. The other programs are the same on both sides: without
attnreg (`uninstall`), and with each of `--backends` registered. `measured` registers no backend: tables and
the default order decide, also for PyTorch's own functions. If a program has a boolean mask, the first backend
also runs with masks recognised. Without diffusers plain blocks of the same sizes run, and the rows are
marked.

On a GPU a step of decoding is also recorded in a CUDA graph and replayed, as servers do: else the host is the
limit.

With one thread on a CPU the times are that thread's CPU time, to which other programs don't add.

The sides take turns. Each makes a call before it is timed, because the call caches are empty at its turn. The
figure is the time of PyTorch's fastest side over attnreg's, by round, median. A side isn't timed if its
results differ from PyTorch's, by their norms, more than the dtype explains.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

import torch
from _clients import CLIENTS, SIZES, Program, programs
from _program import parser_of, show, show_machine

import attnreg
from attnreg.errors import BackendUnavailableError
from attnreg.tools.bench.report import save
from attnreg.tools.measure.timing import calls_for, interleaved, median_ratio, per_call, timer_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

MEASURED, MASKS = "measured", "masks recognised"
WARM_UP = 3
# The largest distance of a side's results from PyTorch's; both are about equally far from float64.
LIMIT = {"float32": 1e-4, "bfloat16": 4e-2}


@contextlib.contextmanager
def served(by: str, masks: bool = False) -> Iterator[None]:
    """Make attnreg serve a block, with a backend or by its own choice; with an empty name not at all."""
    if not by:
        attnreg.uninstall()
        yield
        return
    settings = ({"policy": "measured"} if by == MEASURED else {}) | ({"masks": "recognise"} if masks else {})
    attnreg.install()
    attnreg.configure(settings)
    try:
        with contextlib.nullcontext() if by == MEASURED else attnreg.register_backend(by):
            yield
    finally:
        attnreg.configure({})


def sides_of(
    program: Program, backends: list[str]
) -> dict[str, tuple[str, bool, Callable[[], list[Tensor]]]]:
    """Return each side's name, what serves it, whether masks are recognised, and its function."""
    sides = {name: ("", False, run) for name, run in (program.pytorch | program.others).items()}
    sides |= {f"attnreg, {name}": (name, False, program.attnreg) for name in backends}
    if program.has_mask:
        sides[f"attnreg, {backends[0]}, {MASKS}"] = backends[0], True, program.attnreg
    return sides


def measure(program: Program, backends: list[str], device: torch.device, rounds: int) -> dict[str, Any]:
    """Time one program on all sides; returns milliseconds, ratios, and what ran."""
    sides, timer = sides_of(program, backends), timer_for(device)
    clock = time.thread_time if device.type == "cpu" and torch.get_num_threads() == 1 else None
    first, ran, difference = next(iter(program.pytorch)), {}, {}
    expected: list[Tensor] = []
    unlike: set[str] = set()
    for name, (by, masks, run) in sides.items():
        with served(by, masks):
            run()
            attnreg.reset_stats()
            results = (recorded(run) if program.in_graph else run)()
            ran[name] = sorted(attnreg.stats().calls)
        expected = expected or results
        difference[name] = distance(results, expected)
        if not difference[name] <= LIMIT[program.dtype]:
            print(f"{program.name}, {program.dtype}, {name}: {difference[name]:.2e} from {first}, not timed")
            unlike.add(name)
    sides = {name: side for name, side in sides.items() if name not in unlike}
    with served(""):
        calls = calls_for(0.05, per_call(program.pytorch[first], 1))  # in a graph calls take less

    def turn(by: str, masks: bool, run: Callable[[], list[Tensor]]) -> float:
        with served(by, masks):
            for _ in range(WARM_UP if device.type == "cuda" else 1):
                run()
            run = recorded(run) if program.in_graph else run
            return timer.back_to_back(run, calls) if clock is None else per_call(run, calls, clock)

    taken = interleaved({name: lambda side=side: turn(*side) for name, side in sides.items()}, rounds)
    timed = [name for name in program.pytorch if name in taken]
    best = min(timed, key=lambda name: statistics.median(taken[name]))
    return {
        "client": program.client, "program": program.name, "dtype": program.dtype, "fastest": best,
        "milliseconds": {name: statistics.median(seconds) * 1e3 for name, seconds in taken.items()},
        "ratio": {
            name: median_ratio(taken[best], taken[name]) for name in sides if name not in program.pytorch
        },
        "ran": ran, "difference": difference,
    }  # fmt: skip


def recorded(run: Callable[[], list[Tensor]]) -> Callable[[], list[Tensor]]:
    """Record `run` in a CUDA graph; return its replay, which always returns the same tensors."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        results = run()

    def replay() -> list[Tensor]:
        graph.replay()
        return results

    return replay


def distance(results: list[Tensor], expected: list[Tensor]) -> float:
    """Return the norm of the differences over the expected norm: the larger of output and all gradients.

    Gradients are compared together, because a key bias's own gradient is only rounding errors.
    """
    pairs = [
        (float((result.double() - reference.double()).norm()), float(reference.double().norm()))
        for result, reference in zip(results, expected, strict=True)
    ]
    return max(
        math.hypot(*(off for off, _ in part)) / max(math.hypot(*(of for _, of in part)), 1e-30)
        for part in (pairs[:1], pairs[1:])
    )


def rows_of(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return a result as rows of the table, one for each side that isn't PyTorch's."""
    best, times = result["fastest"], result["milliseconds"]
    what = f"{result['program']}, {result['dtype']}"
    return [
        (
            what, f"{best} {times[best]:.2f}", name, f"{times[name]:.2f}", f"{ratio:.2f}",
            ", ".join(result["ran"][name]),
        )
        for name, ratio in result["ratio"].items()
    ]  # fmt: skip


def main() -> None:
    """Measure every program and print the table."""
    parser = parser_of(__doc__, rounds=9, devices=SIZES)
    parser.add_argument("--backends", help="comma list; default: measured,FA2,FA4 on a GPU, cpu on a CPU")
    parser.add_argument("--clients", default=",".join(CLIENTS), help="comma list")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    show_machine()
    device, results = torch.device(options.device), []
    names = (options.backends or ("measured,FA2,FA4" if device.type == "cuda" else "cpu")).split(",")
    for name in [name for name in names if name != MEASURED]:
        try:
            attnreg.register_backend(name).remove()
        except BackendUnavailableError as error:
            names.remove(name)
            print(f"without {name}: {error}")
    if not names:
        parser.error(f"none of {options.backends} loads here")
    torch.manual_seed(0)
    for program in programs(SIZES[options.device], device, options.clients.split(",")):
        results.append(measure(program, names, device, options.rounds))
        for row in rows_of(results[-1]):
            print(" · ".join(row), file=sys.stderr, flush=True)
        save(options.out, results)  # after each program, in case the run is interrupted
    header = ("program", "PyTorch, ms", "side", "ms", "times as fast", "ran")
    show("PyTorch alone and attnreg", header, [row for result in results for row in rows_of(result)])


if __name__ == "__main__":
    main()
