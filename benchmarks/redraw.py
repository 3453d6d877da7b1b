"""Draws a file of `attnreg bench NAME --out RUN`, of any machine.

    python benchmarks/redraw.py NAME RUN PICTURE
    python benchmarks/redraw.py selection RUN RUN ... PICTURE --out FILE
    python benchmarks/redraw.py fresh RUN --markdown        prints the tables of docs/benchmarks.md

Several runs of random shapes, on machines of the same kind, are joined: FILE has all of their shapes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from attnreg.tools.bench.fresh.tables import markdown
from attnreg.tools.bench.losses import summary, worst_of
from attnreg.tools.bench.plots import TITLES, draw
from attnreg.tools.bench.shapes import BOTH, FORWARD


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


def main() -> None:
    """Draw a run, or several joined runs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=TITLES)
    parser.add_argument("files", type=Path, nargs="+", help="runs, and the picture last")
    parser.add_argument("--out", type=Path, help="where several runs are saved as one")
    parser.add_argument("--markdown", action="store_true", help="print tables, and draw no picture")
    options = parser.parse_args()
    if options.markdown:
        if options.name != "fresh":
            parser.error("--markdown: of fresh only")
        for run in options.files:
            print(markdown(json.loads(run.read_text())["results"]))
        return
    *runs, picture = options.files
    if not runs:
        parser.error("expected a run and a picture")
    if len(runs) > 1 and (options.out is None or options.name != "selection"):
        parser.error("several runs: only of selection, and with --out")
    # Earlier runs have "by hand" instead of "called directly".
    texts = (
        run.read_text().replace("by_hand", "called_directly").replace("by hand", "called directly")
        for run in runs
    )
    documents = [json.loads(text) for text in texts]
    if len({document["machine"].get("gpu") for document in documents}) > 1:
        parser.error("several runs: they are of different GPUs")
    document = joined(documents) if options.out else documents[0]
    if options.out:
        options.out.write_text(json.dumps(document) + "\n")
    draw(options.name, document["results"], picture, document["machine"])


if __name__ == "__main__":
    main()
