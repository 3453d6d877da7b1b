"""The time and memory of a call by each method: a model that uses the layout and shapes alone."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from attnreg.errors import InvalidInputError
from attnreg.parallel.by_heads import group_count, unsupported
from attnreg.parallel.needs import Needs

ALL_TO_ALL, ALL_GATHER, RING = "all_to_all", "all_gather", "ring"
# all_gather cuts heads into groups where a rank would wait longer than this share of its work for all keys.
# For one document of 65,536 tokens on two H200s it is 0.048: four groups took 2 and 4 % longer than 1.
WORTH = 0.05
# A backward has five matrix products where a forward has two.
BACKWARD = 2.5


@dataclass(frozen=True)
class Rates:
    """What the model of time assumes of each rank.

    The defaults are for two H200s joined by NVLink. `flops`, `link` and `latency` are medium results of
    `benchmarks/context_parallel.py` (docs/results/context_parallel_h200.json has one run; the latency was 27
    to 52 us). `cut`, `memory` and `launch` account for the times of whole calls. On GPUs ranks measure
    `flops`, `link` and `latency` themselves.

    Attributes:
        flops: operations per second of an attention kernel.
        cut: the share of `flops` that remains for queries with keys of other ranks.
        link: bytes per second that a rank receives while all ranks receive.
        memory: bytes per second that a rank reads or writes.
        latency: seconds of the shortest exchange.
        launch: seconds that a further group of heads, or a step, adds: its kernels start, fill and drain.
    """

    flops: float = 630e12
    cut: float = 0.98
    link: float = 231e9
    memory: float = 2.5e12
    latency: float = 39e-6
    launch: float = 180e-6

    def __post_init__(self) -> None:
        for name, rate in vars(self).items():
            is_number = isinstance(rate, int | float) and math.isfinite(rate)
            may_be_none = name in ("latency", "launch")
            if not is_number or rate < 0 or (rate == 0 and not may_be_none) or (name == "cut" and rate > 1):
                most = ", at most 1" if name == "cut" else ""
                least = "of 0 or more" if may_be_none else "above 0"
                raise InvalidInputError(f"Rates: {name}: got {rate!r}, expected a number {least}{most}")

    def moving(self, size: float) -> float:
        """Return the seconds of an exchange of `size` bytes; 0 for no bytes."""
        return size / self.link + self.latency if size else 0.0

    def copying(self, size: float) -> float:
        """Return the seconds of a copy of `size` bytes."""
        return 2 * size / self.memory


class CallShape(NamedTuple):
    """The properties of a call that its cost depends on, besides the layout and the window."""

    heads: int
    heads_k: int
    dim: int
    dim_v: int
    bytes_each: int
    needs_backward: bool

    @property
    def flops_of_pair(self) -> float:
        """Operations of the forward for one pair of query and key."""
        return 2.0 * (self.dim + self.dim_v) * self.heads

    @property
    def row_q(self) -> int:
        """Bytes of a token's query."""
        return self.heads * self.dim * self.bytes_each

    @property
    def row_k(self) -> int:
        """Bytes of a token's key and value."""
        return self.heads_k * (self.dim + self.dim_v) * self.bytes_each

    @property
    def row_out(self) -> int:
        """Bytes of a token's output."""
        return self.heads * self.dim_v * self.bytes_each


@dataclass(frozen=True)
class Estimate:
    """The estimated cost of a call by one method.

    Attributes:
        name: "all_to_all", "all_gather" or "ring".
        seconds: of the forward and, if there is one, the backward.
        received, sent: bytes that each rank receives and sends in the forward.
        memory: the most bytes that any rank needs besides its own inputs and results.
        refusal: why the method can't run the call; empty if it can.
    """

    name: str
    seconds: float
    received: tuple[int, ...]
    sent: tuple[int, ...]
    memory: int
    refusal: str = ""


