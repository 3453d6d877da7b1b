"""Attention over tokens that are spread over GPUs: each method, against a single GPU and torch's own methods.

    python -m benchmarks.context_parallel --out FILE [--backend FA4] [--seconds 200] [--ours]
    python -m benchmarks.context_parallel --out FILE --device cpu --small

Starts a process for each GPU, by default two (`--ranks`). Calls are forward and backward in bfloat16, 16
heads of 128. `share` is a single GPU's time for the whole batch, divided by the number of ranks and by the
ranks' common time: 1 if half the work takes half the time. Times are the slowest rank's, medians of some
rounds. A single GPU's time is by the mean rate of all ranks, each alone at the same time, because GPUs
differ. The same run has torch's `context_parallel` with either rotation, and all-to-all over heads written by
hand (`_spread.py`). Link and latency are measured as before a group's first call.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import attnreg
from attnreg.parallel.machine import exchanges
from attnreg.tools.bench.report import machine, machine_line
from benchmarks._spread import ONE, Case, Place, cases, sides, sides_of_torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Here:
    """This rank: its place, its clock, and when to stop."""

    def __init__(self, rank: int, options: argparse.Namespace) -> None:
        self.rank, self.options = rank, options
        self.device = torch.device("cuda", rank) if options.device == "cuda" else torch.device("cpu")
        sizes = (4, 32, torch.float32) if options.small else (16, 128, torch.bfloat16)
        self.place = Place(rank, self.device, options.backend, *sizes)
        self.until = time.monotonic() + options.seconds

    def wait(self) -> None:
        """Wait until the device has finished."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def slowest(self, number: float) -> float:
        """Return the maximum of a number over all ranks."""
        tensor = torch.tensor([number], dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return float(tensor)

    def seconds_of_each(self, run: Callable[[], object], calls: int) -> list[float]:
        """Return the seconds a call on each rank, over so many calls."""
        dist.barrier()
        self.wait()
        started = time.perf_counter()
        for _ in range(calls):
            run()
        self.wait()
        taken = torch.tensor(
            [(time.perf_counter() - started) / calls], dtype=torch.float64, device=self.device
        )
        of_all = taken.new_empty(dist.get_world_size())
        dist.all_gather_into_tensor(of_all, taken)
        return of_all.tolist()

    def seconds(self, run: Callable[[], object], calls: int) -> float:
        """Return the seconds a call on the slowest rank, over so many calls."""
        return max(self.seconds_of_each(run, calls))

    def is_late(self) -> bool:
        """Whether the time is up, by the clock of rank 0."""
        return self.slowest(float(self.rank == 0 and time.monotonic() > self.until)) > 0

    def memory(self, run: Callable[[], object]) -> int:
        """Return the peak memory that a call adds, in bytes, on the rank with the most."""
        if self.device.type == "cpu":
            return 0
        self.wait()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        self.wait()
        return int(self.slowest(torch.cuda.max_memory_allocated() - before))


def measure(here: Here, of_case: Sequence[tuple[str, Any]], rows: dict[str, dict[str, Any]]) -> None:
    """Measure a round of each side of a case. Sides take turns, because a GPU is slower when it is hot.

    Each side is opened anew in each round, because torch's and attnreg's can't both be in force.
    """
    for name, open_side in of_case:
        row = rows.setdefault(name, {"side": name, "rounds": []})
        if "error" in row or here.is_late():
            continue
        try:
            with open_side() as step:
                step()
                once = here.seconds(step, 1)
                calls = max(1, min(20, int(0.15 / once)))
                of_each = here.seconds_of_each(step, calls)
                row.setdefault("of_each", []).append(of_each)
                row["rounds"].append(statistics.harmonic_mean(of_each) if name == ONE else max(of_each))
                if hasattr(step, "taken"):
                    row["taken"] = dict(step.taken)
                row["memory"] = here.memory(step)  # of a late call, because first calls run checks
        except Exception as error:  # noqa: BLE001 - a side that fails is a result, on all ranks alike
            row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        if here.device.type == "cuda":
            torch.cuda.empty_cache()


def summed_up(rows: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the sides of a case with their medians and shares."""
    for row in rows.values():
        if row["rounds"] and "error" not in row:
            row["seconds"] = statistics.median(row["rounds"])
        elif "error" not in row:
            row["error"] = "left out: the time was up"
    alone = rows[ONE].get("seconds", 0.0)
    for row in rows.values():
        if "seconds" in row and row["side"] != ONE:
            row["share"] = alone / (dist.get_world_size() * row["seconds"])
    return [*rows.values()]


def chosen(here: Here, case: Case) -> dict[str, Any]:
    """Return what `explain_context_parallel` says of a case, by the defaults."""
    ends, place = list(itertools.accumulate([0, *case.lengths])), here.place
    layout = attnreg.spread_documents(ends, dist.get_world_size(), case.how, window_size=(case.left, 0))
    window = case.left, 0
    return attnreg.explain_context_parallel(
        layout, heads=place.heads, head_dim=place.dim, dtype=place.dtype, window_size=window
    ).to_dict()


def work(rank: int, ranks: int, store: str, options: argparse.Namespace) -> None:
    """Measure, as one rank; rank 0 prints and saves."""
    here = Here(rank, options)
    torch.set_num_threads(1)
    group_options: dict[str, Any] = {"timeout": datetime.timedelta(seconds=120)}
    if here.device.type == "cuda":
        torch.cuda.set_device(here.device)
        group_options["device_id"] = here.device
    backend = "nccl" if here.device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=ranks, **group_options
    )
    results: dict[str, Any] = {"machine": machine(), "ranks": ranks, "backend": options.backend}
    measured = exchanges(dist.group.WORLD, here.device)
    results["link"], results["cases"] = measured._asdict(), []
    if rank == 0:
        print(machine_line())
        print(f"link: {results['link']['bytes_per_second'] / 1e9:.1f} GB/s received, ", end="")
        print(f"{results['link']['latency'] * 1e6:.0f} us an exchange")
    all_cases = cases(64 if options.small else 1)
    for case in all_cases:
        results["cases"].append({"name": case.name, "rows": [], "explained": chosen(here, case)})
    more = (lambda *_: ()) if options.ours else sides_of_torch
    all_sides = [[*sides(here.place, case), *more(here.place, case)] for case in all_cases]
    all_rows: list[dict[str, dict[str, Any]]] = [{} for _ in all_cases]
    for _, (of_case, rows) in itertools.product(range(options.rounds), zip(all_sides, all_rows, strict=True)):
        measure(here, of_case, rows)
    for case, saved, rows in zip(all_cases, results["cases"], all_rows, strict=True):
        saved["rows"] = summed_up(rows)
        if rank == 0:
            show(case, saved["rows"], here)
    if rank == 0:
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def show(case: Case, rows: list[dict[str, Any]], here: Here) -> None:
    """Print a table."""
    print(f"\n{case.name}\n{'':<26}{'ms':>9}{'share':>8}{'TFLOP/s':>9}{'MiB':>8}")
    flops = 3.5 * 4 * here.place.heads * here.place.dim * pairs(case)
    for row in rows:
        if "error" in row:
            print(f"{row['side']:<26}  {row['error'][:120]}")
            continue
        share = f"{row['share']:.3f}" if "share" in row else ""
        rate = flops / row["seconds"] / 1e12
        numbers = f"{row['seconds'] * 1e3:>9.2f}{share:>8}{rate:>9.1f}{row['memory'] / 2**20:>8.0f}"
        print(f"{row['side']:<26}{numbers}")


def pairs(case: Case) -> int:
    """Return how many pairs of query and key are computed."""
    layout = attnreg.spread_documents(list(itertools.accumulate([0, *case.lengths])), 1, "contiguous")
    return layout.cost(0, case.left, 0)


def main() -> None:
    """Start a process for each rank."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the file that gets the results, JSON")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--backend", help="which computes; FA4 unless given, on a CPU what attnreg chooses")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, default=200.0, help="begin no further measurement after so long"
    )
    parser.add_argument("--ours", action="store_true", help="leave torch's methods out")
    parser.add_argument("--small", action="store_true", help="short lengths, to try the program")
    options = parser.parse_args()
    if options.ranks < 2 or options.rounds < 1:
        parser.error("--ranks has to be 2 or more, --rounds 1 or more")
    if not options.out.resolve().parent.is_dir():
        parser.error(f"--out: got {options.out}, expected a file in a folder that exists")
    if options.backend is None and options.device == "cuda":
        options.backend = "FA4"
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (options.ranks, str(Path(folder) / "store"), options), options.ranks)


if __name__ == "__main__":
    main()
