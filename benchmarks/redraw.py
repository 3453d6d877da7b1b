"""Draws a file of `attnreg bench NAME --out RUN`, of any machine.

    python benchmarks/redraw.py                             draws all pictures of docs/results/
    python benchmarks/redraw.py NAME RUN PICTURE
    python benchmarks/redraw.py selection RUN RUN ... PICTURE --out FILE
    python benchmarks/redraw.py fresh RUN --markdown        prints the tables of docs/results/fresh.md

Several runs of random shapes, on machines of the same kind, are joined: FILE has all of their shapes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _runs import read
from context_parallel_simulated import draw as draw_simulated

from attnreg.tools.bench.fresh import each_case, ratio_text
from attnreg.tools.bench.plots import TITLES, draw
from attnreg.tools.bench.report import time_text
from attnreg.tools.bench.selection import summary, worst_of
from attnreg.tools.bench.shapes import BOTH, FORWARD

if TYPE_CHECKING:
    from collections.abc import Iterator

RESULTS = Path(__file__).parents[1] / "docs" / "results"

# The pictures of docs/results/, each with its name here and its run.
PICTURES = {
    "overhead_gpu.png": ("overhead", "overhead_compiled_gpu.json"),
    "sdpa_gpu.png": ("sdpa", "sdpa_gpu.json"),
    "selection_gpu.png": ("selection", "selection_gpu.json"),
    "selection_random_h100.png": ("selection", "selection_random_h100.json"),
    "selection_random_h200.png": ("selection", "selection_random_h200.json"),
    "varlen_gpu.png": ("varlen", "varlen_gpu.json"),
}
SIMULATED = "context_parallel_simulated"


def redraw_all(folder: Path) -> None:
    """Draw all pictures of docs/results/ into a folder."""
    for picture, (name, run) in PICTURES.items():
        document = read(RESULTS / run)
        draw(name, document["results"], folder / picture, document["machine"])
    rows = json.loads((RESULTS / f"{SIMULATED}.json").read_text())
    draw_simulated(rows, folder / f"{SIMULATED}.png")


def joined(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Join runs of random shapes; each row has the seed by which it was drawn."""
    rows = [{"seed": run["results"]["seed"]} | row for run in runs for row in run["results"]["rows"]]
    results = {
        "seed": ", ".join(str(run["results"]["seed"]) for run in runs),
        "table": runs[0]["results"]["table"],
        "summary": summary(rows),
        "worst": {step: worst_of(rows, step) for step in (FORWARD, BOTH)},
        "rows": rows,
    }
    return {"machine": runs[0]["machine"], "results": results}


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return the tables of a page of the docs: milliseconds, median and 95th percentile."""
    return "\n\n".join("\n".join(table(case, step, here)) for (case, step), here in each_case(rows))


def table(case: str, step: str, rows: list[Any]) -> Iterator[str]:
    """Yield the lines of a table."""
    same, *others = dict.fromkeys(row["stream"] for row in rows)
    ratios = [f"{stream} / {of}" for of in (same, "torch's") for stream in others]
    yield "| " + " | ".join([f"{case}, {step}, ms", same, *others, *ratios, "first call"]) + " |"
    yield "|---" * (3 + 3 * len(others)) + "|"
    for side in dict.fromkeys(row["side"] for row in rows):
        by = {row["stream"]: row for row in rows if row["side"] == side}
        cells = [f"{time_text(row['milliseconds'])} ({time_text(row['p95'])})" for row in by.values()]
        cells += [f"{by[stream]['over_same']:.2f}" for stream in others]
        cells += [ratio_text(by[stream]["over_yardstick"]) for stream in others]
        yield "| " + " | ".join([side, *cells, time_text(by[same]["first"][0])]) + " |"


def main() -> None:
    """Draw a run, or several joined runs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=TITLES, nargs="?", help="without one, all pictures are drawn")
    parser.add_argument("files", type=Path, nargs="*", help="runs, and the picture last")
    parser.add_argument("--out", type=Path, help="where several runs are saved as one")
    parser.add_argument("--markdown", action="store_true", help="print tables, and draw no picture")
    options = parser.parse_args()
    if options.name is None:
        redraw_all(RESULTS)
        return
    if options.markdown:
        if options.name != "fresh":
            parser.error("--markdown: of fresh only")
        for run in options.files:
            print(markdown(read(run)["results"]["rows"]))
        return
    if len(options.files) < 2:
        parser.error("expected a run and a picture")
    *runs, picture = options.files
    if len(runs) > 1 and (options.out is None or options.name != "selection"):
        parser.error("several runs: only of selection, and with --out")
    documents = [read(run) for run in runs]
    if len({document["machine"].get("gpu") for document in documents}) > 1:
        parser.error("several runs: they are of different GPUs")
    document = joined(documents) if options.out else documents[0]
    if options.out:
        options.out.write_text(json.dumps(document) + "\n")
    draw(options.name, document["results"], picture, document["machine"])


if __name__ == "__main__":
    main()
