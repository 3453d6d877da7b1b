"""The tables of a process: those that settings name, those that ship with attnreg, and which is in force.

A table is in force where this machine's `Environment` matches the one that it was measured in. A difference
that can matter refuses the whole table: half a table would compare times that were taken on two machines.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import platform
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from attnreg.contract.discovery import Entry
from attnreg.contract.spec import AttentionSpec, Device, Direction
from attnreg.errors import ConfigError
from attnreg.tuning.index import Kinds
from attnreg.tuning.lookup import Prediction, predict
from attnreg.tuning.table import Environment, Table, load

log = logging.getLogger("attnreg")

# Tables are compared again after every registration; each warning is logged once.
_logged: set[str] = set()

SHIPPED = Path(__file__).parent / "shipped"


@dataclass(frozen=True)
class Named:
    """A table, and the setting that names it: `"attnreg.toml:3"`; empty for one that ships with attnreg."""

    table: Table
    source: str = ""

    @property
    def of_gpu(self) -> bool:
        """Whether it was measured on a GPU, else on a CPU."""
        return bool(self.table.environment.compute_capability)

    @functools.cached_property
    def kinds(self) -> Kinds:
        """Its points, indexed for predictions."""
        return Kinds(self.table.points, self.table.fronts)

    @functools.cached_property
    def digest(self) -> str:
        """A hash of its contents, twelve digits."""
        data = json.dumps(self.table.to_dict(), sort_keys=True)
        return hashlib.sha256(data.encode()).hexdigest()[:12]

    def __str__(self) -> str:
        return f"measured table {self.table.name}" + (f" ({self.source})" if self.source else "")


@dataclass(frozen=True, slots=True)
class Report:
    """The table in force on a device, sentences about it, and one with the reasons for each refused table."""

    in_force: Named | None = None
    notes: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


class Tables:
    """The tables that settings name, compared with a device when it is first asked about.

    `named` are the strongest first; the versions of `entries` have to be the measured ones; `compiled` says
    whether the compiled call cache is in use.
    """

    def __init__(
        self, named: tuple[Named, ...], entries: Callable[[], Mapping[str, Entry]], compiled: bool = False
    ) -> None:
        self.compiled = compiled
        self._named = named
        self._entries = entries
        self._reports: dict[Device, Report] = {}

    def predict(self, spec: AttentionSpec, direction: Direction) -> Prediction | None:
        """Return what the table in force predicts for one direction of a call; None if nothing."""
        table = self.report(spec.device).in_force
        if table is None:
            return None
        return predict(table.kinds, spec, direction, str(table), self.compiled)

    def report(self, device: Device) -> Report:
        """Return which table is in force on a device, and why others aren't."""
        if device not in self._reports:
            self._reports[device] = self._compared(device)
        return self._reports[device]

    def notes(self, device: Device) -> tuple[str, ...]:
        """Return why tables aren't in force on a device, and notes about the one that is."""
        report = self.report(device)
        return (*report.refused, *report.notes)

    def _compared(self, device: Device) -> Report:
        found, refused, warned = Report(), [], []
        for named in self._meant_for(device):
            measured = named.table.environment
            if device.simulated:
                match = matched_simulated(measured, device)
            else:
                match = matched(measured, environment(device, self._entries()))
            if not match.refused:
                found = Report(named, tuple(f"{named}: {note}" for note in match.notes))
                break
            refused.append(f"{named} is refused: {'; '.join(match.refused)}")
            if named.source:
                warned.append(refused[-1])
        if found.in_force is None:
            # Naming a table for another type of device is no error.
            found = Report(
                notes=tuple(
                    f"{named} was measured on a {'GPU' if named.of_gpu else 'CPU'}: it doesn't apply to "
                    f"{device.type}"
                    for named in self._named
                    if named.of_gpu != (device.type == "cuda")
                )
            )
        for one in warned:
            if one not in _logged:
                _logged.add(one)
                decides = found.in_force or "the default order"
                log.warning("%s; %s decides until `attnreg tune` has run here", one, decides)
        return replace(found, refused=tuple(refused))

    def _meant_for(self, device: Device) -> Iterator[Named]:
        """Yield the tables for a device; those that ship are read only where none that is named fits."""
        if device.type in ("cpu", "cuda"):
            yield from (named for named in self._named if named.of_gpu == (device.type == "cuda"))
        if device.type == "cuda":
            yield from _shipped(replace(device, index=None))


@functools.cache
def _shipped(device: Device) -> tuple[Named, ...]:
    """Return the tables that ship with attnreg for a GPU of that name, if simulated of that capability."""
    files = sorted(SHIPPED.glob("*.json")) if device.simulated else [SHIPPED / file_name(device.name)]
    found = (_read(file) for file in files)
    return tuple(
        one
        for one in found
        if one and not (device.simulated and matched_simulated(one.table.environment, device).refused)
    )


