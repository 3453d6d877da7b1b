"""`explain`: which backend would run a call, who decided, and why not the others.

Takes a spec, for hardware that needn't be there, or the arguments of the call itself, which `call_spec`
reads. Decides as calls are decided, by `dispatch.planning.decide`, and runs no kernel. May import: the
fronts and all below them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from attnreg.core import registry
from attnreg.core.aten.bypassed import SDPA, Bypassed, SdpaCall, why_refused
from attnreg.core.contract.backend import UNTRIED
from attnreg.core.contract.capabilities import one_line
from attnreg.core.contract.options import options_of
from attnreg.core.contract.spec import AttentionSpec, Direction, directions_of
from attnreg.core.dispatch import counters, declined, scope
from attnreg.core.dispatch.kinds import builds_by_times
from attnreg.core.dispatch.planning import Native, decide, entries_with_native
from attnreg.core.dispatch.state import FEW_SHAPES, State, state
from attnreg.core.policy import current
from attnreg.core.registry.entry import Entry
from attnreg.core.selection.decision import Decision, Policy, Preference, select, tied_to
from attnreg.core.selection.render import option_lines
from attnreg.core.torchlib import captured
from attnreg.core.torchlib.frames import leave_module_uncompiled
from attnreg.core.varlen.front import TENSORS, AuxRequest, asks_for_lse
from attnreg.core.varlen.plans import check_sinks, check_tensors
from attnreg.errors import BackendUnavailableError, InvalidInputError, UnsupportedInputError
from attnreg.tools.explanation.answer import NOBODY_ASKS, Explanation
from attnreg.tools.explanation.call_spec import (
    FLASH,
    VARLEN,
    CallSpec,
    described,
    masked,
    nested,
    never_seen,
    packed,
)

__all__ = ["Explanation", "explain"]


def explain(
    query: AttentionSpec | Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    cu_seq_q: Tensor | None = None,
    cu_seq_k: Tensor | None = None,
    max_q: int = 0,
    max_k: int = 0,
    is_causal: bool = False,
    return_aux: AuxRequest | None = None,
    *,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    window_size: Sequence[int] | None = (-1, -1),
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    enable_gqa: bool = False,
    backend: str | None = None,
    **options: Any,
) -> Explanation:
    """Say which backend would run a call, who decided, and every reason against every other.

    The call is an `AttentionSpec`, or the arguments of `varlen_attn` or `F.scaled_dot_product_attention`.
    Runs no kernel. If a gradient is needed, `return_aux=AuxRequest(lse=True)` means a gradient of the LSE,
    too.

    Args:
        query: A spec; or a tensor, packed (T_q, H, D) with `cu_seq_q`, else dense (B, H, S_q, D), of a
            floating-point dtype.
        key: Packed (T_k, H_k, D), in pages (pages, page size, H_k, D), or dense (B, H_k, S_k, D). The dtype
            of the query, like `value`.
        value: As key, with any head dim D_v.
        cu_seq_q, cu_seq_k: int32 (B + 1,), as for `varlen_attn`. Without `cu_seq_q` the call is dense.
        attn_mask: For dense calls only. Broadcasts to (B, H, S_q, S_k); bool, float32 or the query's dtype.
        seqused_k: For packed calls only, int32 (B,).
        block_table: For packed calls only, int32 (B, pages per sequence).
        sinks: For packed calls only, (H,).
        alibi_slopes: For packed calls only, float32 (H,) or (B, H).
        backend: Explain a call with this `backend=`. The backend needn't load.
        **options: For packed calls only, options without an argument of their own: see `contract.options`.

    All other arguments are arguments of the two functions.

    Raises:
        InvalidInputError: the arguments contradict each other.
        UnknownBackendError: there is no such `backend`.
        ConfigError: the environment or a settings file can't be read.
    """
    # `backend=` here as there, but the backend needn't load.
    leading = None
    if backend is not None:
        name = registry.find(backend).name
        leading = Preference(f"backend={name!r}", (name,), exclusive=True)
    elif choice := scope.current():
        leading = choice.preference
    if isinstance(query, AttentionSpec):
        return explain_spec(query, leading)
    if query is None or key is None or value is None:
        three = ("query", query), ("key", key), ("value", value)
        names = ", ".join(name for name, tensor in three if tensor is not None)
        raise InvalidInputError(
            f"explain: got {f'{names} alone' if names else 'None'}, expected query, key and value, or an "
            "AttentionSpec"
        )
    options |= {
        "seqused_k": seqused_k, "block_table": block_table, "num_splits": num_splits, "softcap": softcap,
        "sinks": sinks, "alibi_slopes": alibi_slopes,
    }  # fmt: skip
    further = {"attn_mask": attn_mask, "cu_seq_q": cu_seq_q}
    further = {name: tensor for name, tensor in further.items() if tensor is not None}
    further |= {name: options[name] for name in TENSORS if name in options}
    check_tensors(query=query, key=key, value=value, cu_seq_k=cu_seq_k, **further)
    if cu_seq_q is not None:
        if attn_mask is not None:
            raise InvalidInputError(
                "explain: got attn_mask with cu_seq_q, expected none: varlen_attn has no such argument"
            )
        if sinks is not None:
            check_sinks(query, sinks)
        lengths, mask = (cu_seq_q, cu_seq_k, max_q, max_k), (is_causal, window_size, scale, enable_gqa)
        options |= {"dropout_p": dropout_p}
        return _explained(
            packed(query, key, value, lengths, mask, options, asks_for_lse(return_aux)), leading
        )
    is_bounded = window_size is not None and tuple(window_size) != (-1, -1)
    named = ["return_aux"] * asks_for_lse(return_aux) + ["window_size"] * is_bounded
    _refuse_of_dense([*named, *options_of(options, "explain")])
    call = SdpaCall(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return _explained(nested(call, leading) if query.is_nested else masked(call), leading)


def explain_spec(spec: AttentionSpec, leading: Preference | None) -> Explanation:
    """Explain a call without its tensors; `leading` is the choice for this call alone."""
    return _explained(described(spec), leading)


def _refuse_of_dense(packed_alone: Sequence[str]) -> None:
    """Refuse what only packed calls have."""
    if named := ", ".join(packed_alone):
        raise InvalidInputError(
            f"explain: got {named} without cu_seq_q, expected none: F.scaled_dot_product_attention has none "
            f"(of a dense call of {FLASH} give an AttentionSpec)"
        )


def _explained(described: CallSpec, leading: Preference | None) -> Explanation:
    now = state()
    shown = now.policy.applied_to(described.spec)
    spec = replace(shown, sinks=False) if described.returns_lse else shown
    directions = directions_of(spec)
    if described.elsewhere:
        return _never_seen(described, described.elsewhere, shown, directions, leading)
    torchs = None if spec.batch_invariant else described.native
    entries = entries_with_native(torchs, now.entries)
    policy = now.policy.with_first(leading)
    native = torchs.name if torchs is not None else ""
    decided = {}
    with_mask = spec.but(bias_gradient=True) if described.of_mask else spec
    for direction in directions:
        able = declined.with_reasons(entries, now.declined.get((direction, with_mask.of(direction)), {}))
        decision = decided[direction] = _decision(with_mask, direction, able, policy, native)
        if spec.dropout > 0.0 and decision.backend is not None:
            policy = policy.with_first(tied_to(decision.backend))
    # What of attnreg's runs as explained even while nothing asks for a backend.
    as_explained = described.front if described.front != SDPA else VARLEN if spec.varlen else ""
    is_asked = _serves(now, leading) or described.front != SDPA or spec.varlen
    details = tuple(_assumptions(spec, decided["forward"], entries))
    notes = (
        *_front_notes(as_explained, leading),
        *described.notes,
        *details,
        *(line for decision in decided.values() for line in option_lines(shown, decision, entries)),
        *_untried(decided.values(), entries),
        *_counted(decided.values()),
        *_of_times(spec, policy, directions),
        *_of_shapes(spec, decided, entries),
    )
    unasked = "" if is_asked else (described.native or Native("")).kernel
    both = decided["forward"], decided.get("backward")
    overruled = tuple(_overruled(spec, decided.values(), now.policy.with_first(leading)))
    return Explanation(shown, *both, notes, unasked, described.inputs, details, overruled)


def _overruled(spec: AttentionSpec, decisions: Iterable[Decision], policy: Policy) -> Iterator[str]:
    """Yield who asks most strongly for backends, where none of them runs a direction, and why not."""
    wanted = (
        preference
        for preference in policy.preferences
        if preference.names and preference.applies_to(spec.device)
    )
    first = next(wanted, None)
    if first is None:
        return
    names = list(map(str.casefold, first.names))
    reasons: dict[str, list[str]] = {}
    for decision in decisions:
        known = {name.casefold(): name for name in decision.order}
        asked = [known[name] for name in names if name in known]
        if decision.backend is not None and asked and decision.rejected.keys() >= set(asked):
            against: dict[str, list[str]] = {}
            for name in asked:
                against.setdefault(one_line(decision.rejected[name]), []).append(name)
            why = "; ".join(f"{', '.join(alike)}: {reason}" for reason, alike in against.items())
            reasons.setdefault(why, []).append(decision.direction)
    for why, directions in reasons.items():
        yield f"  {first.source} can't be obeyed in the {' and '.join(directions)}: {why}"


def _never_seen(
    described: CallSpec,
    elsewhere: Bypassed,
    shown: AttentionSpec,
    directions: tuple[Direction, ...],
    leading: Preference | None,
) -> Explanation:
    """Return the explanation of a call that torch's own selector keeps from attnreg."""
    refusal = why_refused(shown.device, elsewhere, leading)
    entries = state().entries
    decided = {direction: never_seen(elsewhere, direction, entries, refusal) for direction in directions}
    notes = (*_front_notes("", leading), *described.notes)
    both = decided["forward"], decided.get("backward")
    overruled = tuple(_overruled(shown, decided.values(), state().policy.with_first(leading)))
    return Explanation(shown, *both, notes, inputs=described.inputs, overruled=overruled)


