"""What this machine has and what is in force, as plain data: `info` prints it, as text or as JSON.

Everything that may be broken here is what somebody runs `info` for, so nothing in it raises.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from attnreg import _registry, aten
from attnreg.cli import torch_facts
from attnreg.contract.backend import UNTRIED
from attnreg.contract.spec import AttentionSpec
from attnreg.dispatch import planning
from attnreg.errors import AttnregError, BackendUnavailableError
from attnreg.selection import policy
from attnreg.selection.decision import Policy, select
from attnreg.settings import environment
from attnreg.torchlib import building

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attnreg.contract.discovery import Entry
    from attnreg.contract.spec import Device
    from attnreg.torchlib.libraries import Library

__all__ = ["inventory"]


def inventory() -> dict[str, Any]:
    """Return devices, backends, settings, routers, and what torch itself would do."""
    asked, problem = _policy()
    backends = [_backend(entry, asked) for entry in _registry.entries().values()]
    return {
        "versions": torch_facts.versions(),
        "devices": [
            facts | _order(planning.device_of(device), asked) for device, facts in torch_facts.devices()
        ],
        "backends": backends,
        "settings": {
            "variables": list(_variables()),
            "in_force": list(_in_force(asked)),
            "problem": problem,
        },
        "tables": [_tables(planning.device_of(device), asked) for device, _ in torch_facts.devices()],
        "routers": {
            "installed": aten.installed(),
            "compiled": _compiled(),
            "serving": policy.is_active(),
            "shadowed_by": aten.shadowed_by(),
            "untouched_programs": torch_facts.untouched_programs(),
        },
        "compiled": [_library(library) for library in building.LIBRARIES],
        "torch": torch_facts.own_choice(),
    }


def _compiled() -> dict[str, str | None]:
    """Return the file of compiled routers, and why programs that start here don't use it."""
    file, problem = building.built(), None
    try:
        building.loaded()
    except AttnregError as error:
        problem = str(error)
    if os.environ.get("ATTNREG_ROUTERS", "").strip().casefold() == "python":
        problem = "ATTNREG_ROUTERS=python leaves them out"
    return {"file": str(file) if file else None, "problem": problem}


def _library(library: Library) -> dict[str, str | None]:
    """Return whether a library in C++ is compiled for the torch and the Python that run this."""
    found = building.status(library)
    return {
        "library": library.title.removeprefix("the "),
        "state": found.state,
        "file": str(found.file) if found.file else None,
        "reason": found.reason,
    }


def _policy() -> tuple[Policy, str]:
    """Return what was asked for, or nothing and why it can't be read."""
    try:
        return policy.current(), ""
    except AttnregError as error:
        return Policy(), str(error)


def _backend(entry: Entry, asked: Policy) -> dict[str, Any]:
    state, reason = _state(entry, asked)
    return {
        "name": entry.name,
        "version": entry.version(),
        "state": state,
        "reason": reason,
        "origin": entry.origin,
        "devices": list(entry.backend.devices) if entry.backend is not None else [],
    }


def _state(entry: Entry, asked: Policy) -> tuple[str, str]:
    """Return how a backend is, after really loading it: a probe alone may be too hopeful."""
    if by := asked.disabled.get(entry.name.casefold()):
        return "disabled", f"by {by}"
    experimental = entry.backend is not None and entry.backend.experimental
    try:
        entry.kernels()
    except BackendUnavailableError:
        state = "can't load" if entry.cause is None else "broken"
        reason = entry.unavailable().removeprefix("can't load here: ").removeprefix("failed to load: ")
        return state, f"{reason}; experimental: it {UNTRIED}" if experimental else reason
    if experimental:
        return "experimental", UNTRIED
    return "ready", ""


