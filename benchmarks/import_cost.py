"""What attnreg adds to `import torch`: when it is imported, and when it is only installed.

    python benchmarks/import_cost.py [--rounds N] [--out FILE]

Each start is a process of its own; the sides take turns.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

from _program import parser_of, show, show_machine

from attnreg.tools.bench.report import save
from attnreg.tools.measure.timing import interleaved, median_ratio

TIMED = "import time; {}; start = time.perf_counter(); {}; print(time.perf_counter() - start)"
HOOK = "from attnreg._autoload import activate; activate()"
ALONE = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
SIDES = {
    "import torch, without the hook": ("pass", "import torch", ALONE),
    "import torch, attnreg installed": ("pass", "import torch", {}),
    "import torch, attnreg": ("pass", "import torch, attnreg", {}),
    "import torch, ATTNREG_BACKEND=math": ("pass", "import torch", {"ATTNREG_BACKEND": "math"}),
    "the hook alone, no variable set": ("import torch", HOOK, ALONE),
    "import attnreg alone, after torch": ("import torch", "import attnreg", ALONE),
}


def seconds(before: str, code: str, variables: dict[str, str]) -> float:
    """Return what a fresh process measures of its own import."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ATTNREG_")}
    command = [sys.executable, "-c", TIMED.format(before, code)]
    done = subprocess.run(command, env={**clean, **variables}, check=True, capture_output=True, text=True)
    return float(done.stdout)


def main() -> None:
    """Print the medians and their ratios."""
    parser = parser_of(__doc__, rounds=15)
    options = parser.parse_args()
    show_machine()
    taken = interleaved(
        {name: lambda side=side: seconds(*side) for name, side in SIDES.items()}, options.rounds
    )
    base = next(iter(taken.values()))
    results = [
        {"name": name, "seconds": statistics.median(times), "ratio": median_ratio(times, base)}
        for name, times in taken.items()
    ]
    rows = [(row["name"], f"{row['seconds']:.4f}", f"{row['ratio']:.2%}") for row in results]
    show("Start of a process", ("what", "s", "of torch alone"), rows)
    save(options.out, results)


if __name__ == "__main__":
    main()