def _read(file: Path) -> Named | None:
    try:
        return Named(load(file)) if file.is_file() else None
    except (ConfigError, OSError) as error:  # no setting names it, so it can't be an error of a call
        log.warning("%s", error)
        return None


def environment(device: Device, entries: Mapping[str, Entry]) -> Environment:
    """Return the environment of a measurement on that device, now."""
    import torch  # most programs that look into a lockfile or a table have it already

    return _environment(device, tuple(entries.values()), torch.get_num_threads())


# States come and go with every registration, and reading the versions of packages reads files.
@functools.lru_cache(maxsize=16)
def _environment(device: Device, entries: tuple[Entry, ...], threads: int) -> Environment:
    import torch

    version: str = sys.modules["attnreg"].__version__
    backends = {
        entry.name: entry.version()
        for entry in entries
        if entry.backend is not None and device.type in entry.backend.devices and not entry.unavailable()
    }
    common: dict[str, Any] = {"torch": torch.__version__, "attnreg": version, "backends": backends}
    if device.type != "cuda":
        name = _first_match("/proc/cpuinfo", r"(?<=model name\t: ).+")
        name = name or platform.processor() or platform.machine()
        return Environment(device=name, threads=str(threads), **common)
    return Environment(
        device=device.name,
        compute_capability=".".join(map(str, device.capability or (0, 0))),
        cuda=str(torch.version.cuda or ""),
        cudnn=str(torch.backends.cudnn.version() or ""),  # type: ignore[no-untyped-call]
        driver=_first_match("/proc/driver/nvidia/version", r"\d{3}\.\d+(?:\.\d+)?"),
        **common,
    )


def file_name(device: str) -> str:
    """Return the file name of a device's table: `nvidia-h200.json`."""
    return re.sub(r"[^a-z0-9]+", "-", device.casefold()).strip("-") + ".json"


def _first_match(file: str, pattern: str) -> str:
    try:
        found = re.search(pattern, Path(file).read_text(encoding="utf-8"))
    except OSError:
        return ""
    return found.group() if found else ""


# For each field that is compared its name in a sentence, how many leading numbers of a version have to be
# equal (0: the whole text), and whether a difference in those refuses the table; if not, it is only noted.
RULES = {
    "device": ("device", 0, True),
    "compute_capability": ("compute capability", 0, True),
    "torch": ("torch", 2, True),
    "cuda": ("CUDA", 2, True),
    "cudnn": ("cuDNN", 0, True),
    "threads": ("threads", 0, True),
    "attnreg": ("attnreg", 2, True),
    "driver": ("driver", 0, False),
}


class Match(NamedTuple):
    """Why a table is refused here (empty if it isn't), and differences that don't refuse it."""

    refused: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def matched(measured: Environment, here: Environment, done: str = "measured", whole: bool = False) -> Match:
    """Compare the environment of a table or a lockfile with this one.

    Args:
        measured: the environment of the file.
        here: the environment that it is to be used in.
        done: how the file was made: "measured" or "locked".
        whole: whether versions have to be equal to the last number.
    """
    refused: list[str] = []
    notes: list[str] = []
    for field, (title, exact, matters) in RULES.items():
        there, now = getattr(measured, field), getattr(here, field)
        if there == now:
            continue
        sentence = f"{done} with {title} {there or 'none'}, here it is {now or 'none'}"
        same = not whole and exact and _leading(there, exact) == _leading(now, exact)
        (refused if matters and not same else notes).append(sentence)
    for name, there in measured.backends.items():
        now = here.backends.get(name)
        if now is None:
            notes.append(f"{name} was {done} and doesn't load here")
        elif _own_version(there, measured.torch) != _own_version(now, here.torch):
            refused.append(f"{done} with {name} {there or 'of no version'}, here it is {now or 'none'}")
    unknown = (name for name in here.backends if name not in measured.backends and name != "math")
    notes += [f"{name} wasn't measured: it keeps its place" for name in unknown]
    return Match(tuple(refused), tuple(notes))


def matched_simulated(measured: Environment, device: Device, done: str = "measured") -> Match:
    """Compare with a simulated device, of which only the compute capability is known."""
    here = ".".join(map(str, device.capability or ()))
    if measured.compute_capability != here:
        there = measured.compute_capability or "none"
        return Match((f"{done} with compute capability {there}, here it is {here or 'none'}",))
    return Match(notes=(f"takes for granted that the device is {measured.device}, with the same versions",))


def _leading(version: str, count: int) -> list[str]:
    return re.findall(r"\d+", version)[:count]


def _own_version(version: str, torch: str) -> str:
    """Return a backend's version without torch's, which has a rule of its own."""
    return version.removeprefix(torch) if torch else version
