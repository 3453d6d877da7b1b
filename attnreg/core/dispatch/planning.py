"""Making a plan: the spec of a call, the decision about it, and the kernel that comes out."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnreg.core.contract.backend import Call
from attnreg.core.contract.lengths import Lengths
from attnreg.core.contract.options import LEAST_SCALE, OPTIONS, options_on
from attnreg.core.contract.spec import AttentionSpec, Device, Direction
from attnreg.core.dispatch import counters, timed, trace
from attnreg.core.dispatch.declined import NOBODY, Declined, JudgedEntry, with_reasons
from attnreg.core.dispatch.kinds import builders, refined_key
from attnreg.core.dispatch.state import BY_TIMES, CallKind, Plan, State
from attnreg.core.dispatch.steps import Steps
from attnreg.core.launching.validation import checked_against_contract
from attnreg.core.policy import ranks
from attnreg.core.registry.entry import Entry
from attnreg.core.selection.decision import (
    BATCH_INVARIANT,
    Decision,
    Policy,
    Preference,
    Ranking,
    replayed,
    select,
)
from attnreg.core.selection.protocols import Turn
from attnreg.core.selection.render import refuse
from attnreg.core.torchlib import building, captured
from attnreg.errors import BackendUnavailableError, UnsupportedInputError

log = logging.getLogger("attnreg")

# Why torch's own kernel runs as if attnreg weren't there, in `stats`, reports and explanations.
NOTHING_ASKS = "nothing asks for a backend"


class Native(NamedTuple):
    """The kernel that torch was about to run when a router took the call.

    Attributes:
        name: the backend whose kernel it is; comes first in the default order.
        judged: whether that backend's capabilities decide if the kernel can run the call. If not, torch's
            own selector has decided so already, and what it decided stands.
        positive_scale: whether the kernel needs a scale above 0. Torch's selector doesn't check that. With a
            scale of 0 or below results weren't finite (torch 2.11 on an H200).
        kernel: the kernel's name where nothing asks for a backend, so that it isn't counted as one.
    """

    name: str
    judged: bool = False
    positive_scale: bool = False
    kernel: str = "torch's own kernel"


class _Settled(NamedTuple):
    """What was decided about a call, and the kernel that was loaded for it.

    Attributes:
        decisions: of a forward whose gradient is wanted, first the decision about its backward.
        entries: the backends, with the reasons of those that have declined the call.
        kernel: the backend's function; None for torch's own kernel of the op.
        turn: what times the call, where backends take turns.
        torchs: the name of torch's own kernel where it runs because nothing asks for a backend, else "".
    """

    decisions: tuple[Decision, ...]
    entries: Mapping[str, Entry]
    kernel: Callable[..., Any] | None
    turn: Turn | None
    torchs: str = ""

    @property
    def decision(self) -> Decision:
        """The decision about the call itself."""
        return self.decisions[-1]

    @property
    def shown(self) -> Decision:
        """The decision as it is counted and reported: torch's own kernel has the name that `stats` has."""
        if not self.torchs:
            return self.decision
        return replace(self.decision, backend=self.torchs, source=NOTHING_ASKS)


def make_plan(
    now: State,
    kind: CallKind,
    key: tuple[object, ...],
    spec: AttentionSpec,
    direction: Direction,
    native: Native | None = None,
    leading: Preference | None = None,
    declined: Declined = NOBODY,
) -> Plan:
    """Decide about a spec and load the kernel; keeps the plan once its first results were checked.

    Raises `UnsupportedInputError` if no backend can run it, or none may; what `decide` raises; and
    `RanksDifferError` if another rank of the job chooses by another table.
    """
    building.ensure_built()  # the next start of the program has the compiled part
    captured.warn_if_shadowed_in_plan(is_of_new_kind=not kind.plans)
    ranks.agree(now.policy, now.entries, spec.device)
    # Before another shape is decided: whichever backend runs it, deciding it takes a millisecond, too.
    if kind.leave_shapes(Lengths.of(spec), builders(now.entries, spec)):
        key = kind.key(Lengths.of(spec))
    counted_builds, began = kind.brings_new_shapes, time.perf_counter()
    settled = _decide_and_load(now, kind, spec, direction, native, leading, declined)
    seconds = time.perf_counter() - began
    key, by_times_alone = refined_key(now, kind, key, spec, direction, settled.decisions)
    if kind.brings_new_shapes is not counted_builds:
        # Another thread has forgotten all decisions while this one was made, by other costs.
        kind.forget()
        return make_plan(now, kind, kind.key(Lengths.of(spec)), spec, direction, native, leading, declined)
    if by_times_alone:
        _keep_steps(now, kind, key, spec, direction, native, leading)
    else:
        kind.steps.pop(key[:1], None)
    return _instrumented(now, kind, key, spec, direction, settled, seconds)


