"""The time of 8 and 64 ranks by each method, by attnreg's model of time: nothing is measured.

    python -m benchmarks.context_parallel_simulated --out FILE.json --plot FILE.png

The model (`attnreg/parallel/estimates.py`) has the rates of a kernel and a link, measured on two H100s.
For 64 ranks it assumes a link of 45 GB/s, as between nodes whose GPUs each have a network card of 400 Gbit/s.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from pathlib import Path
from typing import Any

import attnreg
from attnreg.parallel.estimates import Rates

HEADS, HEADS_K, DIM = 64, 8, 128
TOKENS = [2**power for power in range(14, 21)]
# Ranks, where they are, and their rates.
SETTINGS = [(8, "one node", Rates()), (64, "eight nodes, 45 GB/s", Rates(link=45e9))]
BATCHES = {
    "one document": "zigzag",
    "documents of 500 to 20,000": "balanced",
    "the same, window 4,096": "balanced",
}


def ends_of(batch: str, tokens: int) -> list[int]:
    """Return the offsets of a batch's documents."""
    if batch == "one document":
        return [0, tokens]
    draw, lengths = random.Random(0), list[int]()
    while sum(lengths) < tokens:
        lengths.append(min(draw.randint(500, 20000), tokens - sum(lengths)))
    return list(itertools.accumulate([0, *lengths]))


def simulate() -> list[dict[str, Any]]:
    """Return a row for each setting, batch, size and method."""
    rows = []
    for (ranks, where, rates), (batch, how), tokens in itertools.product(SETTINGS, BATCHES.items(), TOKENS):
        window = (4096 if "window" in batch else -1, 0)
        layout = attnreg.spread_documents(ends_of(batch, tokens), ranks, how, window_size=window)
        choice = attnreg.explain_context_parallel(
            layout, heads=HEADS, heads_k=HEADS_K, head_dim=DIM, window_size=window, rates=rates
        )
        alone = sum(choice.pairs) * 4 * HEADS * DIM * 3.5 / rates.flops
        possible = [estimate for estimate in choice.methods if not estimate.refusal]
        shares = {estimate.name: alone / (ranks * estimate.seconds) for estimate in possible}
        rows.append(
            {
                "ranks": ranks, "where": where, "batch": batch, "tokens": tokens, "chosen": choice.method,
                "imbalance": choice.imbalance, "shares": shares,
                "memory": {estimate.name: estimate.memory for estimate in possible},
            }
        )  # fmt: skip
    return rows


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    """Plot the share of one GPU's rate by tokens."""
    from attnreg.tools.drawing import COLOURS, INK, MARKS, SMALL, add_legend, dress, new_figure, save

    figure = new_figure(5.2)
    axes = figure.subplots(len(SETTINGS), len(BATCHES), sharex=True, sharey=True, squeeze=False)
    for (line, (ranks, where, _)), (column, batch) in itertools.product(
        enumerate(SETTINGS), enumerate(BATCHES)
    ):
        place = axes[line][column]
        here = [row for row in rows if row["ranks"] == ranks and row["batch"] == batch]
        for number, method in enumerate(("all_to_all", "all_gather", "ring")):
            place.plot(
                TOKENS, [row["shares"].get(method, float("nan")) for row in here], MARKS[number],
                linestyle="-", markersize=4.5, color=COLOURS[number], label=method,
            )  # fmt: skip
        dress(place, f"{ranks} ranks, {where}\n{batch}", grid="both")
        place.set_xscale("log", base=2)
        place.set_ylim(0, 1.05)
        place.set_xticks(TOKENS[::2], [f"{tokens // 1024:,} k" for tokens in TOKENS[::2]])
    for place in axes[-1]:
        place.set_xlabel("tokens of the batch", color=INK, fontsize=SMALL)
    figure.supylabel("share of one GPU's rate (higher is better)", color=INK, fontsize=SMALL)
    add_legend(figure)
    save(figure, "Packed batches over several GPUs, simulated: nothing was measured", file)


def main() -> None:
    """Simulate, save and plot."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the file that gets the results, JSON")
    parser.add_argument("--plot", type=Path, help="the file that gets the plot, PNG")
    options = parser.parse_args()
    if not options.out.resolve().parent.is_dir():
        parser.error(f"--out: got {options.out}, expected a file in a folder that exists")
    rows = simulate()
    options.out.write_text(json.dumps(rows, indent=1) + "\n")
    for row in rows:
        shares = "  ".join(f"{method} {share:.2f}" for method, share in row["shares"].items())
        print(f"{row['ranks']:>2}  {row['batch']:<42}{row['tokens']:>9,}  {row['chosen']:<11} {shares}")
    if options.plot:
        draw(rows, options.plot)


if __name__ == "__main__":
    main()
