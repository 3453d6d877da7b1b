"""Attention over packed sequences, in few calls of the kernel.

Sequences of one length make a dense batch. Sequences of near lengths are padded to the longest of
them, where that computes less than a call of its own costs: padding repeats the last row of its
own sequence, so that it is finite where the sequence is, and counts nowhere.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from math import inf
from typing import TYPE_CHECKING, NamedTuple

import torch

from attnreg.backends import _cpu_dense as dense
from attnreg.backends._cpu_mask import Mask
from attnreg.backends._cpu_tiles import CAUSAL, OPEN, visible

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from attnreg.backend import Call
    from attnreg.backends._cpu_flash import Flash

__all__ = ["backward", "forward"]

# What a further group costs, in scores (query rows x keys x heads) that one core computes meanwhile.
_GROUP_SCORES = 20_000


class Span(NamedTuple):
    """A run of packed rows: where it starts and how long it is."""

    start: int
    size: int


class Sequence(NamedTuple):
    """The rows and keys of one sequence that see or are seen, and the mask between them."""

    rows: Span
    keys: Span
    window: tuple[int, int]


class Side(NamedTuple):
    """The rows or the keys of a group: `count` runs of `size`, padding included."""

    count: int
    size: int
    start: int
    index: Tensor | None
    valid: Tensor | None

    def take(self, x: Tensor) -> Tensor:
        """Return the group's part of a packed tensor as (count, size, ...)."""
        if self.index is None:
            packed = x[self.start : self.start + self.count * self.size]
        else:
            packed = x.index_select(0, self.index)
        return packed.unflatten(0, (self.count, self.size))

    def add(self, total: Tensor, batch: Tensor) -> None:
        """Add a batch to the rows that `take` took; that of padding has to be 0."""
        flat = batch.flatten(0, 1)
        if self.index is None:
            total[self.start : self.start + self.count * self.size].add_(flat)
        else:
            total.index_add_(0, self.index, flat)


class Group(NamedTuple):
    """Sequences that one dense call serves."""

    rows: Side
    keys: Side
    window: tuple[int, int]
    mask: Mask


class Plan(NamedTuple):
    """The groups of a batch, and for each packed row its place among their outputs.

    A row in no group has the place after the last one; `places` is None where each row of a single
    group stays where it is.
    """

    groups: tuple[Group, ...]
    places: Tensor | None


