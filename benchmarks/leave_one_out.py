"""How good a measured table's choices are: each of its points chosen from all the others.

    python benchmarks/leave_one_out.py [TABLE] [--json FILE]

For every point of the table (by default the one that ships for the H200) the point is left out, the rest
predicts, and the time of the chosen backend is compared with that of the fastest one, as the point
itself measured them: GPU time, as in a CUDA graph, since what a call takes the host is measured by front
and not by size. Beside it: each backend taken always. Needs no GPU; `attnreg bench selection` measures
the same end to end, on other shapes. A point whose kind has no other is chosen as it would be in use:
from another kind, or by the default order.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnreg import _registry
from attnreg.bench.report import save, show
from attnreg.contract.spec import AttentionSpec, Device
from attnreg.tuning import table
from attnreg.tuning.index import Kinds
from attnreg.tuning.lookup import predict, reordered

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnreg.tuning.points import Point

SHIPPED = Path(table.__file__).parent / "shipped" / "nvidia-h200.json"


def spec_of(point: Point) -> AttentionSpec:
    """Return a call that the point describes."""
    kind, size = point.kind, point.size
    return AttentionSpec(
        device=Device.parse("sm_90"), dtype=kind.dtype, batch=size.batch, max_q=size.max_q, max_k=size.max_k,
        heads_q=size.heads_q, heads_k=size.heads_q // kind.ratio, head_dim=kind.head_dim,
        head_dim_v=kind.head_dim_v, tokens_q=size.tokens_q, tokens_k=size.tokens_k, varlen=kind.varlen,
        window=size.window, needs_backward=kind.direction == "backward", capturing=True,
    )  # fmt: skip


def times(point: Point) -> dict[str, float]:
    """Return the microseconds on the GPU that each backend took there."""
    return {
        name: one.gpu_us for name, one in point.backends.items() if one.gpu_us is not None and not one.trouble
    }


def chosen(point: Point, points: Sequence[Point], able: Sequence[str]) -> str:
    """Return the backend that the other points choose."""
    kinds = Kinds([other for other in points if other.place != point.place])
    default = sorted(able, key=lambda name: -_registry.find(name).backend.priority)
    prediction = predict(kinds, spec_of(point), point.kind.direction, "table")
    if prediction is None:
        return default[0]
    lower = [name.casefold() for name in default]
    best = reordered(lower, lower, prediction)[0]
    return next(name for name in able if name.casefold() == best)


def regrets(points: Sequence[Point], direction: str) -> dict[str, list[float]]:
    """Return, for the table's choice and for each backend, its time over that of the fastest."""
    found: dict[str, list[float]] = {"chosen by the other points": []}
    for point in points:
        taken = times(point)
        if point.kind.direction != direction or len(taken) < 2:
            continue
        fastest = min(taken.values())
        found["chosen by the other points"].append(taken[chosen(point, points, list(taken))] / fastest)
        for name, time in taken.items():
            found.setdefault(f"always {name}", []).append(time / fastest)
    return found


def main() -> None:
    """Print both directions."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", nargs="?", type=Path, default=SHIPPED)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    measured = table.load(options.table)
    print(f"{measured.environment.device}, {len(measured.points)} points of {options.table.name}")
    results: dict[str, Any] = {}
    for direction in ("forward", "backward"):
        found = regrets(measured.points, direction)
        results[direction] = {
            name: {"mean": statistics.geometric_mean(rows), "worst": max(rows), "points": len(rows)}
            for name, rows in found.items()
        }
        rows = [
            (name, f"{row['mean']:.3f}", f"{row['worst']:.2f}", str(row["points"]))
            for name, row in results[direction].items()
        ]
        show(
            f"{direction}: time over that of the fastest backend",
            ("choice", "geometric mean", "worst", "points"),
            rows,
        )
    save(options.json, results)


if __name__ == "__main__":
    main()
