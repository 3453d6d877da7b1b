"""The quality of a measured table's choices, by times measured earlier. Needs no GPU.

    python benchmarks/table_choices.py [TABLE] --run RUN [--python] [--json FILE]

RUN is a file of `attnreg bench selection --out RUN`, with `--random` or without. A table, by default the
shipped table of the H200, chooses for the shapes of RUN, and the times of RUN judge the choices. That is what
the table would have reached on the same shapes, except for its effect on the times themselves. `--python`
means that RUN was without the compiled part.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnreg.core import registry
from attnreg.core.contract.spec import Device
from attnreg.core.selection.predictions import reordered
from attnreg.core.times import table
from attnreg.core.times.index import Kinds
from attnreg.core.times.kinds import PROCESSORS
from attnreg.core.times.lookup import predict, predict_both
from attnreg.tools.bench.losses import MUCH, losses_of
from attnreg.tools.bench.random_shapes import draw
from attnreg.tools.bench.report import save, show
from attnreg.tools.bench.shapes import BACKWARD, BOTH, FORWARD, held_out
from attnreg.tools.bench.summary import FIXED

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from attnreg.core.contract.spec import AttentionSpec
    from attnreg.core.registry.entry import Entry
    from attnreg.core.selection.predictions import Prediction
    from attnreg.tools.bench.shapes import Shape

SHIPPED = Path(table.__file__).parent / "shipped" / "nvidia-h200.json"
DEVICE = Device.parse("sm_90")


def fixed_shapes(results: Mapping[str, Any]) -> Iterator[tuple[Shape, str, dict[str, float]]]:
    """Yield each fixed shape, step, and what each backend loses."""
    cases = {row["case"]: row for row in results["rows"]}
    for shape in held_out("cuda"):
        for step in (FORWARD, BACKWARD):
            times = cases.get(str(shape), {"directions": {}})["directions"].get(step)
            if times is not None:
                best = min(took for name, took in times["front"].items() if name.startswith(FIXED))
                yield shape, step, {name: took / best for name, took in times["front"].items()}


def random_shapes(results: Mapping[str, Any]) -> Iterator[tuple[Shape, str, dict[str, float]]]:
    """Yield each shape that was drawn, step, and what each backend loses."""
    for row in results["rows"]:
        for step in row["rounds"]:
            seed = row.get("seed", results["seed"])  # joined runs have a seed in each row
            yield draw(seed, row["number"], "cuda"), step, losses_of(row, step)


def chosen(kinds: Kinds, shape: Shape, step: str, compiled: bool) -> Prediction | None:
    """Return a table's prediction for a step."""
    spec = shape.spec(DEVICE)
    if step == BOTH:
        return predict_both(kinds, spec, "table", compiled)["forward"]
    if step == FORWARD:
        spec = dataclasses.replace(spec, needs_backward=False)
    return predict(kinds, spec, "forward" if step == FORWARD else "backward", "table", compiled)


def choice(
    prediction: Prediction | None, spec: AttentionSpec, able: Iterable[str], entries: Mapping[str, Entry]
) -> str:
    """Return which of the backends that can run a call is chosen."""
    known = {name: entry for name in able if (entry := entries.get(name.casefold()))}
    priority = {name: entry.priority(spec) for name, entry in known.items()}
    default = sorted(able, key=lambda name: -priority.get(name, 0))
    if not spec.varlen and not spec.capturing:
        # Below SDPA torch's own kernel, cuDNN on a Hopper GPU, comes first in the default order.
        default.sort(key=lambda name: name != "cuDNN")
    if prediction is None:
        return default[0]
    lower = [name.casefold() for name in default]
    best = reordered(lower, lower, prediction)[0]
    return next(name for name in default if name.casefold() == best)


def by_run(kinds: Kinds, results: Mapping[str, Any], compiled: bool) -> dict[str, Any]:
    """Print and return the table's choices in a run, and the shapes that lose over a tenth."""
    rows_of_steps: dict[str, list[dict[str, Any]]] = {}
    for shape, step, losses in (random_shapes if "seed" in results else fixed_shapes)(results):
        able = {name.removeprefix(FIXED): loss for name, loss in losses.items() if name.startswith(FIXED)}
        prediction = chosen(kinds, shape, step, compiled)
        name = choice(prediction, shape.spec(DEVICE), able, registry.entries())
        rows_of_steps.setdefault(step, []).append({"case": str(shape), "chosen": name, "loss": able[name]})
    summed = {}
    for step, rows in rows_of_steps.items():
        losses = [row["loss"] for row in rows]
        mean, worst, above = (
            statistics.fmean(losses),
            max(losses),
            sum(x > MUCH for x in losses) / len(losses),
        )
        summed[step] = {"mean": mean, "worst": worst, "above": above, "shapes": rows}
        most = sorted((row for row in rows if row["loss"] > 1.1), key=lambda row: -row["loss"])
        title = (
            f"{step}: {mean:.3f} of the best backend's time, worst {worst:.2f}, "
            f"{above:.1%} above {MUCH}, {len(rows)} shapes"
        )
        cells = [(row["case"], row["chosen"], f"{row['loss']:.2f}") for row in most]
        show(title, ("shape that loses more than a tenth", "chosen", "over the best"), cells)
    return summed


def main() -> None:
    """Print every step."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", nargs="?", type=Path, default=SHIPPED)
    parser.add_argument("--run", type=Path, required=True, help="choose for the shapes of this run")
    parser.add_argument("--python", action="store_true", help="RUN was without the compiled call cache")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    measured = table.load(options.table)
    print(f"{measured.environment.device}, {len(measured.points)} points of {options.table.name}")
    kinds = Kinds(measured.points, measured.fronts, PROCESSORS)
    results = json.loads(options.run.read_text())["results"]
    save(options.json, by_run(kinds, results, not options.python))


if __name__ == "__main__":
    main()