def _of_times(spec: AttentionSpec, policy: Policy, directions: tuple[Direction, ...]) -> Iterator[str]:
    """Yield notes on the table in force, where it has no times, and how far the turns of such calls are."""
    if policy.tables is not None:
        yield from policy.tables.notes(spec.device)
        if policy.lock is None:
            yield from filter(None, (policy.tables.gap(spec, direction) for direction in directions))
    if policy.adaptive is not None:
        for direction in directions:
            yield from policy.adaptive.notes(spec, direction)


def _of_shapes(
    spec: AttentionSpec, decided: Mapping[Direction, Decision], entries: Mapping[str, Entry]
) -> Iterator[str]:
    """Yield a note on each direction that another backend runs once the program has brought many shapes."""
    for direction, decision in decided.items():
        if builds_by_times(decision, entries, spec):
            yield (
                f"{decision.backend} is set up for each new shape of such a {direction}: after {FEW_SHAPES} "
                "shapes what that takes counts in full, and another backend may run it"
            )


def _assumptions(spec: AttentionSpec, decision: Decision, entries: Mapping[str, Entry]) -> Iterator[str]:
    """Yield what the explanation assumes about another machine."""
    if spec.device.simulated:
        for entry in (entries[name.casefold()] for name in decision.order if name not in decision.rejected):
            if entry.unavailable():
                yield f"assumes that {entry.name} loads there ({entry.unavailable()})"


