"""How good a measured table's choices are, by times that were measured before. Needs no GPU.

    python benchmarks/table_choices.py [TABLE] [--json FILE]
    python benchmarks/table_choices.py [TABLE] --run RUN [--compiled] [--json FILE]

Without --run every point of the table (by default the one that ships for the H200) is left out in turn, the
rest predicts, and the time of the chosen backend is compared with that of the fastest one, as the point
itself measured them: GPU time, as in a CUDA graph. A point whose kind has no other is chosen as it would be
in use, from another kind or by the default order. Each backend taken always is compared as well.

With --run the table chooses for the cases of RUN, which `attnreg bench selection --out RUN` wrote, by the
times of that run: what another table would have reached on the same shapes, without what it would change in
the times themselves.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnreg import _registry
from attnreg.bench.report import save, show
from attnreg.bench.shapes import held_out
from attnreg.bench.summary import FIXED
from attnreg.contract.spec import AttentionSpec, Device
from attnreg.tuning import table
from attnreg.tuning.index import Kinds
from attnreg.tuning.lookup import predict, reordered

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from attnreg.contract.spec import Direction
    from attnreg.tuning.points import Point
    from attnreg.tuning.table import Table

SHIPPED = Path(table.__file__).parent / "shipped" / "nvidia-h200.json"
DEVICE = Device.parse("sm_90")
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
CHOSEN = "chosen by the other points"


def choice(
    kinds: Kinds, spec: AttentionSpec, direction: Direction, able: Iterable[str], compiled: bool = False
) -> str:
    """Return which of the backends that can run a call is chosen."""
    default = sorted(able, key=lambda name: -_registry.find(name).backend.priority)
    if not spec.varlen and not spec.capturing:
        # Below SDPA torch's own kernel, cuDNN on a Hopper GPU, comes first in the default order.
        default.sort(key=lambda name: name != "cuDNN")
    prediction = predict(kinds, spec, direction, "table", compiled)
    if prediction is None:
        return default[0]
    lower = [name.casefold() for name in default]
    best = reordered(lower, lower, prediction)[0]
    return next(name for name in default if name.casefold() == best)


def spec_of(point: Point) -> AttentionSpec:
    """Return a call that the point describes."""
    kind, size = point.kind, point.size
    return AttentionSpec(
        device=DEVICE, dtype=kind.dtype, batch=size.batch, max_q=size.max_q, max_k=size.max_k,
        heads_q=size.heads_q, heads_k=size.heads_q // kind.ratio, head_dim=kind.head_dim,
        head_dim_v=kind.head_dim_v, tokens_q=size.tokens_q, tokens_k=size.tokens_k, varlen=kind.varlen,
        window=size.window, needs_backward=kind.direction == "backward", capturing=True,
    )  # fmt: skip


def left_out(points: Sequence[Point], direction: Direction) -> dict[str, list[float]]:
    """Return, for the choice of the other points and for each backend, its time over that of the fastest."""
    found: dict[str, list[float]] = {CHOSEN: []}
    for point in points:
        taken = {
            name: one.gpu_us
            for name, one in point.backends.items()
            if one.gpu_us is not None and not one.trouble
        }
        if point.kind.direction != direction or len(taken) < 2:
            continue
        kinds, fastest = Kinds([other for other in points if other.place != point.place]), min(taken.values())
        found[CHOSEN].append(taken[choice(kinds, spec_of(point), direction, taken)] / fastest)
        for name, time in taken.items():
            found.setdefault(f"always {name}", []).append(time / fastest)
    return found


def by_points(measured: Table) -> dict[str, Any]:
    """Print and return what leaving out each point gives."""
    results: dict[str, Any] = {}
    for direction in DIRECTIONS:
        results[direction] = {
            name: {"mean": statistics.geometric_mean(ratios), "worst": max(ratios), "points": len(ratios)}
            for name, ratios in left_out(measured.points, direction).items()
        }
        rows = [
            (name, f"{row['mean']:.3f}", f"{row['worst']:.2f}", str(row["points"]))
            for name, row in results[direction].items()
        ]
        title = f"{direction}: time over that of the fastest backend"
        show(title, ("choice", "geometric mean", "worst", "points"), rows)
    return results


def by_run(measured: Table, cases: Mapping[str, Any], compiled: bool) -> dict[str, Any]:
    """Print and return what the table would have chosen in a run, and the cases that lose over a tenth."""
    kinds, results = Kinds(measured.points, measured.fronts), {}
    for direction in DIRECTIONS:
        rows = []
        for shape in held_out("cuda"):
            found = cases.get(str(shape), {"directions": {}})["directions"].get(direction)
            if found is None:
                continue
            front = found["front"].items()
            able = {name.removeprefix(FIXED): took for name, took in front if name.startswith(FIXED)}
            name = choice(kinds, shape.spec(DEVICE), direction, able, compiled)
            rows.append({"case": str(shape), "chosen": name, "ratio": able[name] / min(able.values())})
        ratios = [row["ratio"] for row in rows]
        mean, worst = statistics.geometric_mean(ratios), max(ratios)
        results[direction] = {"mean": mean, "worst": worst, "cases": rows}
        losses = [(row["case"], row["chosen"], f"{row['ratio']:.2f}") for row in rows if row["ratio"] > 1.1]
        title = f"{direction}: {mean:.3f} of the best backend's time, worst {worst:.2f}, {len(rows)} cases"
        show(title, ("case that loses more than a tenth", "chosen", "over the best"), losses)
    return results


def main() -> None:
    """Print both directions."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", nargs="?", type=Path, default=SHIPPED)
    parser.add_argument("--run", type=Path, help="choose for the cases of this run")
    parser.add_argument("--compiled", action="store_true", help="RUN had the compiled call cache")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    measured = table.load(options.table)
    print(f"{measured.environment.device}, {len(measured.points)} points of {options.table.name}")
    if options.run is None:
        results = by_points(measured)
    else:
        cases = {row["case"]: row for row in json.loads(options.run.read_text())["results"]["rows"]}
        results = by_run(measured, cases, options.compiled)
    save(options.json, results)


if __name__ == "__main__":
    main()
