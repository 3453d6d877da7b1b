"""Choosing a backend: a spec, the backends and a policy give a decision. Pure: no tensor, no torch.

A policy is what was asked for, strongest first. Asking puts a backend first; what it can't run goes
to the next that can, and every reason is kept in the decision.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from attnreg.tuning.ranking import with_sources

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attnreg.contract.discovery import Entry
    from attnreg.contract.spec import AttentionSpec, Device, Direction
    from attnreg.selection.lockfile import Lock
    from attnreg.tuning.lookup import Prediction
    from attnreg.tuning.tables import Tables

__all__ = ["Decision", "Policy", "Preference", "select", "tied_to"]


@dataclass(frozen=True, slots=True)
class Preference:
    """Backends that somebody asked for.

    Attributes:
        source: who asked, in words: `"ATTNREG_BACKEND"`, `"register_backend('FA4')"`.
        names: the backends, the most wanted first.
        devices: the settings keys it holds for ("cpu", "cuda", "sm_90"); None for every device.
        exclusive: whether nothing else may run (`backend=` on a call).
        required: whether it is an error if one of them can't load here.
    """

    source: str
    names: tuple[str, ...]
    devices: tuple[str, ...] | None = None
    exclusive: bool = False
    required: bool = True

    def applies_to(self, device: Device) -> bool:
        """Whether it speaks about that device."""
        return self.devices is None or any(key in self.devices for key in device.keys)

    governs = applies_to  # until its callers in other rooms use the new name


def tied_to(backend: str) -> Preference:
    """Return what a forward with dropout asks for its backward: the one that knows its mask."""
    return Preference("the forward's dropout mask", (backend,), exclusive=True)


@dataclass(frozen=True, slots=True)
class Policy:
    """Everything that was asked for in a process.

    Attributes:
        preferences: the strongest first.
        disabled: name in lower case to the source that disabled it.
        strict: the source that made an unserved preference an error; empty if none did.
        tables: what was measured, where the policy goes by that; how they are looked up is no part of
            what was asked for.
        watching: whether all that was asked for is to record calls: torch's own choices stand.
        lock: what was decided before, and has to come out again.
        by_measurement: whether somebody asked for tables, so that they count where torch has chosen, too.
    """

    preferences: tuple[Preference, ...] = ()
    disabled: Mapping[str, str] = field(default_factory=dict)
    strict: str = ""
    tables: Tables | None = field(default=None, compare=False, repr=False)
    watching: bool = False
    lock: Lock | None = field(default=None, compare=False, repr=False)
    by_measurement: bool = field(default=False, compare=False, repr=False)

    def led_by(self, preference: Preference | None) -> Policy:
        """Return this policy with one more preference, stronger than all of its own."""
        if preference is None:
            return self
        return replace(self, preferences=(preference, *self.preferences))


@dataclass(frozen=True, slots=True)
class Decision:
    """Which backend runs one direction of a call, who decided, and what spoke against the others.

    Attributes:
        direction: `"forward"` or `"backward"`.
        backend: its name; None if none can run the call, or none may (see `refusal`).
        source: who asked for it, or "measured table ...", or "default order for ...".
        rejected: every backend that can't run the call, with all its reasons.
        passed_over: the rejected ones that would have come before `backend`; of those that nobody
            asked for only such as serve this kind of device.
        order: all backends in the order in which they were considered.
        asked_for: the backends that somebody asked for on this device.
        refusal: why there is none although one could run the call; else empty.
        predicted: what a measured table says of the call; None if none does.
    """

    direction: Direction
    backend: str | None
    source: str
    rejected: dict[str, tuple[str, ...]]
    passed_over: tuple[str, ...] = ()
    order: tuple[str, ...] = ()
    asked_for: tuple[str, ...] = ()
    refusal: str = ""
    predicted: Prediction | None = None


def select(
    spec: AttentionSpec,
    direction: Direction,
    entries: Mapping[str, Entry],
    policy: Policy,
    native: str = "",
    prediction: Prediction | None = None,
) -> Decision:
    """Choose the backend for one direction of a call.

    Args:
        spec: what the call asks.
        direction: which of its two directions.
        entries: the known backends by name in lower case.
        policy: what was asked for.
        native: the backend whose kernel torch itself was about to run; leads the default order.
        prediction: what a measured table says; it may change the default order.
    """
    wanted = [preference for preference in policy.preferences if preference.applies_to(spec.device)]
    only = next((preference for preference in wanted if preference.exclusive), None)
    found = {name: _reasons(entry, spec, direction, policy, only) for name, entry in entries.items()}
    able = {name for name, reasons in found.items() if not reasons}
    priority = {name: entry.backend.priority if entry.backend else 0 for name, entry in entries.items()}
    order = sorted(entries, key=lambda name: (name != native.casefold(), -priority[name], name))
    ranks = with_sources(order, able, prediction, f"default order for {spec.device.keys[0]}")
    ranked = _ranked(entries, wanted, ranks)
    against = {name: found[name] for name in ranked}
    may = (name for name in ranked if name in able and (only is None or ranked[name] == only.source))
    chosen = next(may, None)
    refusal = _refusal(wanted, only, policy.strict, ranked[chosen] if chosen else "")
    asked = {name.casefold() for preference in wanted for name in preference.names}
    before = list(ranked)[: list(ranked).index(chosen)] if chosen else list(ranked)
    missed = (name for name in before if against[name] and (name in asked or _serves(entries[name], spec)))
    return Decision(
        direction=direction,
        backend=entries[chosen].name if chosen and not refusal else None,
        source=ranked[chosen] if chosen else "",
        rejected={entries[name].name: reasons for name, reasons in against.items() if reasons},
        passed_over=tuple(entries[name].name for name in missed),
        order=tuple(entries[name].name for name in ranked),
        asked_for=tuple(entries[name].name for name in ranked if name in asked),
        refusal=refusal,
        predicted=prediction,
    )


def _serves(entry: Entry, spec: AttentionSpec) -> bool:
    return entry.backend is None or spec.device.type in entry.backend.devices


def _ranked(
    entries: Mapping[str, Entry], wanted: list[Preference], default: Mapping[str, str]
) -> dict[str, str]:
    """Return every backend, the first choice first, with the source of its rank."""
    ranked: dict[str, str] = {}
    for preference in wanted:
        for name in preference.names:
            # A backend may have been taken out of the registry while a scope still names it.
            if name.casefold() in entries:
                ranked.setdefault(name.casefold(), preference.source)
    for name, source in default.items():
        ranked.setdefault(name, source)
    return ranked


def _reasons(
    entry: Entry, spec: AttentionSpec, direction: Direction, policy: Policy, only: Preference | None
) -> tuple[str, ...]:
    reasons = entry.reasons(spec, direction)
    # Both directions have to be one backend's where a dropout mask ties them, or the caller did.
    tied = spec.dropout > 0.0 or (only is not None and entry.name.casefold() in map(str.casefold, only.names))
    if direction == "forward" and spec.needs_backward and tied:
        backward = entry.reasons(spec, "backward")
        reasons += tuple(f"backward: {reason}" for reason in backward if reason not in reasons)
    if by := policy.disabled.get(entry.name.casefold()):
        reasons = (f"disabled by {by}", *reasons)
    return reasons


def _refusal(wanted: list[Preference], only: Preference | None, strict: str, source: str) -> str:
    if only is not None:
        return "" if source else f"{only.source} is obeyed or refused"
    if strict and wanted and source != wanted[0].source:
        return f"{wanted[0].source} can't serve this call, and {strict} makes that an error"
    return ""