class _Call:
    """A call, with the bytes that ranks exchange and the seconds that they compute.

    Attributes:
        received, sent: bytes of keys and values, by rank.
        coming: by distance, the most bytes of keys and values that any rank receives from a rank so far back.
        computing: seconds of the forward by rank, where keys are sent to queries.
        alone: the part of `computing` for queries whose keys are all on the rank.
        slowest: by distance, the seconds of the slowest rank with the keys of a rank so far back.
        evenly: seconds of the forward with equal work on all ranks.
        factors: the seconds of the forward, and of the backward if there is one, as multiples of the
            forward's.
    """

    def __init__(self, needs: Needs, shape: CallShape, rates: Rates) -> None:
        self.needs, self.layout, self.shape, self.rates = needs, needs.layout, shape, rates
        seconds = shape.flops_of_pair / rates.flops
        self.received = [rows * shape.row_k for rows in needs.moved.sum(1).tolist()]
        self.sent = [rows * shape.row_k for rows in needs.moved.sum(0).tolist()]
        self.coming = [rows * shape.row_k for rows in _most(needs.moved)]
        self.alone = [needs.alone(rank) * seconds for rank in range(needs.layout.ranks)]
        pairs, own = needs.pairs.sum(1).tolist(), needs.pairs.diagonal().tolist()
        self.evenly = sum(pairs) * seconds / len(pairs)
        cut = seconds / rates.cut
        without = [alone - alone / rates.cut for alone in self.alone]
        self.computing = [count * cut + less for count, less in zip(pairs, without, strict=True)]
        self.slowest = [count * cut for count in _most(needs.pairs)]
        self.slowest[0] = max(count * cut + less for count, less in zip(own, without, strict=True))
        self.factors = (1.0, BACKWARD) if shape.needs_backward else (1.0,)
        self.most = max(self.layout.rows, default=0)


def _most(table: Tensor) -> list[int]:
    """Return the largest number of the table at each distance from a rank back to another."""
    ranks = torch.arange(len(table), device="cpu")
    most: list[int] = table.gather(1, (ranks[:, None] - ranks) % len(ranks)).amax(0).tolist()
    return most


def estimates(needs: Needs, shape: CallShape, rates: Rates) -> tuple[Estimate, ...]:
    """Return the estimate of a call by each method."""
    call = _Call(needs, shape, rates)
    return _all_to_all(call), _all_gather(call), _ring(call)


