"""Kinds of calls, and a small call of each: what `warmup` runs so that backends compile and build.

A kind is all of a call but its lengths. For short sequences kernels may differ by length. So recorded calls
of a kind have a representative for each class of lengths: 1 query, up to 16, up to 256 (a tile or two), more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, replace
from typing import Any, NamedTuple

import torch

from attnreg.core.contract.spec import LENGTHS, AttentionSpec, Device, Direction, directions_of
from attnreg.core.launching.visible import rounded
from attnreg.core.times.traces import Recorded
from attnreg.errors import InvalidInputError, did_you_mean
from attnreg.tools import measure
from attnreg.tools.measure import Inputs
from attnreg.tools.tuning.workload import case_of

# The most tokens of a sequence that is run, and a shorter one for queries or keys that are fewer. Both are
# above `CLASSES`: FA4 compiles for lengths in tiles of up to 256.
LONG, SHORTER = 512, 384
CLASSES = (1, 16, 256)
# With more packed sequences than this FA4 compiles one more kernel. All but the longest have `REST` tokens.
MANY, REST = 256, 16
# Half of the shortest length above: no such window reaches all keys.
WIDEST = 128

# The lengths at which a kind without any is decided: tables choose by size.
USUAL_LENGTHS = (LONG, 2048, 16384)
# A decision takes up to a millisecond, and a recording may have 100,000 calls.
MOST_DECISIONS = 64

_FIELDS = {field.name: field.default for field in fields(AttentionSpec) if field.name != "device"}


class RepresentedKind(NamedTuple):
    """One kind of call.

    Attributes:
        spec: the call that is run for it.
        directions: which directions are run.
        calls: calls of the kind whose decisions say which backends it needs.
    """

    spec: AttentionSpec
    directions: tuple[Direction, ...]
    calls: tuple[AttentionSpec, ...]


def one_call(spec: AttentionSpec) -> RepresentedKind:
    """Return the kind of a call that is run with its own lengths."""
    return RepresentedKind(spec, directions_of(spec), (spec,))


def without_lengths(given_fields: Mapping[str, Any], device: Device) -> RepresentedKind:
    """Return the kind that fields of a spec describe; lengths that aren't among them are chosen.

    Raises:
        InvalidInputError: a field is unknown, missing or wrong.
    """
    known = [*_FIELDS, "device"]
    for name in given_fields:
        if name not in known:
            hint = did_you_mean(str(name), known)
            raise InvalidInputError(f"kind: got {name!r}, expected a field of AttentionSpec{hint}")
    heads, dim = given_fields.get("heads_q"), given_fields.get("head_dim")
    filled: dict[str, Any] = {"heads_k": heads, "head_dim_v": dim, "batch": 2}
    lengths = [length for name in ("max_q", "max_k") if isinstance(length := given_fields.get(name), int)]
    filled |= {"max_q": min([LONG, *lengths]), "max_k": max([LONG, *lengths])}
    filled |= {name: value for name, value in given_fields.items() if name != "device"}
    required = (name for name, default in _FIELDS.items() if default is MISSING)
    if missing := [name for name in required if filled.get(name) is None]:
        raise InvalidInputError(f"kind: got no {missing[0]}, expected it among the fields of a kind")
    try:
        spec = AttentionSpec(device=device, **filled)
    except TypeError as error:
        raise InvalidInputError(f"kind: {error}") from None
    if spec.max_q == 1 and spec.causal and not spec.batch_invariant:
        spec = replace(spec, window=(spec.window[0], -1))  # as of calls: one query sees all keys either way
    if "max_k" in given_fields:
        return one_call(spec)
    has_queries = "max_q" in given_fields
    calls = (
        replace(spec, max_q=spec.max_q if has_queries else n, max_k=n, tokens_q=-1, tokens_k=-1)
        for n in USUAL_LENGTHS
        if n >= spec.max_q
    )
    return RepresentedKind(_with_window(spec), directions_of(spec), tuple(calls) or (spec,))


def recorded_kinds(recorded: Iterable[Recorded], device: Device) -> list[RepresentedKind]:
    """Return the kinds of recorded calls as if they were made on this device, in their order.

    Each is run in the directions that were recorded.
    """
    groups: dict[object, list[Recorded]] = {}
    for call in recorded:
        spec = replace(call.spec, device=device, capturing=False)
        if not spec.empty and spec.heads_q and spec.head_dim and spec.head_dim_v:
            groups.setdefault(_alike(spec), []).append(call._replace(spec=spec))
    kinds = []
    for group in groups.values():
        directions: list[Direction] = ["forward"] if any(call.forward for call in group) else []
        directions += ["backward"] if any(call.backward for call in group) else []
        calls = [call.spec for call in group]
        some = calls[:: -(-len(calls) // MOST_DECISIONS)]
        kinds.append(RepresentedKind(small(max(calls, key=_size)), tuple(directions), tuple(some)))
    return kinds


def small(spec: AttentionSpec) -> AttentionSpec:
    """Return a call like this one with at most `LONG` tokens in a sequence."""
    max_q, max_k = min(spec.max_q, LONG), min(spec.max_k, LONG)
    if max_q == max_k and spec.max_q < spec.max_k:
        max_q = min(max_q, SHORTER)
    if max_q == max_k and spec.max_q > spec.max_k:
        max_k = min(max_k, SHORTER)
    batch = min(spec.batch, MANY + 1 if spec.varlen and spec.batch > MANY else 2)
    is_ragged = spec.varlen and spec.page_size is None
    tokens_q, tokens_k = (
        length + (batch - 1) * (min(length, REST) if is_ragged else length) for length in (max_q, max_k)
    )
    return _with_window(
        replace(spec, batch=batch, max_q=max_q, max_k=max_k, tokens_q=tokens_q, tokens_k=tokens_k)
    )


def tensors_of(spec: AttentionSpec, device: torch.device) -> Inputs:
    """Return tensors for a call with all of its options, and its arguments; their values are drawn."""
    case = case_of(spec)
    case = replace(
        case,
        scale=(spec.head_dim or 1) ** -0.5 if spec.positive_scale else 0.0,
        seqused_k=case.lens_k if spec.seqused_k else None,
        page_size=spec.page_size,
        one_cu_seqlens=case.one_cu_seqlens and spec.page_size is None,  # pages have no offsets of keys
        bias="additive" if spec.bias else "none",
        bias_gradient=spec.bias_gradient,
        alibi=spec.alibi,
        key_ranges=max(spec.ranges, int(spec.key_ranges)),
        dropout=spec.dropout,
        num_splits=spec.num_splits,
        batch_invariant=spec.batch_invariant,
    )
    return measure.inputs(case, device, drawn_on=device if device.type == "cuda" else "cpu")


def _with_window(spec: AttentionSpec) -> AttentionSpec:
    """Return the call with a window that doesn't reach all of its keys."""
    left, right = spec.window
    ends = min(left, WIDEST, max(spec.max_k // 2, 1)), min(right, WIDEST, max(spec.max_q // 2, 1))
    return replace(spec, window=ends)


def _alike(spec: AttentionSpec) -> tuple[object, ...]:
    """Return what calls with one representative have in common."""
    left, right = spec.window
    lengths = dict.fromkeys(LENGTHS, 1) | {"ranges": rounded(spec.ranges)}
    rest = spec.but(
        **lengths, needs_backward=False, window=(min(left, WIDEST), min(right, WIDEST)),
        dropout=float(spec.dropout > 0.0),
    )  # fmt: skip
    queries, keys = (sum(length > most for most in CLASSES) for length in (spec.max_q, spec.max_k))
    fewer_keys = (spec.max_q > spec.max_k) - (spec.max_q < spec.max_k)
    return rest, spec.varlen and spec.batch > MANY, queries, keys, fewer_keys


def _size(spec: AttentionSpec) -> tuple[int, ...]:
    return spec.max_q, spec.max_k, spec.batch