def forward(flash: Flash, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Return the output (T, H, D) and the LSE (H, T)."""
    plan = _plan_of(q, call)
    outs, lses = [], []
    for group in plan.groups:
        query, key, value = group.rows.take(q), group.keys.take(k), group.keys.take(v)
        out, lse = dense.forward(flash, query, key, value, call.scale, group.window, group.mask)
        outs.append(out.flatten(0, 1))
        lses.append(lse.flatten(0, 1))
    if plan.places is None:
        return outs[0], lses[0].t().contiguous()
    none = (1, q.size(1))
    outs.append(q.new_zeros(*none, v.size(2)))
    lses.append(q.new_full(none, -inf, dtype=torch.promote_types(q.dtype, torch.float32)))
    out, lse = (torch.cat(x).index_select(0, plan.places) for x in (outs, lses))
    return out, lse.t().contiguous()


def backward(
    flash: Flash, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value."""
    plan, lse_rows = _plan_of(q, call), lse.t().contiguous()
    grad_q, grad_k, grad_v = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    for group in plan.groups:
        rows, keys = group.rows, group.keys
        row_lse = rows.take(lse_rows)
        if rows.valid is not None:
            row_lse = row_lse.masked_fill(~rows.valid[..., None], inf)
        grads = dense.backward(
            flash,
            rows.take(grad_out),
            rows.take(q),
            keys.take(k),
            keys.take(v),
            rows.take(out),
            row_lse,
            call.scale,
            group.window,
            group.mask,
        )
        rows.add(grad_q, grads[0])
        keys.add(grad_k, grads[1])
        keys.add(grad_v, grads[2])
    return grad_q, grad_k, grad_v


def _plan_of(q: Tensor, call: Call) -> Plan:
    assert call.cu_seqlens_q is not None and call.cu_seqlens_k is not None
    used = None if call.seqused_k is None else tuple(call.seqused_k.tolist())
    weight = torch.get_num_threads() / max(1, q.size(1))
    return _plan(
        tuple(call.cu_seqlens_q.tolist()),
        tuple(call.cu_seqlens_k.tolist()),
        used,
        q.size(0),
        call.window,
        weight,
    )


@functools.lru_cache(maxsize=64)
def _plan(
    offsets_q: tuple[int, ...],
    offsets_k: tuple[int, ...],
    used: tuple[int, ...] | None,
    total: int,
    window: tuple[int, int],
    weight: float,
) -> Plan:
    lengths = used or tuple(b - a for a, b in zip(offsets_k, offsets_k[1:]))
    kinds: dict[object, list[Sequence]] = defaultdict(list)
    for q0, q1, k0, length in zip(offsets_q, offsets_q[1:], offsets_k, lengths):
        seen = visible(q1 - q0, length, window)
        if seen is not None:
            rows = Span(q0 + seen.row, q1 - q0 - seen.row)
            keys = Span(k0 + seen.key, length - seen.key)
            sequence = Sequence(rows, keys, seen.window)
            kinds[_kind(sequence)].append(sequence)
    limit = _GROUP_SCORES * weight
    members = [g for kind in kinds.values() for g in _near(kind, limit)]
    members.sort(key=lambda g: g[0].rows.start)
    groups = tuple(_group(g) for g in members)
    return Plan(groups, _places(groups, total))


def _kind(sequence: Sequence) -> object:
    rows, keys, window = sequence
    if window == OPEN or (window == CAUSAL and rows.size == keys.size):
        return window
    return (window, rows.size, keys.size)


def _near(sequences: list[Sequence], limit: float) -> Iterable[list[Sequence]]:
    ordered = sorted(sequences, key=lambda s: (s.keys.size, s.rows.size), reverse=True)
    group: list[Sequence] = []
    waste = 0.0
    for s in ordered:
        if group:
            rows = max(group[0].rows.size, s.rows.size)
            waste += rows * group[0].keys.size - s.rows.size * s.keys.size
            if waste > limit:
                yield sorted(group)
                group, waste = [], 0.0
        group.append(s)
    yield sorted(group)


def _group(sequences: list[Sequence]) -> Group:
    rows, keys = _side([s.rows for s in sequences]), _side([s.keys for s in sequences])
    window = sequences[0].window
    # Under a causal mask no real row sees the padding behind it.
    return Group(rows, keys, window, Mask(real=keys.valid if window == OPEN else None))


def _side(spans: list[Span]) -> Side:
    size = max(span.size for span in spans)
    if all(span.size == size for span in spans) and all(
        a.start + size == b.start for a, b in zip(spans, spans[1:])
    ):
        return Side(len(spans), size, spans[0].start, None, None)
    starts = torch.tensor([s.start for s in spans], device="cpu")[:, None]
    sizes = torch.tensor([s.size for s in spans], device="cpu")[:, None]
    steps = torch.arange(size, device="cpu")
    index = (starts + steps.minimum(sizes - 1)).flatten()
    valid = steps < sizes
    return Side(len(spans), size, 0, index, None if bool(valid.all()) else valid)


def _places(groups: tuple[Group, ...], total: int) -> Tensor | None:
    end = sum(g.rows.count * g.rows.size for g in groups)
    if len(groups) == 1 and groups[0].rows.index is None and end == total:
        return None
    places = torch.full((total,), end, device="cpu")
    done = 0
    for group in groups:
        rows = group.rows
        n = rows.count * rows.size
        here = torch.arange(done, done + n, device="cpu")
        if rows.index is None:
            places[rows.start : rows.start + n] = here
        elif rows.valid is None:
            places[rows.index] = here
        else:
            flat = rows.valid.flatten()
            places[rows.index[flat]] = here[flat]
        done += n
    return places
