"""Reads files of `attnreg bench NAME --out RUN`, also those of earlier versions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from attnreg.tools.bench.selection import BY_DEVICE
from attnreg.tools.bench.shapes import BOTH, FORWARD


def read(run: Path) -> Any:
    """Return a run. Earlier ones have "by hand" instead of "called directly"."""
    text = run.read_text().replace("by_hand", "called_directly").replace("by hand", "called directly")
    document = json.loads(text)
    results = document["results"]
    if isinstance(results, dict) and "rows" in results:
        results["rows"] = [_in_todays_form(row) for row in results["rows"]]
    return document


def _in_todays_form(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of `selection`, which earlier had medians alone, by direction, or of `sdpa`.

    The heads of a case of `sdpa` are part of its panel.
    """
    if "panel" in row:
        case, _, heads = row["case"].partition("\n")
        return row | {"case": case, "panel": ", ".join(filter(None, (row["panel"], heads)))}
    if "directions" not in row:
        return row
    steps = [step for step in (FORWARD, BOTH) if step in row["directions"]]
    times = {step: row["directions"][step]["front"] for step in steps}
    rounds = {step: {name: [time] for name, time in times[step].items()} for step in steps}
    return row | {"microseconds": times, "rounds": rounds, "bound": dict.fromkeys(steps, BY_DEVICE)}