def _decide_and_load(
    now: State,
    kind: CallKind,
    spec: AttentionSpec,
    direction: Direction,
    native: Native | None,
    leading: Preference | None,
    declined: Declined,
) -> _Settled:
    policy, entries = now.policy.with_first(leading), now.entries
    if spec.batch_invariant:
        native = None  # torch's selector looks at the batch, too, and its kernels don't know of the policy
    building_names = builders(entries, spec) if kind.brings_new_shapes else frozenset()
    decisions: tuple[Decision, ...] = ()
    if direction == "forward" and spec.needs_backward:
        # Better no forward than one whose gradients no backend can compute.
        decisions = (_settle(spec, "backward", entries, policy, native, building_names, direction)[0],)
    if declined:
        now.keep_declined(direction, spec, declined)
        name, reason = next(iter(declined.items()))
        if spec.batch_invariant:
            raise UnsupportedInputError(f"{BATCH_INVARIANT}, so none but {name} may run it: {reason}: {spec}")
        entries = with_reasons(entries, declined)
    decision, kernel, turn = _in_turn(spec, direction, entries, policy, native, building_names)
    # Such a call makes no plan that would count its shape.
    if turn is not None and (decision.backend or "").casefold() in builders(entries, spec):
        kind.note_shape(kind.key_of_shape(Lengths.of(spec)))
    torchs = native.kernel if native is not None and kernel is None and policy.only_recording else ""
    return _Settled((*decisions, decision), entries, kernel, turn, torchs)


def _keep_steps(
    now: State,
    kind: CallKind,
    key: tuple[object, ...],
    spec: AttentionSpec,
    direction: Direction,
    native: Native | None,
    leading: Preference | None,
) -> None:
    """Keep a `Steps` for a call's class, unless more than times differs between its steps of lengths."""
    policy, name = now.policy.with_first(leading), native.name if native is not None else ""
    times = policy.times(name)
    # Turns are given out, timed calls have rows of their own, and captured calls keep no plan.
    takes_more = policy.adaptive is not None or timed.is_on or spec.capturing
    if takes_more or times is None or kind.detail_of(key) not in BY_TIMES:
        return
    # Made anew by each full decision: meanwhile a backend may have turned out not to load.
    offered = entries_with_native(native, now.entries)
    ranking = Ranking(spec.of(direction), direction, offered, policy, name)
    is_native = functools.partial(_leaves_to_native, native, direction, now.entries)
    kind.steps[key[:1]] = Steps(now, kind, spec, direction, ranking, times, is_native)


def _instrumented(
    now: State,
    kind: CallKind,
    key: tuple[object, ...],
    spec: AttentionSpec,
    direction: Direction,
    settled: _Settled,
    seconds: float,
) -> Plan:
    """Return the plan with counters, checks of its first results, and what a launcher needs."""
    turn, shown = settled.turn, settled.shown
    # What is kept, unlike the turn of a single call.
    lasting = None if turn else timed.plan_of(spec, direction, shown.backend or "", shown.source, seconds)
    kernel = None if settled.kernel is None else _timed(settled.kernel, lasting)
    counted, log_fallbacks = counters.for_decision(shown)
    counted += trace.counters(spec, direction)
    name = settled.decision.backend or ""
    plan = Plan(name, kernel, kernel is None, counted, kind=kind, key=key, turn=turn or lasting)
    # What a CUDA graph can't record for want of a first run it may record later.
    is_kept = not spec.capturing and turn is None
    if kernel is None:
        log_fallbacks()
        if is_kept:
            now.keep(plan)
        return plan._replace(is_checked=is_kept)
    entry = settled.entries[name.casefold()]
    _warn_not_deterministic(entry, spec, direction)
    specialize = entry.kernels(spec).specialize
    plan = plan._replace(
        set_aside=functools.partial(entry.set_aside, spec, direction),
        counts=functools.cache(lambda: entry.counts_sinks(spec, direction)),
        specialize=None if specialize is None else functools.partial(specialize, direction),
    )

    def passed() -> None:
        log_fallbacks()
        if is_kept:
            now.keep(plan)

    checked = checked_against_contract(
        entry.kernel(direction),
        direction,
        name,
        passed,
        lambda plain: _timed(entry.fit_for(spec, direction, plain), turn or lasting),
    )
    return plan._replace(kernel=checked, is_checked=False)


