"""Which way a distributed call goes: what each of the three would take, by a model of time and memory.

It looks at the layout and at shapes alone, so all ranks come to the same choice, and so does
`explain_context_parallel` without a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

from attnreg.contract.spec import canonical_dtype
from attnreg.errors import InvalidInputError, did_you_mean
from attnreg.parallel.by_heads import unsupported
from attnreg.parallel.layout import Layout
from attnreg.parallel.steps import Needs
from attnreg.varlen.plans import window

__all__ = ["Choice", "Rates", "Way", "explain_context_parallel"]

ALL_TO_ALL, ALL_GATHER, RING = "all_to_all", "all_gather", "ring"
METHODS = (ALL_TO_ALL, ALL_GATHER, RING)


@dataclass(frozen=True)
class Rates:
    """What the model of time assumes of each rank.

    The defaults are assumptions for Hopper GPUs joined by NVLink. `benchmarks/context_parallel.py` measures
    those of a machine.

    Attributes:
        flops: of an attention kernel, per second.
        link: bytes that a rank receives per second while all do.
        memory: bytes that a rank reads or writes per second.
        latency: seconds that a collective takes at least.
        launch: seconds that a kernel takes at least.
    """

    flops: float = 450e12
    link: float = 200e9
    memory: float = 2e12
    latency: float = 40e-6
    launch: float = 30e-6


class Shape(NamedTuple):
    """What of a call its cost depends on, besides the layout and the window."""

    heads: int
    heads_k: int
    dim: int
    dim_v: int
    bytes_each: int
    needs_backward: bool

    @property
    def flops_of_pair(self) -> float:
        """Of the forward, and with the backward's five products where there is one."""
        return 2.0 * (self.dim + self.dim_v) * self.heads * (3.5 if self.needs_backward else 1.0)

    @property
    def row_k(self) -> int:
        """Bytes of a token's key and value."""
        return self.heads_k * (self.dim + self.dim_v) * self.bytes_each

    @property
    def row_out(self) -> int:
        """Bytes of a token's output."""
        return self.heads * self.dim_v * self.bytes_each


@dataclass(frozen=True)
class Way:
    """What a call would take one way.

    Attributes:
        name: "all_to_all", "all_gather" or "ring".
        seconds: an estimate, of the forward and, if there is one, the backward.
        received: bytes that each rank receives in the forward.
        memory: bytes that the most loaded rank needs besides its own inputs and results.
        refusal: why the call can't go that way; empty if it can.
    """

    name: str
    seconds: float
    received: tuple[int, ...]
    memory: int
    refusal: str = ""