def _all_to_all(call: _Call) -> Estimate:
    """Estimate all_to_all: equal work; ranks wait for the first group's keys and the last group's output."""
    layout, shape, rates, ranks = call.layout, call.shape, call.rates, call.layout.ranks
    repeated = 1 if shape.heads_k % ranks == 0 else max(ranks // shape.heads_k, 1)
    sent_row, returned_row = shape.row_q + repeated * shape.row_k, shape.row_out
    received, sent = (
        tuple(
            (layout.tokens - rows) * of_others // ranks + rows * own * (ranks - 1) // ranks
            for rows in layout.rows
        )
        for of_others, own in ((sent_row, returned_row), (returned_row, sent_row))
    )
    heads, heads_k = max(shape.heads // ranks, 1), max(shape.heads_k * repeated // ranks, 1)
    groups = group_count(heads, heads_k, call.most * sent_row)
    moving = [call.most * row * (ranks - 1) / ranks for row in (sent_row, returned_row)]
    waiting = sum(rates.moving(size / groups) for size in moving)
    pieces = itertools.chain.from_iterable(layout.pieces)
    is_in_order = all(piece.end == after.begin for piece, after in itertools.pairwise(pieces))
    copying = rates.copying(call.most * (sent_row + returned_row)) * (1 if is_in_order else 2)
    seconds = 0.0
    for factor in call.factors:
        hidden = factor * call.evenly + (groups - 1) * rates.launch
        seconds += max(hidden, sum(map(rates.moving, moving)) - waiting) + waiting + copying
    refusal = unsupported(shape.heads, shape.heads_k, ranks)
    # A backward holds what the forward kept, and its gradients three times: as kernels return them, packed,
    # and in the ranks' order.
    held = 4 * sent_row + 2 * returned_row if shape.needs_backward else 3 * (sent_row + returned_row)
    return Estimate(ALL_TO_ALL, seconds, received, sent, call.most * held, refusal)


def gathered_groups(needs: Needs, shape: CallShape, rates: Rates) -> int:
    """Return into how many groups all_gather cuts heads; the same number on all ranks."""
    seconds, received = shape.flops_of_pair / rates.flops, needs.moved.sum(1).tolist()
    pairs = needs.pairs.sum(1).tolist()
    waits = [
        rates.moving(rows * shape.row_k) - needs.alone(rank) * seconds > WORTH * pairs[rank] * seconds
        for rank, rows in enumerate(received)
    ]
    return group_count(shape.heads, shape.heads_k, max(received) * shape.row_k) if any(waits) else 1


def _all_gather(call: _Call) -> Estimate:
    """Estimate all_gather: queries that see only own keys are computed while rows travel."""
    shape, rates = call.shape, call.rates
    slowest, memory = 0.0, 0
    groups = gathered_groups(call.needs, shape, rates)
    for rank, rows in enumerate(call.layout.rows):
        received, sent = call.received[rank], call.sent[rank]
        moving = rates.moving(max(received, sent) / groups)  # a group's
        together = call.computing[rank] - call.alone[rank]
        # Keys, queries and results of the second call are copied.
        copied = 2 * received + rows * (shape.row_q + shape.row_out) if moving else 0
        overhead = rates.copying(copied) + rates.launch * (groups if moving else 1)
        seconds = 0.0
        for x in call.factors:
            # The longer counts of two ways: computing all, or receiving all messages and computing the last
            # group.
            computed = max(x * call.alone[rank], moving) + x * together
            seconds += max(computed, groups * moving + x * together / groups) + overhead
        slowest = max(slowest, seconds)
        if moving:
            memory = max(memory, received + sent + _copied(call, rank))
    return Estimate(ALL_GATHER, slowest, tuple(call.received), tuple(call.sent), memory)


def _copied(call: _Call, rank: int) -> int:
    """Return the bytes that all_gather copies for queries with keys of other ranks, and their results."""
    shape, whole = call.shape, call.needs.whole(rank)
    spans = [span for span, is_here in whole if not is_here]
    here = [span for span, is_here in whole if is_here]
    if here and len(here) <= here[-1].piece - here[0].piece:  # other pieces are between them
        spans, here = [span for span, _ in whole], []
    keys = sum(span.key_count for span in spans) * shape.row_k
    queries = sum(span.end - span.begin for span in spans) * (shape.row_q + shape.row_out)
    if shape.needs_backward:
        # The backward holds the keys of the forward and the gradients of all copied rows. Then kernels return
        # the gradients of the remaining queries and their keys.
        own = sum(span.end - span.begin for span in here) * (shape.row_q + shape.row_k)
        return 2 * (keys + queries) + own
    return keys + queries + call.layout.rows[rank] * shape.row_out


def _ring(call: _Call) -> Estimate:
    """Estimate the ring: a step is as slow as its slowest rank, and receives the next keys meanwhile."""
    shape, rates = call.shape, call.rates
    distances = [0, *call.needs.distances]
    merged = call.most * shape.row_out
    wide = max(4 // shape.bytes_each, 1)
    seconds, most = 0.0, 0
    for factor in call.factors:
        for distance, following in itertools.zip_longest(distances, distances[1:]):
            coming = 0 if following is None else call.coming[following]
            # In a backward the gradients of the previous step are sent back meanwhile.
            seconds += max(
                factor * call.slowest[distance], (1 if factor == 1.0 else 2) * rates.moving(coming)
            )
            seconds += rates.launch
            # Merging reads and writes float32 several times.
            seconds += rates.copying(2 * wide * merged) if distance else 0.0
            most = max(most, coming)
        if factor != 1.0:
            seconds += rates.moving(call.coming[distances[-1]]) if len(distances) > 1 else 0.0
    memory = _of_ring(call, most, 3 * wide * merged) if len(distances) > 1 else 0
    return Estimate(RING, seconds, tuple(call.received), tuple(call.sent), memory)


def _of_ring(call: _Call, most: int, merging: int) -> int:
    """Return the bytes of a step: received keys, rows on their way, copies, and results being merged."""
    shape, keys = call.shape, int(call.needs.repeated.max())
    copied = keys * shape.row_k + call.most * (shape.row_q + shape.row_out)
    # Rows of the next step; in a backward of the previous step, too.
    others = 2 * most if len(call.needs.distances) > 1 else 0
    forward = most + others + copied + merging
    return max(forward, 3 * most + 2 * others + 2 * copied) if shape.needs_backward else forward
