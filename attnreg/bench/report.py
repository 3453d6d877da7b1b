"""What a measurement returns: plain data for JSON, tables, lines about aims, and the machine it ran on."""

from __future__ import annotations

import json
import platform
import re
import sys
import time
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from attnreg.errors import ConfigError
from attnreg.tuning.table import write_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console

PACKAGES = ("flash-attn", "flash-attn-4", "nvidia-cudnn-frontend")


class Table(NamedTuple):
    """A table; the first column is text, the others are numbers."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass
class Report:
    """What came of a measurement.

    Attributes:
        results: plain data.
        tables: the same for people.
        summary: lines that say which targets are reached.
    """

    results: Any
    tables: list[Table]
    summary: list[str] = field(default_factory=list)


@dataclass
class Job:
    """What is to be measured, and where progress and results go.

    Attributes:
        device: where.
        backends: the names of those that are compared; all of them load there.
        rounds: how often each side is measured.
        quick: whether a few cases are enough.
        deadline: when to begin no further case, in the seconds of `time.monotonic`.
        out: the file in which everything so far is kept after each case.
        table: the measured table to choose by, if not the one that ships for the device.
        advance: called with the number of cases done, of how many, and the name of the next.
        left_out: what wasn't measured, and why.
        kept: the results so far; None before the first case is done.
    """

    device: torch.device
    backends: tuple[str, ...]
    rounds: int
    quick: bool = False
    deadline: float = inf
    out: Path | None = None
    table: Path | None = None
    advance: Callable[[int, int, str], None] = lambda *_: None
    left_out: list[str] = field(default_factory=list)
    kept: Any = None

    @property
    def late(self) -> bool:
        """Whether the time is spent."""
        return time.monotonic() >= self.deadline

    def leave_out(self, what: str, why: str) -> None:
        """Record that something isn't measured, and why."""
        self.left_out.append(f"{what}: {why}")

    def keep(self, results: Any) -> None:
        """Keep the results so far, and write them."""
        self.kept = results
        save(self.out, results, self.left_out)


def document(results: Any, left_out: Sequence[str] = ()) -> dict[str, Any]:
    """Return results with what they were measured on."""
    omitted = {"left_out": list(left_out)} if left_out else {}
    return {"machine": machine(), "results": results, **omitted}


def save(path: Path | None, results: Any, left_out: Sequence[str] = ()) -> None:
    """Write the results, and what they were measured on, as JSON.

    Raises:
        ConfigError: the file can't be written.
    """
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, _text(document(results, left_out)) + "\n")
    except OSError as error:
        raise ConfigError(f"{path}: can't be written: {error.strerror or error}") from error


def _text(value: Any, indent: str = "") -> str:
    """Return JSON with a line for each row: short enough to keep, and to see what changed."""
    inner = indent + " "
    nested = isinstance(value, dict) and any(isinstance(one, dict | list) for one in value.values())
    if nested and len(indent) < 2:
        rows = [f"{inner}{json.dumps(key)}: {_text(one, inner)}" for key, one in value.items()]
        return "{\n" + ",\n".join(rows) + f"\n{indent}}}"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(inner + json.dumps(_rounded(row)) for row in value) + f"\n{indent}]"
    return json.dumps(_rounded(value))


def _rounded(value: Any) -> Any:
    """Return the same with five digits of each number: no clock has more."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list | tuple) else value


def show(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]], place: Console | None = None
) -> None:
    """Print a table, on a console or for 110 columns."""
    from rich.console import Console
    from rich.table import Table as Drawn
    from rich.text import Text

    drawn = Drawn(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for index, name in enumerate(header):
        drawn.add_column(name, justify="left" if index == 0 else "right")
    for row in rows:
        drawn.add_row(*map(Text, row))
    place = place or Console(width=110)
    place.print(Text(f"\n{title}", style="bold"))
    place.print(drawn)


def show_machine(place: Console | None = None, known: dict[str, str] | None = None) -> None:
    """Print what the figures were measured on, unless that is `known` already."""
    from rich.console import Console
    from rich.text import Text

    facts = " · ".join(f"{key} {value}" for key, value in (known or machine()).items())
    (place or Console(width=110)).print(Text(facts))


def machine() -> dict[str, str]:
    """Return what a figure has to be read with, each fact as text."""
    facts = {
        "processor": _processor(),
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "attnreg": sys.modules["attnreg"].__version__,
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
        facts["cuda"] = str(torch.version.cuda)
        facts["cudnn"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
        facts["driver"] = _driver()
        facts.update(_packages())
    return facts


def _driver() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "unknown"
    found = re.search(r"\d{3}\.\d+(\.\d+)?", text)
    return found.group() if found else "unknown"


def _packages() -> dict[str, str]:
    """Return the versions of those that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.machine()
