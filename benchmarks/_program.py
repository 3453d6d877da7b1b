"""What the scripts share: the options that most of them have, and how they print."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from attnreg.tools.bench.report import machine_line
from attnreg.tools.cli.output import table

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

HERE = "cuda" if torch.cuda.is_available() else "cpu"


def parser_of(
    description: str | None, rounds: int = 0, devices: Iterable[str] = ()
) -> argparse.ArgumentParser:
    """Return a parser of `--out`; with these also of `--rounds`, by default so many, and of `--device`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if devices:
        parser.add_argument("--device", choices=list(devices), default=HERE)
    if rounds:
        parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--out", type=Path, help="the file that gets the results, JSON")
    return parser


def show_machine() -> None:
    """Print what the figures are measured on."""
    print(f"{machine_line()}\n")


def show(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table, whose first column is text and the others numbers."""
    table(title, rows, header, right=len(header) - 1)
