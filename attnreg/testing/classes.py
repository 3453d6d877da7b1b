"""Whether a backend's decisions agree with the classes of lengths that its cuts make.

Calls of a kind whose lengths are of one class are decided once (`contract.lengths`). Here lengths are drawn:
half of them beside a cut, half anywhere. Then the decisions about calls of the same class are compared.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import get_args

from attnreg.core.contract.lengths import (
    LENGTHS,
    OF_ALL,
    Cut,
    Lengths,
    changes_at,
    check_cuts,
    cuts_of_window,
    reads_of,
    with_lengths,
)
from attnreg.core.contract.spec import AttentionSpec, Direction
from attnreg.core.dispatch.state import CallKind
from attnreg.core.registry.entry import Entry
from attnreg.core.torchlib.isolation import raise_if_temporary
from attnreg.tools.measure import Case

# How many factors are drawn for a shorter and for a longer case of the same class.
DRAWS = 4


def failure(entry: Entry, spec: AttentionSpec) -> str:
    """Return how a backend's `cuts` or `builds` fails for a spec; empty if they don't.

    A program goes on without what they return: it decides about each new length, and says nothing.
    """
    backend = entry.backend
    if backend is None:
        return ""
    spec, function = entry.adapted(spec, "forward"), "cuts"
    try:
        if backend.cuts is not None:
            check_cuts(backend.cuts(spec), backend.name)
            if reads := reads_of(backend.cuts, spec):
                return f"cuts() reads {', '.join(sorted(reads))} of the spec, expected no length"
        function = "builds"
        if backend.builds is not None:
            backend.builds(spec)
    except BaseException as error:  # noqa: BLE001 - a fault in a backend's function is what is looked for
        raise_if_temporary(error)
        return f"{function}() failed: {type(error).__name__}: {error}"
    return ""


def draw_spec(draw: random.Random, spec: AttentionSpec, cuts: Sequence[Cut]) -> AttentionSpec:
    """Return a call of a spec's kind with new lengths; half of the calls lie at a cut, or beside it."""
    drawn = with_lengths(
        spec, batch=_number(draw, 2**17), max_q=_number(draw, 2**18), max_k=_number(draw, 2**18)
    )
    if spec.key_ranges:
        drawn = with_lengths(drawn, ranges=_number(draw, 64))
    for name, longest in (("tokens_q", drawn.max_q), ("tokens_k", drawn.max_k)):
        drawn = with_lengths(drawn, **{name: draw.randint(longest, max(longest, drawn.batch * longest))})
    if cuts and draw.random() < 0.5:
        drawn = _near(draw, drawn, draw.choice(cuts))
    return drawn


def _number(draw: random.Random, most: int) -> int:
    """Draw a number up to `most`; each power of two is as likely as the next."""
    return int(2 ** draw.uniform(0.0, most.bit_length() - 1)) - (draw.random() < 0.03)


def _near(draw: random.Random, spec: AttentionSpec, cut: Cut) -> AttentionSpec:
    """Return a spec with one length such that it lies at a cut or beside it; the same where none does."""
    name = draw.choice(sorted(cut.names))
    if not spec.varlen and name.startswith("tokens"):
        name = draw.choice(("batch", name.replace("tokens", "max")))
    at = changes_at(spec, cut, name)
    return spec if at is None else with_lengths(spec, **{name: max(at + draw.choice((-1, 0, 1)), 0)})


def by_class(specs: Iterable[AttentionSpec], cuts: Iterable[Cut]) -> list[list[AttentionSpec]]:
    """Return specs of the same kind, grouped by their length class."""
    kind, groups = CallKind(cuts), defaultdict(list)
    for spec in specs:
        groups[kind.key(Lengths.of(spec))].append(spec)
    return list(groups.values())


def difference(entry: Entry, spec: AttentionSpec, seed: int, count: int = 24) -> str:
    """Return which two calls of a spec's kind a backend's cuts don't tell apart, though it decides otherwise.

    Empty if there are none among `count` calls drawn for each direction, or where they are decided by exact
    lengths anyway.
    """
    draw = random.Random(f"{seed} {spec}")
    directions: tuple[Direction, ...] = ("forward", "backward")
    for direction in directions:
        cuts = (*OF_ALL, *entry.cuts(spec, direction))
        drawn = [spec, *(draw_spec(draw, spec, cuts) for _ in range(count))]
        for group in by_class(drawn, cuts):
            if all(entry.unnamed_reads(candidate, direction) for candidate in group):
                continue
            for other in group:
                if decided(entry, other, direction) != decided(entry, group[0], direction):
                    return _described(entry, direction, *_nearest(entry, direction, cuts, group[0], other))
    return ""


