"""Draws what `attnreg bench NAME --out RUN` has written, on whatever machine that was.

python benchmarks/redraw.py NAME RUN PICTURE
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from attnreg.bench.plots import TITLES, draw


def main() -> None:
    """Draw one run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=TITLES)
    parser.add_argument("run", type=Path)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    # Earlier runs say "by hand" for what is called directly.
    text = options.run.read_text().replace("by_hand", "called_directly").replace("by hand", "called directly")
    document = json.loads(text)
    draw(options.name, document["results"], options.picture, document["machine"])


if __name__ == "__main__":
    main()
