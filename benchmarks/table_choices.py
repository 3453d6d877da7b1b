"""How good a measured table's choices are, by times that were measured before. Needs no GPU.

    python benchmarks/table_choices.py [TABLE] --run RUN [--compiled] [--json FILE]

The table (by default the one that ships for the H200) chooses for the cases of RUN, which `attnreg bench
selection --out RUN` wrote, by the times of that run: what another table would have reached on the same
shapes, without what it would change in the times themselves. `attnreg tune --check` needs no run: it chooses
each point of a table by the others.
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
from attnreg.contract.spec import Device
from attnreg.tuning import table
from attnreg.tuning.index import Kinds
from attnreg.tuning.lookup import predict
from attnreg.tuning.review import choice

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attnreg.contract.spec import Direction
    from attnreg.tuning.table import Table

SHIPPED = Path(table.__file__).parent / "shipped" / "nvidia-h200.json"
DEVICE = Device.parse("sm_90")
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


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
            spec = shape.spec(DEVICE)
            name = choice(predict(kinds, spec, direction, "table", compiled), spec, able, _registry.entries())
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
    parser.add_argument("--run", type=Path, required=True, help="choose for the cases of this run")
    parser.add_argument("--compiled", action="store_true", help="RUN had the compiled call cache")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    measured = table.load(options.table)
    print(f"{measured.environment.device}, {len(measured.points)} points of {options.table.name}")
    cases = {row["case"]: row for row in json.loads(options.run.read_text())["results"]["rows"]}
    save(options.json, by_run(measured, cases, options.compiled))


if __name__ == "__main__":
    main()
