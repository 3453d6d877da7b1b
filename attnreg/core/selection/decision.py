"""Choosing a backend: a spec, the backends and a policy give a decision. Pure: no tensor, no torch.

A policy is a list of preferences, the strongest first. A preferred backend comes first in the order; a call
that it can't run goes to the next one that can, and the decision keeps every reason.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile

from attnreg.core.contract.capabilities import one_line
from attnreg.core.contract.spec import AttentionSpec, Device, Direction
from attnreg.core.registry.entry import SET_ASIDE, Entry
from attnreg.core.selection.predictions import Prediction, with_sources
from attnreg.core.selection.protocols import Adaptive, Lock, Tables, Times
from attnreg.errors import UnsupportedInputError

__all__ = [
    "BATCH_INVARIANT",
    "Decision",
    "Policy",
    "Preference",
    "Ranking",
    "default_source",
    "replayed",
    "select",
    "tied_to",
]

BATCH_INVARIANT = 'policy = "batch_invariant"'


@dataclass(frozen=True, slots=True)
class Preference:
    """Backends that a setting, a registration or a call prefers.

    Attributes:
        source: where the preference comes from: `"ATTNREG_BACKEND"`, `"register_backend('FA4')"`.
        names: the backends, the most preferred first.
        devices: the settings keys of the devices that it applies to ("cpu", "cuda", "sm_90"); None for all.
        exclusive: whether nothing else may run (`backend=` on a call).
        required: whether it is an error if one of them can't load here.
    """

    source: str
    names: tuple[str, ...]
    devices: tuple[str, ...] | None = None
    exclusive: bool = False
    required: bool = True

    def applies_to(self, device: Device) -> bool:
        """Whether it is a preference for that device."""
        return self.devices is None or any(key in self.devices for key in device.keys)


def tied_to(backend: str) -> Preference:
    """Return the preference of a backward with dropout: only its forward's backend can repeat the mask."""
    return Preference("the forward's dropout mask", (backend,), exclusive=True)


@dataclass(frozen=True, slots=True)
class Policy:
    """Everything that settings and the program ask for.

    Attributes:
        preferences: the strongest first. disabled: names in lower case of disabled backends, each with the
        source that disables it. strict: the source that makes it an error when a preferred backend can't run
        a call; empty if none does. tables: the measured tables; None if only the default order counts.
        only_recording: whether nothing but the recording of calls is asked for, so that torch's choices
        stand. lock: the lockfile that decisions have to agree with. by_measurement: whether a setting asks
        for tables, so that they may change torch's own choice, too. adaptive: the policy of that name; None
        if another one decides. batch_invariant: whether the policy of that name is in force.
    """

    preferences: tuple[Preference, ...] = ()
    disabled: Mapping[str, str] = field(default_factory=dict)
    strict: str = ""
    tables: Tables | None = field(default=None, compare=False, repr=False)
    only_recording: bool = False
    lock: Lock | None = field(default=None, compare=False, repr=False)
    by_measurement: bool = field(default=False, compare=False, repr=False)
    adaptive: Adaptive | None = field(default=None, compare=False, repr=False)
    batch_invariant: bool = False

    def asks_for(self, name: str, device: Device) -> bool:
        """Whether a preference for a device names a backend, and nothing disables it."""
        key = name.casefold()
        return key not in self.disabled and any(
            key in map(str.casefold, preference.names)
            for preference in self.preferences
            if preference.applies_to(device)
        )

    def times(self, native: str = "") -> Times | None:
        """Return the measured times that decide where nothing asks for a backend; None if none do.

        `native` is the backend whose kernel torch itself has selected.
        """
        leaves_native = native and (self.only_recording or not self.by_measurement)
        return None if leaves_native or self.lock is not None else self.adaptive or self.tables

    def applied_to(self, spec: AttentionSpec) -> AttentionSpec:
        """Return a spec that wasn't made from a call of the program, as calls are decided here."""
        same = spec.batch_invariant == self.batch_invariant
        return spec if same else replace(spec, batch_invariant=self.batch_invariant)

    def with_first(self, preference: Preference | None) -> Policy:
        """Return this policy with one more preference, the strongest."""
        if preference is None:
            return self
        # Who names a backend gets what it runs without a recording, too: cpu corrects torch's own kernel.
        only_recording = self.only_recording and not preference.names
        return replace(self, preferences=(preference, *self.preferences), only_recording=only_recording)


