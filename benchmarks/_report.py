"""What the benchmarks share: interleaved timing, the machine they ran on, and their tables."""

from __future__ import annotations

import json
import platform
import re
import statistics
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["interleaved", "machine", "median_ratio", "per_call", "save", "show", "show_machine"]


def machine() -> dict[str, str]:
    """Return what a figure has to be read with: processor, cores, GPU, versions."""
    import attnreg

    facts = {
        "processor": _processor(),
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "attnreg": attnreg.__version__,
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
        facts["cuda"] = str(torch.version.cuda)
        facts["cudnn"] = str(torch.backends.cudnn.version())
        facts["driver"] = _driver()
        facts.update(_packages("flash-attn", "flash-attn-4", "nvidia-cudnn-frontend"))
    return facts


def _driver() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "unknown"
    found = re.search(r"\d{3}\.\d+(\.\d+)?", text)
    return found.group() if found else "unknown"


def _packages(*names: str) -> dict[str, str]:
    """Return the versions of those that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.machine()


def show_machine() -> None:
    """Print what the figures were measured on."""
    print(" · ".join(f"{key} {value}" for key, value in machine().items()), flush=True)


def per_call(run: Callable[[], object], calls: int) -> float:
    """Return the seconds that one of `calls` calls takes."""
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls


def interleaved(measures: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Take each measure once per round, in turn, so that a machine's moods meet them alike."""
    for measure in measures.values():
        measure()  # a warm-up that doesn't count
    taken: dict[str, list[float]] = {name: [] for name in measures}
    for number in range(rounds):
        names = list(measures)
        for name in names if number % 2 == 0 else reversed(names):
            taken[name].append(measures[name]())
    return taken


def median_ratio(of: Sequence[float], to: Sequence[float]) -> float:
    """Return the median of the ratios round by round."""
    return statistics.median(one / other for one, other in zip(of, to, strict=True))


def show(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table."""
    table = Table(title=title, title_justify="left")
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=110).print(table)


def save(path: Path | None, results: Any) -> None:
    """Write the results, and what they were measured on, as JSON."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"machine": machine(), "results": results}, indent=2) + "\n")