def unnamed(entry: Entry, specs: Iterable[AttentionSpec]) -> list[str]:
    """Return a sentence for each direction that is decided by lengths that no cut names.

    Such a backend is right, but a program that brings new lengths waits for a decision at each of them.
    """
    reads: dict[Direction, set[str]] = {direction: set() for direction in get_args(Direction)}
    for spec, (direction, names) in itertools.product(specs, reads.items()):
        if not failure(entry, spec) and not _is_ruled_out(entry, spec, direction):
            names |= entry.unnamed_reads(spec, direction)
    return [
        f"some {direction}s are decided anew for each length: its functions read "
        f"{', '.join(sorted(names))}, which no Cut of cuts() names"
        for direction, names in reads.items()
        if names
    ]


def decided(entry: Entry, spec: AttentionSpec, direction: Direction) -> tuple[bool, int]:
    """Return what a backend's limits decide about a call: whether it runs it, and with which rank."""
    runs = not entry.reasons(spec, direction)
    return runs, entry.priority(spec) if runs else 0


def of_same_class(entry: Entry, case: Case, spec: AttentionSpec, seed: int) -> list[Case]:
    """Return a shorter and a longer case of the kind and length class of `case`, whose spec is `spec`.

    So a launcher that is specialized for these cases has to run `case`, too. Query and key lengths change. If
    the class fixes the query lengths, only key lengths change, and the reverse. The list lacks a case if no
    draw is of the class. It is empty if the backend reads lengths that no cut names: such a backend's
    launchers are cached by exact lengths.
    """
    directions: tuple[Direction, ...] = get_args(Direction)
    if any(entry.unnamed_reads(spec, direction) for direction in directions):
        return []
    cuts = [*OF_ALL, *cuts_of_window(*spec.window)]
    cuts += (cut for direction in directions for cut in entry.cuts(spec, direction))
    draw = random.Random(f"{seed} {case}")
    cases: list[Case] = []
    for low, high in ((0.2, 0.8), (1.2, 2.0)):
        factors = [draw.uniform(low, high) for _ in range(DRAWS)]
        scaled = [case.scaled(factor, factor) for factor in factors]
        if not case.one_cu_seqlens:
            scaled += [case.scaled(1.0, factor) for factor in factors]
            scaled += [case.scaled(factor, 1.0) for factor in factors]
        specs = {other: other.spec(spec.device) for other in scaled if other.lens != case.lens}
        alike = (other for other, of_other in specs.items() if len(by_class((spec, of_other), cuts)) == 1)
        cases += itertools.islice(alike, 1)
    return cases


def _nearest(
    entry: Entry, direction: Direction, cuts: Sequence[Cut], call: AttentionSpec, other: AttentionSpec
) -> tuple[AttentionSpec, AttentionSpec]:
    """Return two calls of one class with other decisions that differ as little as this search finds."""

    def differs(spec: AttentionSpec) -> bool:
        is_alike = len(by_class((call, spec), cuts)) == 1
        return is_alike and decided(entry, spec, direction) != decided(entry, call, direction)

    for name in LENGTHS * 2:  # the second time with the nearest numbers of the others
        same = with_lengths(other, **{name: getattr(call, name)})
        if differs(same):
            other = same
            continue
        alike, unlike = getattr(call, name), getattr(other, name)
        while abs(alike - unlike) > 1:
            middle = (alike + unlike) // 2
            between = with_lengths(other, **{name: middle})
            if differs(between):
                other, unlike = between, middle
            else:
                alike = middle
        nearer = with_lengths(call, **{name: alike})
        is_alike = len(by_class((nearer, other), cuts)) == 1
        if is_alike and decided(entry, nearer, direction) == decided(entry, call, direction):
            call = nearer
    return call, other


def _is_ruled_out(entry: Entry, spec: AttentionSpec, direction: Direction) -> bool:
    """Whether the declared fields refuse a call, so that no function is asked about it."""
    backend = entry.backend
    limits = None if backend is None else backend.forward if direction == "forward" else backend.backward
    return limits is None or bool(limits.against(spec.of(direction)))


def _described(entry: Entry, direction: Direction, *pair: AttentionSpec) -> str:
    own = [name for name in LENGTHS if pair[0].varlen or not name.startswith("tokens")]  # others follow
    differing = [name for name in own if len({getattr(spec, name) for spec in pair}) > 1]
    if not differing:
        return (
            f"refuses or priority: got two decisions about the same {direction}, expected one for each spec"
        )
    first, second = (_fate(entry, direction, spec, differing) for spec in pair)
    return (
        f"cuts: no Cut lies between a {direction} with {first}, and with {second}; expected one, or no Cut "
        "of these lengths at all: each length is decided anew then"
    )


def _fate(entry: Entry, direction: Direction, spec: AttentionSpec, names: Sequence[str]) -> str:
    lengths = " and ".join(f"{name} {getattr(spec, name)}" for name in names)
    against = "; ".join(entry.reasons(spec, direction))
    fate = f"is refused ({against})" if against else f"runs (priority {entry.priority(spec)})"
    return f"{lengths}, which {fate}"