def decide(
    spec: AttentionSpec,
    direction: Direction,
    entries: Mapping[str, Entry],
    policy: Policy,
    native: str = "",
    complete: bool = True,
    builders: frozenset[str] = frozenset(),
) -> Decision:
    """Select a backend, after checking that those asked for by name can load here.

    `complete` is as for `select`; of `builders` the times count what they build for each new shape.

    A `BackendUnavailableError` says who asked for one that can't load here, why, and what to install. Raises
    `UnsupportedInputError` if a lock says otherwise, or nothing, of this call.
    """
    spec = spec.of(direction)
    for preference in policy.preferences:
        if preference.required and preference.applies_to(spec.device):
            for name in preference.names:
                _check_loads(entries.get(name.casefold()), spec, policy, preference.source)
    if policy.lock is not None:
        return replayed(policy.lock, spec, direction, entries, policy, native)
    times = policy.times(native)
    prediction = times.predict(spec, direction, builders) if times is not None else None
    return select(spec, direction, entries, policy, native, prediction, complete)


def entries_with_native(native: Native | None, entries: Mapping[str, Entry]) -> Mapping[str, Entry]:
    """Return the backends with torch's own kernel in place of the backend of its name."""
    if native is None or (native.judged and native.name.casefold() in entries):
        return entries
    entry = _NativeEntry(native.name, "torch", positive_scale=native.positive_scale)
    return {**entries, native.name.casefold(): entry}


_SPEC_FIELDS = frozenset(field.name for field in fields(AttentionSpec))


def spec_of(query: Tensor, key: Tensor, value: Tensor, call: Call, needs_backward: bool) -> AttentionSpec:
    """Return the spec of a call in the contract's layout.

    Query, key and value are (B, S, H, D) or packed (T, H, D), floating point. With a `block_table` key and
    value are pages, (pages, page size, H, D).
    """
    varlen, paged = call.varlen, call.block_table is not None
    capturing = query.is_cuda and torch.cuda.is_current_stream_capturing()
    batch = query.shape[0] if call.cu_seqlens_q is None else len(call.cu_seqlens_q) - 1
    described = {
        row.field: row.described(getattr(call, row.name)) for row in OPTIONS if row.values != "pages"
    }
    own = {name: value for name, value in described.items() if name in _SPEC_FIELDS}
    further = {row.field: described[row.field] for row in options_on(call) if row.field not in _SPEC_FIELDS}
    spec = AttentionSpec(
        device=device_of(query.device),
        dtype=str(query.dtype),
        batch=batch, max_q=call.max_q, max_k=call.max_k,
        heads_q=query.shape[-2], heads_k=key.shape[-2],
        head_dim=query.shape[-1], head_dim_v=value.shape[-1],
        tokens_q=query.shape[0] if varlen else batch * call.max_q,
        tokens_k=batch * call.max_k if paged or not varlen else key.shape[0],
        ranges=0 if call.key_ranges is None else call.key_ranges.shape[1],
        varlen=varlen,
        window=call.window,
        page_size=key.shape[1] if paged else None,
        positive_scale=call.scale >= LEAST_SCALE,
        **own, further=tuple(further.items()),
        needs_backward=needs_backward,
        deterministic=call.deterministic,
        batch_invariant=call.batch_invariant,
        capturing=capturing,
    )  # fmt: skip
    return spec if spec.gives_sinks and not capturing else spec.unscaled