def _untried(decisions: Iterable[Decision], entries: Mapping[str, Entry]) -> Iterator[str]:
    """Yield which of the backends that would run the call are experimental."""
    for name in dict.fromkeys(decision.backend for decision in decisions if decision.backend):
        entry = entries.get(name.casefold())
        if entry is not None and entry.backend is not None and entry.backend.experimental:
            yield f"{name} is experimental: it {UNTRIED}"


def _counted(decisions: Iterable[Decision]) -> Iterator[str]:
    """Yield how the backends that would run the call have failed and declined others in this process."""
    chosen = {(decision.backend, decision.direction) for decision in decisions}
    stats = counters.stats()
    for failure in stats.failures:
        if (failure.backend, failure.direction) in chosen:
            yield f"{failure.backend} {failure}"
    for row in stats.fallbacks:
        direction = counters.declined_in(row)
        if (row.backend, direction) in chosen:
            times = f"{row.count} calls" if row.count > 1 else "a call"
            yield f"{row.backend} declined the {direction} of {times} in this process: {row.reason}"


def _decision(
    spec: AttentionSpec, direction: Direction, entries: Mapping[str, Entry], policy: Policy, native: str
) -> Decision:
    try:
        return decide(spec, direction, entries, policy, native)
    except (BackendUnavailableError, UnsupportedInputError) as error:
        decision = select(spec, direction, entries, policy, native)
        return replace(decision, backend=None, refusal=str(error))


def _serves(now: State, leading: Preference | None) -> bool:
    """Whether anything asks for a backend; calls that are only recorded or timed run as they did."""
    return leading is not None or (now.active and not now.policy.only_recording)


def _front_notes(front: str, leading: Preference | None) -> Iterator[str]:
    """Yield what holds where nothing asks for a backend; `front` is what runs as explained all the same."""
    if fault := current.left_out():  # else the answer reads as if nobody had asked
        yield f'settings are left out, as on_error = "native" asks: {one_line([fault])}'
    if not _serves(state(), leading):
        as_explained = f"{front} runs as explained, " if front else ""
        yield f"{NOBODY_ASKS}{as_explained}torch's functions run torch's own kernels"
    yield from captured.shadow_notes()


leave_module_uncompiled(__name__)
