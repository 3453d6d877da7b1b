"""The host time of calls in two checkouts of attnreg, in processes that take turns.

    python benchmarks/two_checkouts.py OLD NEW [--device cpu|cuda] [--backend NAME] [--rounds N] [--out FILE]

OLD and NEW are folders of checkouts, each with its `attnreg build` done. A host's speed changes more within
seconds than two versions differ, so runs in succession prove nothing. Here each round has both, in a random
order, and the figure is NEW over OLD, by round, median. The calls are small, so that the host bounds them:
SDPA and `varlen_attn`, forward without and with a gradient, and forward + backward, with the backend
registered.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from collections.abc import Callable

CALLS, BURSTS = 200, 3


def calls_of(device: str) -> dict[str, Callable[[], object]]:
    """Return each call by its name; uses only names that any version of `attnreg` has."""
    from attnreg import varlen_attn  # of the checkout that PYTHONPATH names

    length, heads, dim, dtype = (
        (16, 2, 16, torch.float32) if device == "cpu" else (128, 8, 64, torch.bfloat16)
    )
    bhsd = [torch.randn(2, heads, length, dim, device=device).to(dtype) for _ in "qkv"]
    rows = [x.transpose(1, 2).flatten(0, 1).contiguous() for x in bhsd]
    ends = torch.tensor([0, length, 2 * length], dtype=torch.int32, device=device)
    calls: dict[str, Callable[[], object]] = {}
    for front, tensors, further in (
        (F.scaled_dot_product_attention, bhsd, ()),
        (varlen_attn, rows, (ends, ends, length, length)),
    ):
        leaves, ones = [x.clone().requires_grad_() for x in tensors], torch.ones_like(tensors[0])

        def attend(tensors: Any, front: Any = front, further: Any = further) -> Any:
            return front(*tensors, *further)

        def both(attend: Any = attend, leaves: Any = leaves, ones: Any = ones) -> Any:
            return torch.autograd.grad(attend(leaves), leaves, ones)

        calls[f"{front.__name__}, forward, no grad"] = lambda attend=attend, tensors=tensors: attend(tensors)
        calls[f"{front.__name__}, forward, grad"] = lambda attend=attend, leaves=leaves: attend(leaves)
        calls[f"{front.__name__}, forward + backward"] = both
    return calls


def serve(device: str, backend: str) -> None:
    """Measure all calls for each line of stdin; print microseconds."""
    import attnreg

    torch.set_num_threads(1)
    attnreg.register_backend(backend)
    calls = calls_of(device)

    def seconds(call: Callable[[], object]) -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(CALLS):
            call()
        return (time.perf_counter() - started) / CALLS

    for call in calls.values():
        seconds(call)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for _ in sys.stdin:
        taken = {name: min(seconds(call) for _ in range(BURSTS)) * 1e6 for name, call in calls.items()}
        sys.stdout.write(json.dumps(taken) + "\n")
        sys.stdout.flush()


def started(checkout: Path, device: str, backend: str) -> subprocess.Popen[str]:
    """Return a process that measures a checkout."""
    command = sys.executable, "-P", __file__, "--serve", "--device", device, "--backend", backend
    path = os.pathsep.join((str(checkout.absolute()), os.environ.get("PYTHONPATH", "")))
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        raise SystemExit(f"{checkout}: can't be measured")
    return process


def main() -> None:
    """Measure both in turns and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkouts", nargs="*", type=Path, metavar="OLD NEW")
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if on_gpu else "cpu")
    parser.add_argument("--backend", default="FA2" if on_gpu else "cpu")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.device, options.backend)
        return
    if len(options.checkouts) != 2:
        parser.error(f"got {len(options.checkouts)} checkouts, expected two")
    from _program import show, show_machine

    from attnreg.tools.bench.report import save
    from attnreg.tools.measure.timing import median_ratio

    processes = [started(checkout, options.device, options.backend) for checkout in options.checkouts]
    rounds: list[list[dict[str, float]]] = [[], []]
    for _ in range(options.rounds):
        for place in random.sample(range(2), 2):
            stdin, stdout = processes[place].stdin, processes[place].stdout
            assert stdin is not None
            assert stdout is not None
            stdin.write("go\n")
            stdin.flush()
            rounds[place].append(json.loads(stdout.readline()))
    show_machine()
    rows = []
    for name in rounds[0][0]:
        old, new = ([taken_in_round[name] for taken_in_round in taken] for taken in rounds)
        rows.append((name, statistics.median(old), statistics.median(new), median_ratio(new, old)))
    save(options.out, {"backend": options.backend, "rows": rows, "rounds": rounds})
    cells = [(name, f"{old:.1f}", f"{new:.1f}", f"{ratio:.3f}") for name, old, new, ratio in rows]
    show(f"{options.backend}, µs of the host", ("call", "old", "new", "new over old"), cells)


if __name__ == "__main__":
    main()