def _order(device: Device, asked: Policy) -> dict[str, Any]:
    """Return who can serve a device, the most preferred first with the source, and what is in the way."""
    entries = _registry.entries()
    # Selection wants a call; the order doesn't depend on what it asks.
    spec = AttentionSpec(
        device=device, dtype="float32", batch=1, max_q=1, max_k=1,
        heads_q=1, heads_k=1, head_dim=8, head_dim_v=8,
    )  # fmt: skip
    problem = _lock_trouble(asked, device)
    asked = replace(asked, lock=None)  # which speaks of calls only
    try:
        planning.decide(spec, "forward", entries, asked)
    except BackendUnavailableError as error:
        problem = f"{error}; attention on this device is refused"
    sources = {
        name.casefold(): preference.source
        for preference in reversed(asked.preferences)
        if preference.governs(device)
        for name in preference.names
    }
    default = f"default order for {device.keys[0]}"
    order = [
        {"backend": name, "source": sources.get(name.casefold(), default)}
        for name in select(spec, "forward", entries, asked).order
        if name.casefold() not in asked.disabled and _serves(entries[name.casefold()], device)
    ]
    return {"order": order, "problem": problem}


def _lock_trouble(asked: Policy, device: Device) -> str:
    """Return what makes the lock in force refuse calls on a device that it is of."""
    if asked.lock is None or asked.lock.file.device != device.type:
        return ""
    backends = dict.fromkeys(row.backend for row in asked.lock.file.rows)
    differs = dict.fromkeys(filter(None, (asked.lock.differences(device, name) for name in backends)))
    return f"ATTNREG_LOCK: {'; '.join(differs)}: such calls are refused" if differs else ""


def _tables(device: Device, asked: Policy) -> dict[str, Any]:
    """Return which measured table decides on a device, and why others don't."""
    place = device.type if device.index is None else f"{device.type}:{device.index}"
    if asked.tables is None:
        return {"device": place, "in_force": None, "points": 0, "notes": [], "refused": []}
    found = asked.tables.report(device)
    return {
        "device": place,
        "in_force": None if found.in_force is None else str(found.in_force),
        "points": 0 if found.in_force is None else len(found.in_force.table.points),
        "notes": list(found.notes),
        "refused": list(found.refused),
    }


def _serves(entry: Entry, device: Device) -> bool:
    return entry.backend is not None and device.type in entry.backend.devices and not entry.unavailable()


def _variables() -> Iterator[dict[str, str | None]]:
    """Yield every variable of attnreg's, and those that are set though attnreg knows none of the name."""
    unknown = [name for name in os.environ if name.upper().startswith(environment.PREFIX)]
    for name in dict.fromkeys([*environment.VARIABLES, *sorted(unknown)]):
        known = environment.VARIABLES.get(name)
        purpose = known.description if known else "unknown to attnreg"
        yield {"name": name, "value": os.environ.get(name), "purpose": purpose}


def _in_force(asked: Policy) -> Iterator[dict[str, str]]:
    """Yield what was set, the strongest first."""
    for preference in asked.preferences:
        where = f" on {', '.join(preference.devices)}" if preference.devices else ""
        yield _setting(f"prefer{where}", ", ".join(preference.names), preference.source)
    for name, source in asked.disabled.items():
        yield _setting("disabled", _registry.find(name).name, source)
    if asked.strict:
        yield _setting("strict", "true", asked.strict)
    try:
        sources = policy.sources()
    except AttnregError:
        return
    if sources.lock is not None:
        yield _setting("lock", f"{sources.lock.path}, {len(sources.lock.rows)} rows", "ATTNREG_LOCK")
    for key in ("policy", "record"):
        if value := getattr(sources.environment, key):
            yield _setting(key, str(value), f"ATTNREG_{key.upper()}")
    for one in sources.loaded:
        for key in ("log_level", "policy", "tuned"):
            if (value := getattr(one.settings, key)) and key in one.settings.model_fields_set:
                yield _setting(key, str(value), one.describe((key,)))
        if one.source is not None:
            by = "ATTNREG_CONFIG" if one is sources.environment_file else "configure(...)"
            yield _setting("settings file", str(one.source), by)


def _setting(name: str, value: str, source: str) -> dict[str, str]:
    return {"setting": name, "value": value, "source": source}