@dataclass(frozen=True, slots=True)
class Decision:
    """Which backend runs a direction of a call, what decided that, and the reasons against other backends.

    Attributes:
        direction: `"forward"` or `"backward"`.
        backend: its name; None if none can run the call, or none may (see `refusal`).
        source: the source of the preference, or "measured table ...", or "default order for ...".
        rejected: the backends that can't run the call, with all their reasons. A complete decision has every
            such backend, otherwise only the backends that were considered before `backend` are here.
        passed_over: the rejected backends before `backend` in the order. All preferred backends are among
            them; other backends only if they serve this type of device.
        order: all backends in the order in which they were considered. A backend that runs on request only
            is among them where it is asked for.
        asked_for: the preferred backends for this device.
        refusal: why no backend may run the call although a backend could. Empty otherwise.
        predicted: a measured table's prediction for the call; None if there is none.
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

    @property
    def considered(self) -> tuple[str, ...]:
        """The backends up to the one that runs the call, in order; all if none can."""
        return self.order if self.backend is None else self.order[: self.order.index(self.backend) + 1]


def select(
    spec: AttentionSpec,
    direction: Direction,
    entries: Mapping[str, Entry],
    policy: Policy,
    native: str = "",
    prediction: Prediction | None = None,
    complete: bool = True,
) -> Decision:
    """Choose the backend for one direction of a call.

    Args:
        spec, direction: what to decide about.
        entries: the known backends by name in lower case.
        policy: preferences, disabled backends and strictness.
        native: the backend whose kernel torch itself has selected; first in the default order.
        prediction: a measured table's prediction, which may change the default order.
        complete: whether to ask every backend for its reasons, or to stop at the first that can run the call.

    By `policy = "batch_invariant"` no other backend runs a call than runs such calls of any batch: it would
    give a sequence other bits.
    """
    here = Ranking(spec, direction, entries, policy, native).decision(prediction, complete)
    if here.backend is None or spec.empty or not spec.batch_invariant:
        return here
    usual = Ranking(spec.of_any_batch(), direction, entries, policy).decision(complete=False)
    # A backend that was set aside may have run such calls before.
    aside = next((name for name in here.order[: here.order.index(here.backend)] if _is_aside(here, name)), "")
    expected = aside or usual.backend
    if expected == here.backend:
        return here
    way_out = f"; with {expected} disabled (ATTNREG_DISABLE) another runs all of them" if expected else ""
    runs = f"{expected} runs" if expected else "no backend can run"
    refusal = f"by {BATCH_INVARIANT} {runs} such calls, whatever the batch{way_out}"
    return replace(here, backend=None, refusal=refusal)


def _is_aside(decision: Decision, name: str) -> bool:
    return any(reason.startswith(SET_ASIDE) for reason in decision.rejected.get(name, ()))


class _Reasons:
    """The reasons against each backend, computed when they are first asked for."""

    def __init__(self, of: Callable[[str], tuple[str, ...]]) -> None:
        self._of = of
        self.known: dict[str, tuple[str, ...]] = {}

    def __getitem__(self, name: str) -> tuple[str, ...]:
        if name not in self.known:
            self.known[name] = self._of(name)
        return self.known[name]

    def __contains__(self, name: object) -> bool:
        """Whether a backend can run the call."""
        return isinstance(name, str) and not self[name]


def _preferred(wanted: Iterable[Preference], known: Container[str]) -> dict[str, str]:
    """Return the backends that are asked for, the first choice first, with the source of each's position."""
    ranked: dict[str, str] = {}
    for preference in wanted:
        for name in map(str.casefold, preference.names):
            if name in known:  # a `use_backend` scope may still name one that has left the registry
                ranked.setdefault(name, preference.source)
    return ranked


