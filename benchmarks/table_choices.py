"""The quality of a measured table's choices, by times measured earlier. Needs no GPU.

    python benchmarks/table_choices.py [TABLE] --run RUN [--python] [--out FILE]

RUN is a file of `attnreg bench selection --out RUN`, with `--random` or without. A table, by default the
shipped table of the H200, chooses for the shapes of RUN, and the times of RUN judge the choices. That is what
the table would have reached on the same shapes, except for its effect on the times themselves. `--python`
means that RUN was without the compiled part.
"""

from __future__ import annotations

import dataclasses
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _program import parser_of, show
from _runs import read

from attnreg.core import registry
from attnreg.core.contract.spec import Device
from attnreg.core.selection.predictions import reordered
from attnreg.core.times import table
from attnreg.core.times.index import Kinds
from attnreg.core.times.kinds import PROCESSORS
from attnreg.core.times.lookup import predict, predict_both
from attnreg.tools.bench.report import save
from attnreg.tools.bench.selection import FIXED, MUCH, losses_of
from attnreg.tools.bench.shapes import BOTH
from attnreg.tools.measure import Case

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from attnreg.core.contract.spec import AttentionSpec
    from attnreg.core.registry.entry import Entry
    from attnreg.core.selection.predictions import Prediction

SHIPPED = Path(table.__file__).parent / "shipped" / "nvidia-h200.json"
DEVICE = Device.parse("sm_90")


def specs_of(results: Mapping[str, Any]) -> Iterator[tuple[AttentionSpec, str, dict[str, Any]]]:
    """Yield the call of each row with the row's name and what each backend loses in each step."""
    for row in results["rows"]:
        facts, lens = row["shape"], []
        for name in ("lengths_q", "lengths_k"):
            each = facts[name]
            lens.append((each,) * facts["batch"] if isinstance(each, int) else tuple(each))
        case = Case(
            name=row["case"], lens_q=lens[0], lens_k=lens[1], varlen=facts["varlen"],
            heads=tuple(facts["heads"]), dims=(facts["dim"],) * 2, window=(-1, 0 if facts["causal"] else -1),
            dtype=facts["dtype"],
        )  # fmt: skip
        spec = case.spec(DEVICE, needs_backward=facts["backward"])
        yield spec, row["case"], {step: losses_of(row, step) for step in row["rounds"]}


def chosen(kinds: Kinds, spec: AttentionSpec, step: str, compiled: bool) -> Prediction | None:
    """Return a table's prediction for a step."""
    if step == BOTH:
        return predict_both(kinds, spec, "table", compiled)["forward"]
    return predict(kinds, dataclasses.replace(spec, needs_backward=False), "forward", "table", compiled)


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
    for spec, case, losses in specs_of(results):
        for step, ratios in losses.items():
            able = {name.removeprefix(FIXED): loss for name, loss in ratios.items() if name.startswith(FIXED)}
            name = choice(chosen(kinds, spec, step, compiled), spec, able, registry.entries())
            rows_of_steps.setdefault(step, []).append({"case": case, "chosen": name, "loss": able[name]})
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
    parser = parser_of(__doc__)
    parser.add_argument("table", nargs="?", type=Path, default=SHIPPED)
    parser.add_argument("--run", type=Path, required=True, help="choose for the shapes of this run")
    parser.add_argument("--python", action="store_true", help="RUN was without the compiled call cache")
    options = parser.parse_args()
    measured = table.load(options.table)
    print(f"{measured.environment.device}, {len(measured.points)} points of {options.table.name}")
    kinds = Kinds(measured.points, measured.fronts, PROCESSORS)
    results = read(options.run)["results"]
    save(options.out, by_run(kinds, results, not options.python))


if __name__ == "__main__":
    main()