@functools.cache
def device_of(device: torch.device) -> Device:
    """Return what selection needs to know of a device; asks the driver once per device."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return Device(device.type, index=device.index)
    properties = torch.cuda.get_device_properties(device)
    return Device("cuda", (properties.major, properties.minor), device.index, properties.name)


@dataclass(eq=False)
class _NativeEntry(JudgedEntry):
    """Torch's own kernel of an op, to which torch's selector has sent the call.

    So nothing is against it but what the selector doesn't know.
    """

    positive_scale: bool = False

    def reasons(self, spec: AttentionSpec, direction: Direction) -> tuple[str, ...]:
        if self.positive_scale and not spec.positive_scale:
            return ("scale must be above 0: the results of torch's own kernel aren't finite",)
        return super().reasons(spec, direction)


def _settle(
    spec: AttentionSpec,
    direction: Direction,
    entries: Mapping[str, Entry],
    policy: Policy,
    native: Native | None,
    builders: frozenset[str] = frozenset(),
    called: Direction | None = None,
) -> tuple[Decision, Callable[..., Any] | None]:
    """Decide until the chosen backend's package really loads; no kernel means torch's own.

    `called` is the direction that the program calls, for an error, where another direction is decided first.
    """
    offered = entries_with_native(native, entries)
    name, complete = native.name if native else "", policy.adaptive is not None
    while True:
        decision = decide(spec, direction, offered, policy, name, complete, builders)
        if decision.backend is None:
            if called is not None:
                # A forward that can't run without a gradient either is refused for that.
                alone, of_call = spec.but(needs_backward=False), replace(policy, lock=None)
                of_forward = decide(alone, called, offered, of_call, name, True, builders)
                if of_forward.backend is None:
                    refuse(spec, of_forward)
            refuse(spec, decide(spec, direction, offered, policy, name, True, builders), called)
        entry = offered[decision.backend.casefold()]
        if _is_of_native(native, entry, spec, direction):
            # What is only recorded runs as it did.
            same = None if policy.only_recording else entries.get(entry.name.casefold())
            return decision, _faster_than_native(spec, direction, same)
        try:
            return decision, entry.kernel(direction, spec)
        except BackendUnavailableError:
            continue  # its probe was too hopeful; from now on it is rejected with the cause


def _in_turn(
    spec: AttentionSpec,
    direction: Direction,
    entries: Mapping[str, Entry],
    policy: Policy,
    native: Native | None,
    builders: frozenset[str],
) -> tuple[Decision, Callable[..., Any] | None, Turn | None]:
    """Settle about a call; by `policy = "adaptive"` it may be the turn of another backend than the best.

    `builders` get no turns: the program always has new shapes, for each of which they build something.
    """
    if policy.adaptive is None:
        return *_settle(spec, direction, entries, policy, native, builders), None
    policy.adaptive.begin(spec, direction)
    decision, kernel = _settle(spec, direction, entries, policy, native, builders)
    if decision.backend in decision.asked_for:
        return decision, kernel, None
    behind = {entry.name for entry in entries.values() if entry.stands_in}
    able = [name for name in decision.order if name not in behind and name not in decision.rejected]
    turn = policy.adaptive.turn(spec, direction, able, decision.predicted, builders)
    if turn is not None and turn.backend:
        leading = Preference(turn.source, (turn.backend,), required=False)
        # A turn isn't asked for by anybody, so that `strict` has nothing to insist on.
        in_turn = replace(policy.with_first(leading), strict="")
        decision, kernel = _settle(spec, direction, entries, in_turn, native)
        if decision.backend != turn.backend:
            turn.give_up("it doesn't load")
    return decision, kernel, turn


def _leaves_to_native(
    native: Native | None,
    direction: Direction,
    entries: Mapping[str, Entry],
    spec: AttentionSpec,
    backend: str,
) -> bool:
    """Whether torch's own kernel runs a call for which its name, or a backend of its name, was chosen."""
    name = backend.casefold()
    if not _is_of_native(native, entries_with_native(native, entries)[name], spec, direction):
        return False
    return _faster_than_native(spec, direction, entries.get(name)) is None


def _is_of_native(native: Native | None, entry: Entry, spec: AttentionSpec, direction: Direction) -> bool:
    """Whether torch's own kernel is a call's backend: it gets the op's arguments as they came, unpadded."""
    return native is not None and entry.name == native.name and not entry.adaptations(spec, direction)


def _faster_than_native(
    spec: AttentionSpec, direction: Direction, entry: Entry | None
) -> Callable[..., Any] | None:
    """Return the function of the backend of that name, if it runs such a call faster than torch's kernel."""
    if entry is None or spec.varlen or entry.unavailable():
        return None
    if not entry.replaces_native(spec, direction) or entry.reasons(spec, direction):
        return None
    return entry.kernel(direction, spec)


def _timed(kernel: Callable[..., Any], turn: Turn | None) -> Callable[..., Any]:
    """Return a kernel that is timed where it is a backend's turn."""
    return kernel if turn is None else lambda *arguments: turn.timed(lambda: kernel(*arguments), arguments[0])


def _warn_not_deterministic(entry: Entry, spec: AttentionSpec, direction: Direction) -> None:
    """Say why deterministic algorithms would have refused a backend, were they not asked to warn only."""
    if torch.is_deterministic_algorithms_warn_only_enabled():
        refused = spec.unscaled.but(deterministic=True)
        _warn_once(entry.name, direction, entry.reasons(refused, direction))


@functools.cache
def _warn_once(name: str, direction: Direction, reasons: tuple[str, ...]) -> None:
    if reasons:
        said = "; ".join(reasons)
        log.warning("%s runs a %s that isn't deterministic, as torch only warns: %s", name, direction, said)


def _check_loads(entry: Entry | None, spec: AttentionSpec, policy: Policy, source: str) -> None:
    if entry is None or entry.name.casefold() in policy.disabled or spec.device.simulated:
        return
    backend = entry.open()
    serves = backend is None or spec.device.type in backend.devices
    if serves and entry.unavailable():
        raise BackendUnavailableError(f"{source}: {entry.name} {entry.unavailable()}") from entry.cause
