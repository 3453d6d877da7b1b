"""What this machine is, in the words of a table's environment: asks torch and the backends."""

from __future__ import annotations

import functools
import platform
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from attnreg.tuning.table import Environment

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attnreg.contract.discovery import Entry
    from attnreg.contract.spec import Device

__all__ = ["environment", "file_name"]


def environment(device: Device, entries: Mapping[str, Entry]) -> Environment:
    """Return what is true of a measurement on that device, now."""
    return _environment(device, tuple(entries.values()), torch.get_num_threads())


# States come and go with every registration; asking for the versions of packages reads files.
@functools.lru_cache(maxsize=16)
def _environment(device: Device, entries: tuple[Entry, ...], threads: int) -> Environment:
    version: str = sys.modules["attnreg"].__version__
    backends = {
        entry.name: entry.version()
        for entry in entries
        if entry.backend is not None and device.type in entry.backend.devices and not entry.unavailable()
    }
    if device.type != "cuda":
        return Environment(
            device=_processor(), torch=torch.__version__, attnreg=version,
            threads=str(threads), backends=backends,
        )  # fmt: skip
    major, minor = device.capability or (0, 0)
    return Environment(
        device=device.name,
        compute_capability=f"{major}.{minor}",
        torch=torch.__version__,
        cuda=str(torch.version.cuda or ""),
        cudnn=str(torch.backends.cudnn.version() or ""),  # type: ignore[no-untyped-call]
        driver=_driver(),
        attnreg=version,
        backends=backends,
    )


def file_name(device: str) -> str:
    """Return what the table of a device is called: `nvidia-h200.json`."""
    return re.sub(r"[^a-z0-9]+", "-", device.casefold()).strip("-") + ".json"


def _driver() -> str:
    return _first_match("/proc/driver/nvidia/version", r"\d{3}\.\d+(?:\.\d+)?")


def _processor() -> str:
    named = _first_match("/proc/cpuinfo", r"(?<=model name\t: ).+")
    return f"{named or platform.processor() or platform.machine()}"


def _first_match(file: str, pattern: str) -> str:
    try:
        found = re.search(pattern, Path(file).read_text(encoding="utf-8"))
    except OSError:
        return ""
    return found.group() if found else ""
