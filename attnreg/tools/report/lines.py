"""The lines that processes write for `ATTNREG_REPORT` or `ATTNREG_STATS`, read and joined."""

from __future__ import annotations

import collections
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnreg.core.contract.lengths import Lengths, steps_of
from attnreg.core.contract.spec import LENGTHS, AttentionSpec
from attnreg.core.times.traces import OF_DEVICE, check_form, device_from, spec_from
from attnreg.errors import ConfigError, InvalidInputError, file_errors, short_repr
from attnreg.tools.report import BEGIN_OF_LINE

log = logging.getLogger("attnreg")


@dataclass
class CallRow:
    """Calls of the same kind, direction and backend, and of similar lengths.

    Attributes:
        spec: of the first call.
        direction, backend: what ran.
        source: who decided.
        calls: how many.
        decided_us: how long it took to decide and to load kernels, in all processes.
        first_us: the longest first call of a process.
        timed, timed_us: how many other calls were timed, and the sum of their times.
        shortest_us, longest_us: of those.
    """

    spec: AttentionSpec
    direction: str
    backend: str
    source: str
    calls: int = 0
    decided_us: float = 0.0
    first_us: float = 0.0
    timed: int = 0
    timed_us: float = 0.0
    shortest_us: float = 0.0
    longest_us: float = 0.0

    @property
    def mean_us(self) -> float | None:
        """The mean time of a call; None if it isn't known. A single call on a CPU is its first."""
        if self.timed:
            return self.timed_us / self.timed
        return self.first_us if self.calls and self.spec.device.type == "cpu" else None

    @property
    def total_us(self) -> float | None:
        """The mean times the number of calls; None if it isn't known."""
        return None if self.mean_us is None else self.mean_us * self.calls

    @property
    def first_use_us(self) -> float:
        """What the first call took beyond a later one, deciding and loading included."""
        return self.decided_us + max(self.first_us - (self.mean_us or 0.0), 0.0)

    def add(self, row: Mapping[str, Any]) -> None:
        """Add the row of a process."""
        if row["timed"]:
            shortest = row["shortest_us"]
            self.shortest_us = min(self.shortest_us, shortest) if self.timed else shortest
            self.longest_us = max(self.longest_us, row["longest_us"])
        self.first_us = max(self.first_us, row["first_us"])
        for name in ("calls", "decided_us", "timed", "timed_us"):
            setattr(self, name, getattr(self, name) + row[name])


@dataclass
class RunReport:
    """The lines of a run.

    Attributes:
        processes: the lines as they are.
        rows: the calls that were timed or could have been, the longest total first.
    """

    processes: list[dict[str, Any]]
    rows: list[CallRow] = field(default_factory=list)

    @property
    def reports(self) -> list[dict[str, Any]]:
        """What was timed, for each process that did."""
        return [line["report"] for line in self.processes if "report" in line]

    @property
    def calls(self) -> dict[str, dict[str, int]]:
        """Calls by backend and direction."""
        counts: dict[str, dict[str, int]] = {}
        for line in self.processes:
            for backend, both in line["calls"].items():
                of_backend = counts.setdefault(backend, {"forward": 0, "backward": 0})
                for direction, count in both.items():
                    of_backend[direction] += count
        return counts

    @property
    def total_us(self) -> float:
        """The time of all calls whose time is known."""
        return sum(row.total_us or 0.0 for row in self.rows)

    @property
    def untimed(self) -> int:
        """How many calls of backends have no time."""
        timed = sum(row.calls for row in self.rows if row.total_us is not None)
        return max(sum(map(sum, (both.values() for both in self.calls.values()))) - timed, 0)

    def counted(self, key: str) -> list[dict[str, Any]]:
        """Return the rows of a field of `Stats.to_dict`, those alike in one, the most first."""
        joined: dict[tuple[Any, ...], dict[str, Any]] = {}
        for line in self.processes:
            for row in line[key]:
                place = tuple(row[name] for name in _ALIKE[key])
                if place in joined:
                    joined[place]["count"] += row["count"]
                else:
                    joined[place] = dict(row)
        return sorted(joined.values(), key=lambda row: -row["count"])

    def sentences(self, key: str) -> list[str]:
        """Return the sentences of a field of `Stats.to_dict`, each once."""
        return list(dict.fromkeys(text for line in self.processes for text in line[key]))

    def masks(self) -> list[dict[str, Any]]:
        """Return the boolean masks, each kind with the mean shares of queries and keys that count."""
        joined: dict[str, collections.Counter[str]] = {}
        for row in (row for report in self.reports for row in report["masks"]):
            counter = joined.setdefault(row["seen"], collections.Counter())
            counter.update(
                count=row["count"], queries=row["queries"] * row["count"], keys=row["keys"] * row["count"]
            )
        return [
            {
                "seen": structure, "count": n["count"], "queries": n["queries"] / n["count"],
                "keys": n["keys"] / n["count"],
            }
            for structure, n in joined.items() if n["count"]
        ]  # fmt: skip