@dataclass(frozen=True)
class Choice:
    """The three ways of a call, and the one that is taken.

    Attributes:
        method: the way that is taken.
        reason: why.
        ways: what each would take.
        pairs: for each rank how many pairs of query and key its own queries see.
        rows: for each rank how many tokens it has.
    """

    method: str
    reason: str
    ways: tuple[Way, ...]
    pairs: tuple[int, ...]
    rows: tuple[int, ...]

    @property
    def imbalance(self) -> float:
        """The work of the most loaded rank as a multiple of the mean; all_to_all always has 1."""
        return max(self.pairs) * len(self.pairs) / sum(self.pairs) if sum(self.pairs) else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Return the same as plain data, for JSON."""
        return {"imbalance": self.imbalance, **asdict(self)}

    def __str__(self) -> str:
        lines = [
            f"{self.method}: {self.reason}",
            "",
            f"{'way':<12}{'time':>10}{'received, most':>18}{'memory':>12}",
        ]
        for way in self.ways:
            most = max(way.received, default=0)
            numbers = f"{way.seconds * 1e3:>7.2f} ms{most / 2**20:>14.1f} MiB{way.memory / 2**20:>8.1f} MiB"
            lines.append(f"{way.name:<12}" + (f"  no: {way.refusal}" if way.refusal else numbers))
        lines += ["", f"{'rank':<6}{'tokens':>10}{'pairs':>16}{'of the mean':>14}"]
        mean = sum(self.pairs) / len(self.pairs)
        for rank, (rows, pairs) in enumerate(zip(self.rows, self.pairs, strict=True)):
            share = pairs / mean if mean else 1.0
            lines.append(f"{rank:<6}{rows:>10,}{pairs:>16,}{share:>13.2f}x")
        return "\n".join(lines)


def choose(needs: Needs, shape: Shape, method: str, rates: Rates, memory: int | None) -> Choice:
    """Return what each way would take, and the one that is taken.

    Raises `InvalidInputError` if there is no way of that name, or the one asked for can't be taken.
    """
    if method != "auto" and method not in METHODS:
        known = ["auto", *METHODS]
        hint = did_you_mean(str(method), known)
        raise InvalidInputError(f"method: got {method!r}, expected one of {known}{hint}")
    ranks = range(needs.layout.ranks)
    pairs = [[needs.pairs(rank, source) for source in ranks] for rank in ranks]
    received = [[_rows(needs, rank, source) * shape.row_k for source in ranks] for rank in ranks]
    seconds = shape.flops_of_pair / rates.flops
    compute = [[count * seconds for count in of_rank] for of_rank in pairs]
    ways = (
        _all_to_all(needs, shape, rates, sum(map(sum, compute))),
        _all_gather(needs, shape, rates, compute, received),
        _ring(needs, shape, rates, compute, received),
    )
    by_name = {way.name: way for way in ways}
    if method != "auto":
        if by_name[method].refusal:
            raise InvalidInputError(f"method: got {method!r}, but {by_name[method].refusal}")
        taken, reason = method, "asked for"
    else:
        taken, reason = _cheapest([way for way in ways if not way.refusal], memory)
    return Choice(taken, reason, ways, tuple(map(sum, pairs)), needs.layout.rows)


def _cheapest(ways: list[Way], memory: int | None) -> tuple[str, str]:
    fitting = [way for way in ways if memory is None or way.memory <= memory]
    if not fitting:
        least = min(ways, key=lambda way: way.memory)
        return least.name, "takes the least memory, and none has enough"
    best = min(fitting, key=lambda way: way.seconds)
    faster = [way.name for way in ways if way.seconds < best.seconds]
    return (
        best.name,
        f"the fastest for which there is memory (not {', '.join(faster)})" if faster else "the fastest",
    )


def _rows(needs: Needs, rank: int, source: int) -> int:
    return sum(end - begin for begin, end in needs.of(rank, source))


def _all_to_all(needs: Needs, shape: Shape, rates: Rates, compute: float) -> Way:
    """Every rank has the same work, whatever the layout; nothing overlaps."""
    layout, ranks = needs.layout, needs.layout.ranks
    repeated = max(ranks // shape.heads_k, 1)
    there = shape.heads * shape.dim * shape.bytes_each + repeated * shape.row_k
    row = there + shape.row_out  # of all heads: a rank has 1 / ranks of them
    received = tuple(
        (layout.tokens - rows) * there // ranks + rows * shape.row_out * (ranks - 1) // ranks
        for rows in layout.rows
    )
    times = 2 if shape.needs_backward else 1
    seconds = compute / ranks + times * (max(received) / rates.link + 2 * rates.latency + rates.launch)
    memory = 2 * layout.tokens * row // ranks
    refusal = unsupported(shape.heads, shape.heads_k, ranks)
    return Way(ALL_TO_ALL, seconds, received, memory, refusal)


def _all_gather(
    needs: Needs, shape: Shape, rates: Rates, compute: list[list[float]], received: list[list[int]]
) -> Way:
    """Queries whose keys are all here are computed while the keys of the others come."""
    layout = needs.layout
    times = 3 if shape.needs_backward else 1  # a backward receives keys once more, and sends gradients
    slowest, memory = 0.0, 0
    for rank, rows in enumerate(layout.rows):
        alone = 0.0 if sum(received[rank]) else sum(compute[rank])
        moving = times * (sum(received[rank]) / rates.link + rates.latency)
        slowest = max(slowest, max(moving, alone) + sum(compute[rank]) - alone)
        keys = rows * shape.row_k + sum(received[rank])
        memory = max(memory, keys * (2 + (4 // shape.bytes_each if shape.needs_backward else 0)))
    totals = tuple(map(sum, received))
    return Way(ALL_GATHER, slowest + 2 * times * rates.launch, totals, memory)


def _ring(
    needs: Needs, shape: Shape, rates: Rates, compute: list[list[float]], received: list[list[int]]
) -> Way:
    """Each step is as slow as its slowest rank, and the next one's keys come meanwhile."""
    layout, ranks = needs.layout, needs.layout.ranks
    times = 3 if shape.needs_backward else 1
    distances = [0, *(distance for distance in range(1, ranks) if needs.at(distance))]
    seconds, most = 0.0, 0
    for distance, following in zip(distances, [*distances[1:], None], strict=True):
        slowest = 0.0
        for rank in range(ranks):
            coming = 0 if following is None else received[rank][(rank - following) % ranks]
            most = max(most, coming)
            moving = times * (coming / rates.link + rates.latency * (following is not None))
            slowest = max(slowest, compute[rank][(rank - distance) % ranks], moving)
        # Merging reads and writes the output in float32.
        merging = 2 * 4 * max(layout.rows) * shape.heads * shape.dim_v / rates.memory
        seconds += slowest + times * rates.launch + (merging if len(distances) > 1 else 0.0)
    memory = most * (3 + (4 // shape.bytes_each if shape.needs_backward else 0))
    memory += 4 * max(layout.rows) * shape.heads * shape.dim_v if len(distances) > 1 else 0
    return Way(RING, seconds, tuple(map(sum, received)), memory)


def explain_context_parallel(
    layout: Layout,
    *,
    heads: int,
    heads_k: int | None = None,
    head_dim: int,
    head_dim_v: int | None = None,
    dtype: torch.dtype | str = "bfloat16",
    is_causal: bool = True,
    window_size: Sequence[int] | None = (-1, -1),
    needs_backward: bool = True,
    method: str = "auto",
    rates: Rates | None = None,
    memory: int | None = None,
) -> Choice:
    """Say which way a call would go, what each way would take, and how the work is spread over the ranks.

    Needs no GPU and no process group. Times are estimates by `rates`.
    """
    bytes_each = getattr(torch, canonical_dtype(dtype)).itemsize
    shape = Shape(heads, heads_k or heads, head_dim, head_dim_v or head_dim, bytes_each, needs_backward)
    needs = Needs(layout, *window(window_size, is_causal))
    return choose(needs, shape, method, rates or Rates(), memory)
