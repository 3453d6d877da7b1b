"""Pictures of what was measured: which series, in which panels; `figures` draws them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnreg.bench.figures import bars, flat, lines
from attnreg.bench.machine import machine
from attnreg.bench.shapes import BACKWARD, FORWARD
from attnreg.bench.summary import BY_HAND, CHOSEN, FIXED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["draw"]

TITLES = {
    "varlen": "Packed sequences through varlen_attn",
    "sdpa": "Dense calls through scaled_dot_product_attention",
    "overhead": "What a call costs the host",
    "selection": "Shapes that no table was tuned on",
}


WORDS = {
    "routers": "Routers over torch's ops",
    "varlen": "varlen_attn above kernels that do nothing",
    "by_hand": "varlen_attn above the cpu backend",
}


def draw(name: str, results: Any, path: Path, known: Mapping[str, str] | None = None) -> None:
    """Write the picture of a measurement, as PNG or SVG by its suffix; `known` is another machine's."""
    known = known or machine()
    where = known.get("gpu", known["processor"])
    title = f"{TITLES[name]}, {where}, torch {known['torch']}"
    if name == "selection":
        lines(_panels(results["rows"]), title, path)
    elif name == "overhead":
        flat(_costs(results), title, path)
    else:
        bars(results["rows"], results["matmul_teraflops"], title, path)


def _panels(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[list[str], dict[str, list[float | None]]]]:
    """Return for each direction its cases, the best choice first, and each strategy's ratios to the best.

    The best is that of the fixed orders, which go through the same front.
    """
    panels = {}
    for direction in (FORWARD, BACKWARD):
        taken = {row["case"]: row["directions"].get(direction, {}) for row in rows}
        ratios = {
            case: _to_the_best(found) for case, found in taken.items() if CHOSEN in found.get("front", ())
        }
        cases = sorted(ratios, key=lambda case, ratios=ratios: ratios[case][CHOSEN])  # type: ignore[misc]
        names = dict.fromkeys(name for found in ratios.values() for name in found)
        if cases:
            title = f"{direction}: time over that of the best backend through the same front"
            panels[title] = (cases, {name: [ratios[case].get(name) for case in cases] for name in names})
    return panels


def _to_the_best(found: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    times = dict(found["front"])
    if found["by_hand"]:
        times[BY_HAND] = min(found["by_hand"].values())
    best = min(time for name, time in times.items() if name.startswith(FIXED))
    return {name: time / best for name, time in times.items()}


def _costs(results: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return microseconds by what was asked and by side, whichever kind of device they are from."""
    found: dict[str, dict[str, float]] = {}
    for part, rows in results.items():
        if isinstance(rows, list):
            found[WORDS.get(part, part)] = {row["name"]: row["microseconds"] for row in rows}
            continue
        for side, steps in rows.items():
            for step, microseconds in steps.items():
                found.setdefault(f"{part}: {step}", {})[side] = microseconds
    return found