# What rows of all processes are joined by.
_ALIKE = {
    "fallbacks": ("backend", "reason"), "failures": ("backend", "direction", "error"),
    "bypassed": ("op", "kernel", "reason"), "masks": ("seen",),
}  # fmt: skip

# The form of a line: see `check_form`.
_ROW = {"backend": str, "count": int}
_BOTH = {"forward": int, "backward": int}
_OF_LINE: dict[Any, Any] = {
    "program": str, "pid": int, "calls": {str: _BOTH}, "overridden": [str], "slow_paths": [str],
    "fallbacks": [_ROW | {"reason": str}],
    "failures": [_ROW | {"direction": str, "error": str, "message": str}],
    "bypassed": [
        {"kernel": str, "reason": str, "count": int, "op": str, "shapes": [[(int, str)]], "site": str}
    ],
    "masks": [{"seen": str, "count": int}],
}  # fmt: skip
_NUMBER = (int, float)
_TIMES = dict.fromkeys(("decided_us", "first_us", "timed", "timed_us", "shortest_us", "longest_us"), _NUMBER)
_OF_REPORT: dict[Any, Any] = {
    "seconds": _NUMBER, "python": str, "platform": str, "environments": [{"backends": {str: str}}],
    "plans": [
        {"direction": str, "backend": str, "source": str, "device": OF_DEVICE, "spec": dict, "calls": int}
        | _TIMES
    ],
    "masks": [{"seen": str, "count": int, "queries": _NUMBER, "keys": _NUMBER}],
}  # fmt: skip


def read(files: Iterable[Path]) -> RunReport:
    """Read the lines of a run; raises `ConfigError` for a file that can't be read or has others."""
    processes = [line for file in files for line in _lines(file)]
    return RunReport(processes, rows_of(processes))


def rows_of(processes: Iterable[Mapping[str, Any]]) -> list[CallRow]:
    """Return the calls of some lines, those alike in one row, the longest total first."""
    rows: dict[tuple[object, ...], CallRow] = {}
    for line in processes:
        for plan in line.get("report", {}).get("plans", ()):
            spec = spec_from(plan["spec"], device_from(plan["device"]))
            kind = spec.but(**dict.fromkeys(LENGTHS, 1))
            names = plan["direction"], plan["backend"], plan["source"]
            rows.setdefault((kind, steps_of(Lengths.of(spec)), *names), CallRow(spec, *names)).add(plan)
    return sorted(rows.values(), key=lambda row: -(row.total_us or 0.0))


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    with file_errors(file, "read"):
        lines = file.read_text(encoding="utf-8").splitlines()
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
            _check(line)
        except (ValueError, TypeError, AttributeError, RecursionError, InvalidInputError) as error:
            if isinstance(error, json.JSONDecodeError) and text.startswith(BEGIN_OF_LINE):
                log.warning(
                    "%s:%d: left out: the line of a process is cut off, as on a full disk", file, number
                )
                continue
            raise ConfigError(
                f"{file}:{number}: got {short_repr(text)} ({error}), expected a line of `attnreg run "
                "--report`, ATTNREG_REPORT or ATTNREG_STATS"
            ) from error
        yield line


def _check(line: Any) -> None:
    """Raise an error where a line isn't one of a process; it says which value is wrong."""
    check_form("the line", line, _OF_LINE)
    if "report" in line:
        check_form("report", line["report"], _OF_REPORT)
        rows_of([line])


def grouped(rows: Sequence[CallRow], key: Callable[[CallRow], str]) -> dict[str, tuple[int, float]]:
    """Return the calls and the known time of rows, by a key of theirs, most time first."""
    sums: dict[str, tuple[int, float]] = {}
    for row in rows:
        calls, total = sums.get(key(row), (0, 0.0))
        sums[key(row)] = calls + row.calls, total + (row.total_us or 0.0)
    return dict(sorted(sums.items(), key=lambda item: -item[1][1]))
