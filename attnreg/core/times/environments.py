"""Environments of measurements: the present environment, and its comparison with a table's or a lockfile's.

Times of other versions, or of another card of the same architecture, aren't this machine's times, but they
are better than none: such a table is a prior. `RULES` has the differences that make a table worthless.
"""

from __future__ import annotations

import functools
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from attnreg.core.contract.spec import Device
from attnreg.core.registry.entry import Entry
from attnreg.core.times.table import Environment


def environment(device: Device, entries: Mapping[str, Entry]) -> Environment:
    """Return the present environment of measurements on a device.

    Of a simulated device only the compute capability is known, and neither torch nor the backends there.
    """
    if device.simulated:
        version: str = sys.modules["attnreg"].__version__
        return Environment(
            device=device.arch,
            compute_capability=_dotted(device),
            attnreg=version,
            backends={
                entry.name: ""
                for entry in entries.values()
                if entry.backend is not None and device.type in entry.backend.devices
            },
        )
    import torch  # here, because most programs that read a lockfile or a table have imported it already

    opened = tuple(entry for entry in entries.values() if entry.backend is not None)
    return _environment(device, opened, torch.get_num_threads())


# Cached, because every registration makes a new state, and the versions of packages are read from files.
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
        compute_capability=_dotted(device),
        cuda=str(torch.version.cuda or ""),
        cudnn=str(torch.backends.cudnn.version() or ""),  # type: ignore[no-untyped-call]
        driver=_first_match("/proc/driver/nvidia/version", r"\d{3}\.\d+(?:\.\d+)?"),
        **common,
    )


def _dotted(device: Device) -> str:
    return ".".join(map(str, device.capability or (0, 0)))


def _first_match(file: str, pattern: str) -> str:
    try:
        match = re.search(pattern, Path(file).read_text(encoding="utf-8"))
    except OSError:
        return ""
    return match.group() if match else ""


class Rule(NamedTuple):
    """How one field of two environments is compared.

    Attributes:
        title: the field's name in sentences.
        same: how many leading numbers of a version have to be equal for a table to apply here. None: the
            whole text has to be.
        near: how many have to be equal for the table to be a prior. None: any difference makes it worthless.
        why: why a larger difference makes it worthless.
    """

    title: str
    same: int | None
    near: int | None
    why: str = ""


OTHER_KERNELS = "another major version has other kernels"

RULES = {
    "device": Rule("device", None, 0),
    "compute_capability": Rule("compute capability", None, None, "another architecture has other kernels"),
    "torch": Rule("torch", 2, 1, OTHER_KERNELS),
    "cuda": Rule("CUDA", 2, 0),
    "cudnn": Rule("cuDNN", None, 1, OTHER_KERNELS),
    "threads": Rule("threads", None, None, "the times are those of so many threads"),
    "attnreg": Rule("attnreg", 1, 1, "another major version calls kernels differently"),
}
BACKEND = Rule("", None, 1, OTHER_KERNELS)


class Match(NamedTuple):
    """How an environment differs from this one.

    Attributes:
        refused: differences that make a table worthless here, with the reason.
        near: differences that make a table a prior.
        notes: differences without effect.
    """

    refused: tuple[str, ...] = ()
    near: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def differences(self) -> tuple[str, ...]:
        """All differences with an effect."""
        return (*self.refused, *self.near)


def matched(measured: Environment, here: Environment, done: str = "measured", whole: bool = False) -> Match:
    """Compare the environment of a table or a lockfile with this one.

    Args:
        measured: the file's environment.
        here: the present environment.
        done: how the file was made: "measured" or "locked".
        whole: whether versions have to be equal to the last number, as for a lockfile.
    """
    refused: list[str] = []
    near: list[str] = []
    notes: list[str] = []

    def compare(rule: Rule, was: str, now: str, title: str, none: str = "none") -> None:
        if was == now:
            return
        if not measured.compute_capability:
            # Instructions and caches decide there, and whether a kernel is compiled.
            rule = rule._replace(near=None, why="a table of a CPU is no prior")
        sentence = f"{done} with {title} {was or none}, here it is {now or 'none'}"

        def is_alike(count: int) -> bool:
            return _leading(was, count) == _leading(now, count)

        if not whole and rule.same is not None and is_alike(rule.same):
            notes.append(sentence)
        elif rule.near is not None and not (was and now):
            refused.append(sentence if whole else f"{sentence}: one of them isn't known")
        elif rule.near is not None and is_alike(rule.near):
            near.append(sentence)
        else:
            refused.append(sentence if whole else f"{sentence}: {rule.why}")

    for field, rule in RULES.items():
        compare(rule, getattr(measured, field), getattr(here, field), rule.title)
    if measured.driver != here.driver:
        notes.append(f"{done} with driver {measured.driver or 'none'}, here it is {here.driver or 'none'}")
    for name, was in measured.backends.items():
        now = here.backends.get(name)
        if now is None:
            notes.append(f"{name} was {done} and doesn't load here")
        elif _own_version(was, measured.torch) != _own_version(now, here.torch):
            compare(BACKEND, was, now, name, "of no version")
    unknown = (name for name in here.backends if name not in measured.backends and name != "math")
    notes += [f"{name} wasn't measured: it keeps its place" for name in unknown]
    return Match(tuple(refused), tuple(near), tuple(notes))


def matched_simulated(measured: Environment, device: Device, done: str = "measured") -> Match:
    """Compare with a simulated device, which has only a compute capability."""
    here = ".".join(map(str, device.capability or ()))
    if measured.compute_capability != here:
        was = measured.compute_capability or "none"
        return Match((f"{done} with compute capability {was}, here it is {here or 'none'}",))
    return Match(notes=(f"assumes that the device is {measured.device}, with the same versions",))


def _leading(version: str, count: int) -> list[str]:
    if re.fullmatch(r"\d{5,}", version):  # cuDNN's 91900 is version 9.19.0
        version = version[:-4]
    return re.findall(r"\d+", version)[:count]


def _own_version(version: str, torch: str) -> str:
    """Return a backend's version without torch's version, which has a rule of its own."""
    return version.removeprefix(torch) if torch else version
