"""The results of a measurement: plain data for JSON, tables, lines about aims, and the machine."""

from __future__ import annotations

import contextlib
import json
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from math import inf
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from attnreg.core.torchlib.caches import write_whole
from attnreg.errors import BackendUnavailableError, file_errors

T = TypeVar("T")

PACKAGES = ("flash-attn", "flash-attn-4", "nvidia-cudnn-frontend")


class PrintedTable(NamedTuple):
    """A table; the first column is text, the others are numbers."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass
class Job:
    """A measurement: what to measure, where progress and results go, and the results so far.

    Attributes:
        device: The device that the calls run on.
        backends: The names of the backends to compare. All of them load on the device.
        rounds: The number of measurements of each side.
        quick: A few cases are enough.
        deadline: No case begins after it, in the seconds of `time.monotonic`.
        out: The file to which the results so far are written after each case.
        table: The measured table to choose by. None means the table that ships for the device.
        parts: The parts of a benchmark to measure. Empty means all of them.
        advance: Called with the number of cases done, the number of all, and the next case's name.
        left_out: The cases that weren't measured, each with the reason.
        kept: The results so far as plain data. None before the first case is done.
        tables: The results so far as tables to print.
        summary: Lines about the results.
    """

    device: torch.device
    backends: tuple[str, ...]
    rounds: int
    quick: bool = False
    deadline: float = inf
    out: Path | None = None
    table: Path | None = None
    parts: tuple[str, ...] = ()
    advance: Callable[[int, int, str], None] = lambda *_: None
    left_out: list[str] = field(default_factory=list)
    kept: Any = None
    tables: list[PrintedTable] = field(default_factory=list)
    summary: list[str] = field(default_factory=list)

    @property
    def late(self) -> bool:
        """Whether the time is spent."""
        return time.monotonic() >= self.deadline

    def in_time(self, cases: Sequence[T]) -> Iterator[T]:
        """Yield each case that there is time for, and record how many others there are."""
        for number, case in enumerate(cases):
            self.advance(number, len(cases), str(case))
            if self.late:
                self.leave_out(f"{len(cases) - number} of {len(cases)} cases", "the time was spent")
                return
            yield case

    def wants(self, part: str) -> bool:
        """Whether a part of a benchmark is to be measured."""
        return not self.parts or part in self.parts

    def leave_out(self, what: str, why: str) -> None:
        """Record that something isn't measured, and why."""
        self.left_out.append(f"{what}: {why}")

    def check_measured(self, rows: Sequence[object]) -> None:
        """Raise `BackendUnavailableError` where there are no rows, with what was left out."""
        if not rows:
            raise BackendUnavailableError("; ".join(["nothing could be measured", *self.left_out[:3]]))

    def keep(self, results: Any) -> None:
        """Keep the results so far, and write them."""
        self.kept = results
        save(self.out, results, self.left_out)


def document(results: Any, left_out: Sequence[str] = ()) -> dict[str, Any]:
    """Return results with what they were measured on."""
    data = {"machine": machine(), "results": results}
    return data | {"left_out": list(left_out)} if left_out else data


def save(path: Path | None, results: Any, left_out: Sequence[str] = ()) -> None:
    """Write the results, and what they were measured on, as JSON; raises `ConfigError` if it can't."""
    if path is None:
        return
    with file_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, _json(document(results, left_out)) + "\n")


def _json(value: Any, indent: str = "") -> str:
    """Return JSON with a line for each row: short enough to keep, and to see what changed."""
    inner = indent + " "
    nested = isinstance(value, dict) and any(isinstance(inside, dict | list) for inside in value.values())
    if nested and len(indent) < 2:
        rows = [f"{inner}{json.dumps(key)}: {_json(inside, inner)}" for key, inside in value.items()]
        return "{\n" + ",\n".join(rows) + f"\n{indent}}}"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(inner + json.dumps(_rounded(row)) for row in value) + f"\n{indent}]"
    return json.dumps(_rounded(value))


def _rounded(value: Any) -> Any:
    """Return the value with each number rounded to five digits: no clock is more exact."""
    return json.loads(json.dumps(value), parse_float=lambda number: float(f"{float(number):.5g}"))


def time_text(value: float) -> str:
    """Return a time without its unit: three significant digits, from 1000 on a whole number."""
    return f"{value:.0f}" if value >= 999.5 else f"{value:#.3g}".rstrip(".")


def machine_line() -> str:
    """Return what figures are measured on here, as a line."""
    return " · ".join(f"{key} {value}" for key, value in machine().items())


def machine() -> dict[str, str]:
    """Return the facts that a figure depends on, each as text."""
    processors = re.findall(r"^model name\s*:\s*(.*?)\s*$", _text_of("/proc/cpuinfo"), re.MULTILINE)
    kind = platform.processor() or platform.machine()
    facts = {
        "processor": f"{processors[0]}, {len(processors)} cores" if processors else kind,
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "attnreg": sys.modules["attnreg"].__version__,
    }
    if torch.cuda.is_available():
        driver = re.search(r"\d{3}\.\d+(\.\d+)?", _text_of("/proc/driver/nvidia/version"))
        facts["gpu"] = torch.cuda.get_device_name()
        facts["cuda"] = str(torch.version.cuda)
        facts["cudnn"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
        facts["driver"] = driver.group() if driver else "unknown"
        for name in PACKAGES:
            with contextlib.suppress(PackageNotFoundError):
                facts[name] = version(name)
    return facts


def _text_of(path: str) -> str:
    """Return the text of a file of the operating system, or "" if there is no such file."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""