class Ranking:
    """The backends for one direction of a call, as they rank before times are looked up.

    It is the same for all lengths of a class. `decision` is given the times that are predicted for some.

    Args:
        spec, direction, entries, policy, native: as for `select`.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        direction: Direction,
        entries: Mapping[str, Entry],
        policy: Policy,
        native: str = "",
    ) -> None:
        spec = spec.unscaled
        self._spec, self._direction, self._policy = spec, direction, policy
        self._wanted = [each for each in policy.preferences if each.names and each.applies_to(spec.device)]
        self._only = next((preference for preference in self._wanted if preference.exclusive), None)
        # The backends that are asked for, the first choice first, with the source of each's position.
        self._preferred = _preferred(self._wanted, entries)
        self._entries = {
            name: entry for name, entry in entries.items() if name in self._preferred or not entry.on_request
        }
        ranks = {name: (entry.installed, -entry.priority(spec)) for name, entry in self._entries.items()}
        self._order = sorted(ranks, key=lambda name: (name != native.casefold(), ranks[name], name))
        self._reasons = _Reasons(
            lambda name: _reasons(self._entries[name], spec, direction, policy, self._only)
        )

    def decision(self, prediction: Prediction | None = None, complete: bool = True) -> Decision:
        """Choose a backend; `prediction` and `complete` are as for `select`."""
        wanted, reasons, entries = self._wanted, self._reasons, self._entries
        ranked, only, strict = dict(self._preferred), self._only, self._policy.strict
        sources = with_sources(self._order, reasons, prediction, default_source(self._spec))
        for name, source in sources.items():
            ranked.setdefault(name, source)
        may = (name for name in ranked if (only is None or ranked[name] == only.source) and name in reasons)
        chosen = next(may, None)
        source = ranked[chosen] if chosen else ""
        shown = {name: entries[name].name for name in ranked}
        before = tuple(takewhile(lambda name: name != chosen, ranked))
        for name in ranked if complete else before:
            reasons[name]
        refusal = _refusal(wanted, only, strict, source)
        return Decision(
            direction=self._direction,
            backend=shown[chosen] if chosen and not refusal else None,
            source=source,
            rejected={shown[name]: reasons.known[name] for name in ranked if reasons.known.get(name)},
            passed_over=tuple(
                shown[name]
                for name in before
                if reasons[name] and (name in self._preferred or _serves(entries[name], self._spec))
            ),
            order=tuple(shown.values()),
            asked_for=tuple(shown[name] for name in ranked if name in self._preferred),
            refusal=refusal,
            predicted=prediction,
        )


def default_source(spec: AttentionSpec) -> str:
    """Return the source of a backend that nothing asked for, and no table."""
    return f"default order for {spec.device.keys[0]}" + (
        f", {BATCH_INVARIANT}" if spec.batch_invariant else ""
    )


def _serves(entry: Entry, spec: AttentionSpec) -> bool:
    return entry.backend is None or spec.device.type in entry.backend.devices


def _reasons(
    entry: Entry, spec: AttentionSpec, direction: Direction, policy: Policy, only: Preference | None
) -> tuple[str, ...]:
    by = policy.disabled.get(entry.name.casefold())
    if by and entry.on_request:  # which its own reasons would load
        return (f"disabled by {by}",)
    reasons = entry.reasons(spec, direction)
    # One backend has to run both directions if there is dropout, or if the caller names it on the call.
    tied = spec.dropout > 0.0 or (only is not None and entry.name.casefold() in map(str.casefold, only.names))
    if direction == "forward" and spec.needs_backward and tied:
        backward = entry.reasons(spec, "backward")
        reasons += tuple(f"backward: {reason}" for reason in backward if reason not in reasons)
    if by:
        reasons = (f"disabled by {by}", *reasons)
    return reasons


def _refusal(wanted: list[Preference], only: Preference | None, strict: str, source: str) -> str:
    if only is not None:
        return "" if source else f"{only.source} allows no other backend"
    if strict and wanted and source != wanted[0].source:
        return f"no backend of {wanted[0].source} can run it, and strict ({strict}) makes that an error"
    return ""


def replayed(
    lock: Lock,
    spec: AttentionSpec,
    direction: Direction,
    entries: Mapping[str, Entry],
    policy: Policy,
    native: str = "",
) -> Decision:
    """Return the locked decision for one direction of a call.

    Raises:
        UnsupportedInputError: the lock has no row for it, or was made in another environment; its backend
            can't run the call; or a preference asks for another backend.
    """
    row, name = lock.expected(spec, direction)
    # Without a prediction: a table isn't a preference, so it can't contradict the lock.
    decision = Ranking(spec, direction, entries, policy, native).decision()
    if decision.refusal:
        return decision
    preferred = decision.source in {preference.source for preference in policy.preferences}
    if not preferred:
        locked = policy.with_first(Preference(name, (row.backend,), required=False))
        decision = select(spec, direction, entries, locked, native)
    if decision.backend is not None and decision.backend.casefold() == row.backend.casefold():
        return replace(decision, source=name)
    beginning, reasons = row.beginning(name), decision.rejected.get(row.backend)
    if preferred and not reasons:
        raise UnsupportedInputError(
            f"{beginning}, but {decision.source} would have {decision.backend} run it: {spec}"
        )
    why = one_line(reasons or ("no backend of that name is known here",))
    raise UnsupportedInputError(f"{beginning}, which can't run it here ({why}): {spec}", decision.rejected)
