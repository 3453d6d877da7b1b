"""What a decision about a kind of calls depends on: where it changes with lengths, and how much these count.

Lengths of one class decide alike, save where measured times decide, a limit looks at a length that no cut
names, or a backend builds something for each shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attnreg.core.contract.lengths import OF_ALL, Lengths
from attnreg.core.contract.spec import AttentionSpec, Direction, directions_of
from attnreg.core.dispatch import timed, trace
from attnreg.core.dispatch.state import CallKind, Detail, State
from attnreg.core.registry.entry import Entry
from attnreg.core.selection.decision import Decision


def kind_of(now: State, spec: AttentionSpec, direction: Direction, native: str = "") -> CallKind:
    """Return the kind of calls that a spec is one of, with the places where its decisions change.

    `native` is the backend whose kernel torch itself has selected.
    """
    directions = _directions(spec, direction)
    cuts = [*OF_ALL]
    for each in directions:
        for entry in now.entries.values():
            cuts += entry.cuts(spec, each)
        if now.policy.lock is not None:
            cuts += now.policy.lock.cuts(spec, each) or ()
    if (times := now.policy.times(native)) is not None:
        cuts += times.cuts(spec.device)
    return CallKind(cuts)


def _directions(spec: AttentionSpec, direction: Direction) -> tuple[Direction, ...]:
    return directions_of(spec) if direction == "forward" else (direction,)


def refined_key(
    now: State,
    kind: CallKind,
    key: tuple[object, ...],
    spec: AttentionSpec,
    direction: Direction,
    decisions: Sequence[Decision],
) -> tuple[tuple[object, ...], bool]:
    """Return what the plan of a call is kept under, and whether times alone decide about further lengths.

    `key` is what it is kept under so far. As much of the lengths counts in the call's class as the decisions
    depend on. All count where times chose a backend that builds something for each shape. So they do where
    times may choose it for other lengths, as long as few shapes have come.
    """
    detail = _besides_shapes(now, kind, key, spec, direction, decisions)
    by_times_alone = detail is Detail.STEPS
    may_build = by_times_alone and not kind.brings_new_shapes
    if builds_by_times(decisions[-1], now.entries, spec) or (
        may_build and _may_build_by_times(now, decisions[-1], spec, direction)
    ):
        detail = Detail.SHAPES
    return kind.refine(key, detail, Lengths.of(spec)), by_times_alone


def _besides_shapes(
    now: State,
    kind: CallKind,
    key: tuple[object, ...],
    spec: AttentionSpec,
    direction: Direction,
    decisions: Sequence[Decision],
) -> Detail:
    """Return what would count if no backend built anything for a shape.

    All lengths count if calls are recorded, or locked by exact lengths. So they do if a backend that was
    asked, or whose rank was compared, looks at a length that no cut names. Where calls are timed, those of
    similar lengths are.
    """
    lock = now.policy.lock
    if trace.is_recording() or (
        lock is not None and any(lock.cuts(spec, each) is None for each in _directions(spec, direction))
    ):
        return Detail.EXACT
    # Backends may have turns at such calls before there are times.
    has_turns = now.policy.adaptive is not None and any(
        decision.backend not in decision.asked_for for decision in decisions
    )
    by_times = has_turns or any(map(_is_by_times, decisions))
    if kind.detail_of(key) is Detail.EXACT:
        return Detail.EXACT
    # Watching the reads takes as long as the decision. Times compare the same backends for all lengths of a
    # class. What a backend reads may be known only once it has loaded.
    place = key[:1], sum(entry.is_loaded for entry in now.entries.values())
    looks = kind.looks_at_lengths.get(place) if by_times else None
    if looks is None:
        looks = _looks_at_lengths(now, spec, direction, decisions, by_times)
        if by_times:
            kind.looks_at_lengths[place] = looks
    if looks:
        return Detail.EXACT
    return Detail.STEPS if by_times or timed.is_on else Detail.CLASS


def _looks_at_lengths(
    now: State, spec: AttentionSpec, direction: Direction, decisions: Sequence[Decision], by_times: bool
) -> bool:
    # Times order the backends that can run a call: all were considered. So they were before a locked one.
    all_count = by_times or now.policy.lock is not None
    names = (
        name for decision in decisions for name in (decision.order if all_count else decision.considered)
    )
    considered = {name.casefold() for name in names}
    return any(
        entry.unnamed_reads(spec, each, ranks_only=name not in considered)
        for name, entry in now.entries.items()
        for each in _directions(spec, direction)
    )


def builders(entries: Mapping[str, Entry], spec: AttentionSpec) -> frozenset[str]:
    """Return the names, in lower case, of the backends that build something for each shape of such calls."""
    return frozenset(name for name, entry in entries.items() if entry.builds(spec))


def _is_by_times(decision: Decision) -> bool:
    return decision.predicted is not None and decision.backend not in decision.asked_for


def _may_build_by_times(now: State, decision: Decision, spec: AttentionSpec, direction: Direction) -> bool:
    """Whether times of other lengths may choose a backend that builds something for each shape.

    While backends take turns, the shapes count for which something was built in a turn.
    """
    prediction = decision.predicted
    if prediction is None or not _is_by_times(decision) or now.policy.adaptive is not None:
        return False
    names = builders(now.entries, spec).difference(now.policy.disabled)
    able = (name for name in names if not now.entries[name].reasons(spec, direction))
    candidates = (prediction.of(name) for name in able)
    return any(candidate is not None and candidate.rank_us is not None for candidate in candidates)


def builds_by_times(decision: Decision, entries: Mapping[str, Entry], spec: AttentionSpec) -> bool:
    """Whether times chose a backend that builds something for each shape of such calls."""
    entry = entries.get((decision.backend or "").casefold())
    return _is_by_times(decision) and entry is not None and entry.builds(spec)
