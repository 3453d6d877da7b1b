"""What `varlen_attn` would cost if one op of torch's dispatcher carried eager and compiled calls alike.

    python benchmarks/routed_op.py [--calls N] [--rounds N] [--json FILE]

Two ways lead to the same kernel, which does nothing. The first way is a function of a C++ module, as
`varlen_attn` has today. The second way is an op with a schema, a kernel for Autograd and a kernel for the
device. Both record the same autograd node. The figures are the CPU time of a call on one thread: medians,
taken in turns. `csrc/routed_op.cpp` is compiled first. The rows "the same function again" repeat the first
way: their difference is noise.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from attnreg.core.torchlib.libraries import TRY_MODULE, Library, compile_library
from attnreg.tools.bench.report import save, show, show_machine
from attnreg.tools.measure import Case, inputs
from attnreg.tools.measure.timing import interleaved, per_call

if TYPE_CHECKING:
    from collections.abc import Callable

TRIAL = Library(
    "attnreg_trial",
    "call_cache",
    "the trial of a routed op",
    Path(__file__).parent / "csrc" / "routed_op.cpp",
    ("-O2",),
    ("c10", "torch_cpu", "torch_python"),
    TRY_MODULE,
)
CASE = Case(
    name="way", lens_q=(7, 9), lens_k=(7, 9), varlen=True, heads=(2, 2), dims=(16, 16), one_cu_seqlens=True
)
FUNCTION, OP, AGAIN = "a function of a module", "an op of the dispatcher", "the same function again"


def load() -> Any:
    """Compile the trial and return its module; the op is registered by that."""
    file = str(compile_library(TRIAL))
    loader = importlib.machinery.ExtensionFileLoader(TRIAL.name, file)
    spec = importlib.util.spec_from_file_location(TRIAL.name, file, loader=loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def calls_of(module: Any, device: torch.device, with_gradient: bool) -> dict[str, Callable[[], object]]:
    """Return a call of `CASE` by each way; nearly all of its time is the host's."""
    query, key, value, *_, call = inputs(CASE, device)
    for tensor in (query, key, value):
        tensor.requires_grad_(with_gradient)
    rest = (call.cu_seqlens_q, call.cu_seqlens_k, call.max_q, call.max_k, True, -1, -1, None, False, 0)
    op = torch.ops.attnreg_trial.varlen_attn.default
    function = module.call_directly

    def call_function() -> object:
        return function(query, key, value, *rest)

    return {FUNCTION: call_function, OP: lambda: op(query, key, value, *rest), AGAIN: call_function}


def microseconds_of(call: Callable[[], object], calls: int) -> float:
    """Return the CPU time of a call on this thread."""
    return 1e6 * per_call(call, calls, time.thread_time)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--calls", type=int, default=2000, help="calls for each measurement")
    parser.add_argument("--rounds", type=int, default=41, help="measurements of each row")
    parser.add_argument("--json", type=Path, help="write the results to this file as well")
    args = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    module, rows, results = load(), [], {}
    for gradient in (False, True):
        calls = calls_of(module, device, gradient)
        times = interleaved(
            {way: lambda call=call: microseconds_of(call, args.calls) for way, call in calls.items()},
            args.rounds,
        )
        for way, measured in times.items():
            row = f"{way}, {'with' if gradient else 'without'} gradient"
            results[row] = median = statistics.median(measured)
            more = statistics.median(x - y for x, y in zip(measured, times[FUNCTION], strict=True))
            rows.append((row, f"{median:.2f}", f"{more:+.2f}"))
    show_machine()
    show("the way to a kernel that does nothing, µs a call; median", ("forward", "µs", "more"), rows)
    save(args.json, results)


if __name__ == "__main__":
    main()
