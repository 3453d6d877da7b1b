"""Which backends can run here and in which order: for info, and for the commands that run backends."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from attnreg.errors import BackendUnavailableError

if TYPE_CHECKING:
    import torch

    from attnreg.contract.discovery import Entry
    from attnreg.contract.spec import Device
    from attnreg.selection.decision import Policy

# On a GPU it takes longer than all others together, and is preferred to none of them.
REFERENCE = "math"


def candidates(named: tuple[str, ...], device: torch.device, files: bool = True) -> list[tuple[Entry, str]]:
    """Return the backends that are named by `--backend`, else all, each with why it can't run, or "".

    Without `files` the table and the lockfile that settings name needn't be readable: the command may be
    about to write them.
    """
    from attnreg import _registry
    from attnreg.selection import policy

    found = dict.fromkeys(_registry.find(name) for name in named) or _registry.entries().values()
    disabled = policy.current().disabled if files else policy.disabled_backends()
    return [(entry, _reason(entry, device, disabled.get(entry.name.casefold(), ""))) for entry in found]


def measurable(named: tuple[str, ...], device: torch.device, files: bool = True) -> list[Entry]:
    """Return the backends to compare: those named, which have to run on the device, else all that do.

    The reference is left out on a GPU, unless it is named or the only one.
    """
    found = candidates(named, device, files)
    for entry, reason in found:
        if named and reason:
            raise BackendUnavailableError(f"--backend: {entry.name} {reason}")
    entries = [entry for entry, reason in found if not reason]
    if not named and device.type == "cuda" and len(entries) > 1:
        entries = [entry for entry in entries if entry.name != REFERENCE]
    if not entries:
        raise BackendUnavailableError(f"no backend can be measured on {device}")
    return entries


def _reason(entry: Entry, device: torch.device, disabled_by: str) -> str:
    if disabled_by:
        return f"is disabled by {disabled_by}"
    if entry.backend is not None and device.type not in entry.backend.devices:
        return f"runs on {', '.join(entry.backend.devices)} only"
    try:
        entry.kernels()
    except BackendUnavailableError:
        return entry.unavailable()
    return ""


def state(entry: Entry, in_force: Policy) -> tuple[str, str]:
    """Return a backend's state and the reason for it; loads the backend, as looking is not enough."""
    from attnreg.contract.backend import UNTRIED

    if by := in_force.disabled.get(entry.name.casefold()):
        return "disabled", f"by {by}"
    experimental = entry.backend is not None and entry.backend.experimental
    try:
        entry.kernels()
    except BackendUnavailableError:
        state = "can't load" if entry.cause is None else "broken"
        reason = entry.unavailable().removeprefix("can't load here: ").removeprefix("failed to load: ")
        return state, f"{reason}; experimental: it {UNTRIED}" if experimental else reason
    return ("experimental", UNTRIED) if experimental else ("ready", "")


def order(device: Device, in_force: Policy) -> dict[str, Any]:
    """Return a device's backends in order of preference, each with its source, and what prevents calls."""
    from attnreg import _registry
    from attnreg.contract.spec import AttentionSpec
    from attnreg.dispatch import planning
    from attnreg.selection.decision import select

    entries = _registry.entries()
    # Selection takes a call; the order is the same for any.
    spec = AttentionSpec(
        device=device, dtype="float32", batch=1, max_q=1, max_k=1,
        heads_q=1, heads_k=1, head_dim=8, head_dim_v=8,
    )  # fmt: skip
    problem = _lock_problem(in_force, device)
    in_force = replace(in_force, lock=None)  # a lock has no row for this made-up call
    try:
        planning.decide(spec, "forward", entries, in_force)
    except BackendUnavailableError as error:
        problem = f"{error}; attention calls on this device are refused"
    sources = {
        name.casefold(): preference.source
        for preference in reversed(in_force.preferences)
        if preference.applies_to(device)
        for name in preference.names
    }
    found = []
    for name in select(spec, "forward", entries, in_force).order:
        entry = entries[name.casefold()]
        served = entry.backend is not None and device.type in entry.backend.devices
        if served and name.casefold() not in in_force.disabled and not entry.unavailable():
            source = sources.get(name.casefold(), f"default order for {device.keys[0]}")
            found.append({"backend": name, "source": source})
    return {"order": found, "problem": problem}


def _lock_problem(in_force: Policy, device: Device) -> str:
    """Return why the lock in force refuses the calls of a device; empty if it doesn't."""
    if in_force.lock is None or in_force.lock.file.device != device.type:
        return ""
    backends = dict.fromkeys(row.backend for row in in_force.lock.file.rows)
    differs = dict.fromkeys(filter(None, (in_force.lock.differences(device, name) for name in backends)))
    return f"ATTNREG_LOCK: {'; '.join(differs)}: calls on this device are refused" if differs else ""
