"""What a measurement depends on: this machine's `Environment`, and whether a table's environment matches it.

A difference that can matter refuses the whole table. Half a table would compare times that were
taken on two machines.
"""

from __future__ import annotations

import functools
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from attnreg.contract.discovery import Entry
from attnreg.contract.spec import Device
from attnreg.tuning.table import Environment


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
