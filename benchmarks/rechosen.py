"""What a table would have chosen in a run of `attnreg bench selection`, by the times of that run.

    python benchmarks/rechosen.py RUN [--table TABLE] [--compiled] [--json FILE]

RUN is what `attnreg bench selection --out RUN` wrote; the table is by default the one that ships for the
H200. For each case and direction the table chooses, and the time of that backend through the front, as
the run measured it, is compared with the best backend's. Needs no GPU: it says what another table would
come to, on the same shapes, without what it would change in the times themselves.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leave_one_out import SHIPPED

from attnreg import _registry
from attnreg.bench.cases import held_out
from attnreg.bench.report import save, show
from attnreg.bench.summary import FIXED
from attnreg.contract.spec import Device
from attnreg.tuning import table
from attnreg.tuning.index import Kinds
from attnreg.tuning.lookup import predict, reordered

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attnreg.bench.shapes import Shape
    from attnreg.contract.spec import Direction

DEVICE = Device.parse("sm_90")
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


def chosen(
    kinds: Kinds, shape: Shape, direction: Direction, able: Mapping[str, float], compiled: bool
) -> str:
    """Return which of the backends that ran the table chooses."""
    default = sorted(able, key=lambda name: -_registry.find(name).backend.priority)
    if not shape.varlen:  # below SDPA torch's own kernel, cuDNN on a Hopper GPU, leads the default order
        default.sort(key=lambda name: name != "cuDNN")
    prediction = predict(kinds, shape.spec(DEVICE), direction, "table", compiled)
    if prediction is None:
        return default[0]
    lower = [name.casefold() for name in default]
    best = reordered(lower, lower, prediction)[0]
    return next(name for name in able if name.casefold() == best)


def main() -> None:
    """Print both directions, and the cases in which the choice loses more than a tenth."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--table", type=Path, default=SHIPPED)
    parser.add_argument("--compiled", action="store_true", help="RUN had compiled routers")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    measured = table.load(options.table)
    kinds = Kinds(measured.points, measured.fronts)
    cases = {row["case"]: row for row in json.loads(options.run.read_text())["results"]["rows"]}
    print(f"{options.table.name}, {len(measured.points)} points, on {len(cases)} cases of {options.run.name}")
    results: dict[str, Any] = {}
    for direction in DIRECTIONS:
        rows = []
        for shape in held_out("cuda"):
            found = cases.get(str(shape), {"directions": {}})["directions"].get(direction)
            if found is None:
                continue
            able = {
                name.removeprefix(FIXED): took
                for name, took in found["front"].items()
                if name.startswith(FIXED)
            }
            name = chosen(kinds, shape, direction, able, options.compiled)
            rows.append({"case": str(shape), "chosen": name, "ratio": able[name] / min(able.values())})
        ratios = [row["ratio"] for row in rows]
        mean, worst = statistics.geometric_mean(ratios), max(ratios)
        results[direction] = {"mean": mean, "worst": worst, "cases": rows}
        losses = [(row["case"], row["chosen"], f"{row['ratio']:.2f}") for row in rows if row["ratio"] > 1.1]
        title = f"{direction}: {mean:.3f} of the best backend's time, worst {worst:.2f}, {len(rows)} cases"
        show(title, ("case that loses more than a tenth", "chosen", "over the best"), losses)
    save(options.json, results)


if __name__ == "__main__":
    main()
