"""Kinds and coordinates of calls, by which their times are comparable.

Within a kind, kernels have the same code paths, so times can be interpolated between sizes, and between kinds
that differ only in the ratio of heads. Other kinds' times are only used as `distance_between` allows.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import ceil, log2
from typing import NamedTuple

from attnreg.core.contract.options import OPTIONS
from attnreg.core.contract.spec import AttentionSpec, Direction

MASKS = ("none", "causal", "window")

# The options that results may be rescaled for, and the distances of options, by the fields of a spec.
RESCALED = frozenset(row.field for row in OPTIONS if row.rescales)
DISTANCES = {row.field: row.distance for row in OPTIONS if row.distance is not None}

# Both run on the same units at the same rate, so times of either dtype can replace the other's.
HALVES = ("bfloat16", "float16")

# Reading a number takes about as long as so many multiplications; calls with few queries are bound by
# reading.
READING = 100

# The distance of a factor of two in the ratio of heads; in a size the distance of a factor of two is 1. With
# each point of the H200's table predicted from the other points, 0.5 is best (0.25 and 1 are worse). A call
# with at most `SHORT` queries mostly reads keys, and kernels read a key head once or once for each of its
# query heads: `FARTHER` is then added to the distance.
RATIO, SHORT, FARTHER = 0.5, 16, 1.0

# Kernels process keys in tiles of this size. Without a mask they check bounds only for a partial last tile.
# With a partial tile cuDNN takes a quarter longer on an H200.
TILE, PARTIAL = 128, 1.0

# Kernels have other code paths for one query than for two.
SINGLE = 5.0

# A call's host time depends on the number of kernels that it launches, hardly on its size. With fewer blocks
# of queries than an H100 runs at once, and more than a tile of keys, FA2 splits the keys among blocks. A
# further kernel then adds up the parts. With a single query cuDNN splits them, too, from some number of keys
# on, if its blocks occupy less than half of the multiprocessors. If query heads share key heads, further
# kernels add up the gradients of the keys; FA4 has two of these.
MANY, FEW, ONE, LONG = "many queries", "few queries", "one query", "one query, many keys"
SHARED = ", shared key heads"
HOST_SHAPES = (MANY, MANY + SHARED, FEW, FEW + SHARED, ONE, LONG)
ROWS, AT_ONCE, TILE_NUMBERS, MANY_KEYS, HALF = 64, 200, 2**14, 512, 66

# The ways in which a kernel's time may grow with a call's sizes; a backend's points select the best fit. With
# few queries a block reads keys either for all query heads of a key head, or for a single query head. It
# reads all keys of a sequence, alone on a multiprocessor or beside others, or it reads a part of the keys, so
# that all multiprocessors work.
SPREADS = tuple(product(("key head", "query head"), ("one block at a time", "several", "parts of the keys")))

# With more queries a block has a tile of queries. Before its first key it takes as long as for so many keys.
# `STARTS`, `SPREADS`, `FARTHER` and `SINGLE` were chosen by two tables of two minutes, of an H100 and an
# H200. With them 511 and 155 forwards of random shapes take 1.006 of the best backend's time, without them
# 1.015 and 1.011. The worst is 1.25, without them 2.90.
STARTS = (30, 100, 200, 300)
GROWTHS = (*SPREADS, *STARTS)

# The multiprocessors of an H100 and of an H200.
PROCESSORS = 132


class Kind(NamedTuple):
    """The properties that calls have to share for their times to depend on sizes alone.

    Attributes:
        direction: `"forward"` or `"backward"`.
        dtype, head_dim, head_dim_v: as in the spec.
        ratio: query heads for each key head.
        mask: `"none"`, `"causal"` or `"window"`.
        varlen: whether sequences are packed.
        extras: names of further spec fields that change a kernel's code path.
    """

    direction: str
    dtype: str
    head_dim: int
    head_dim_v: int
    ratio: int
    mask: str
    varlen: bool
    extras: tuple[str, ...] = ()

    def __str__(self) -> str:
        dims = str(self.head_dim)
        if self.head_dim_v != self.head_dim:
            dims += f"/{self.head_dim_v}"
        heads = (f"{self.ratio}:1 heads",) if self.ratio else ()
        mask = "no mask" if self.mask == "none" else self.mask
        layout = "packed" if self.varlen else "dense"
        return ", ".join((self.dtype, f"head dim {dims}", *heads, mask, layout, *self.extras, self.direction))


class Size(NamedTuple):
    """The sizes of a call, in which calls of the same kind differ."""

    batch: int
    max_q: int
    max_k: int
    heads_q: int
    tokens_q: int
    tokens_k: int
    window: tuple[int, int] = (-1, -1)

    def __str__(self) -> str:
        return f"B {self.batch}, {self.max_q} x {self.max_k}, H {self.heads_q}"


def kind_of(spec: AttentionSpec, direction: Direction) -> Kind:
    """Return the kind of one direction of a call."""
    extras = {row.field for row in spec.options if direction in row.directions}
    if spec.deterministic and direction == "backward":  # forwards always are
        extras.add("deterministic")
    if not spec.gives_sinks:
        extras -= RESCALED
    return Kind(
        direction,
        spec.dtype,
        spec.head_dim,
        spec.head_dim_v,
        spec.heads_q // spec.heads_k,
        "window" if spec.windowed else "causal" if spec.causal else "none",
        spec.varlen,
        tuple(sorted(extras)),
    )


def size_of(spec: AttentionSpec) -> Size:
    """Return the size of a call."""
    return Size(spec.batch, spec.max_q, spec.max_k, spec.heads_q, spec.tokens_q, spec.tokens_k, spec.window)


def heads_k(kind: Kind, size: Size) -> int:
    """Return the number of key heads of a call."""
    return max(size.heads_q // max(kind.ratio, 1), 1)


def host_shapes_of(kind: Kind, size: Size) -> tuple[str, ...]:
    """Return a call's entry of `HOST_SHAPES`, then the nearest entries, for tables without the first.

    The bounds are those at which backends' kernels were observed to split keys. A call whose results may be
    rescaled has no entry: rescaling launches several kernels more, which `HOST_SHAPES` are without.
    """
    if RESCALED.intersection(kind.extras):
        return ()
    if size.max_q == 1 and not kind.varlen:
        return ONE if size.max_k <= MANY_KEYS or size.batch * heads_k(kind, size) > HALF else LONG, MANY
    blocks = size.batch * size.heads_q * -(-size.max_q // ROWS)
    many = kind.varlen or blocks > AT_ONCE or size.max_k * kind.head_dim <= TILE_NUMBERS
    like = MANY if many else FEW
    return (like + SHARED, like, MANY) if kind.ratio > 1 else (like, MANY)


def family_of(kind: Kind) -> Kind:
    """Return the kind with a ratio of 0: a family has all kinds that differ only in the ratio of heads."""
    return kind._replace(ratio=0)


def coordinates(kind: Kind, size: Size) -> tuple[float, ...]:
    """Return the coordinates of a call in its family, as logarithms to base 2.

    In order:
    - batch x heads;
    - the length of queries, and of keys;
    - the longest length over the mean;
    - the ratio of heads, twice: for all calls, and for few queries;
    - whether the last tile of keys is partial;
    - whether there is a single query.
    """
    ratio = log2(max(kind.ratio, 1))
    mean = size.tokens_q / size.batch if size.batch else 0.0
    partial = not kind.varlen and kind.mask == "none" and size.max_k > TILE and size.max_k % TILE
    return (
        log2(max(size.batch * size.heads_q, 1)),
        log2(max(size.max_q, 1)),
        log2(max(size.max_k, 1)),
        log2(max(size.max_q, 1) / max(mean, 1.0)),
        RATIO * ratio,
        FARTHER * ratio if size.max_q <= SHORT else 0.0,
        PARTIAL if partial else 0.0,
        SINGLE if size.max_q == 1 else 0.0,
    )


def works(kind: Kind, size: Size, processors: int = 1) -> tuple[float, ...]:
    """Return the work that a call's time grows with, for each of `GROWTHS`.

    `SPREADS` apply to few queries, `STARTS` to forwards with more queries if `processors` is above 1. The
    work of a growth that doesn't apply is `work`. `processors` is 1 if the number of multiprocessors has no
    effect: on a CPU, or for calls of nearly the same size.
    """
    usual = (work(kind, size),)
    if size.max_q <= SHORT:
        return (*_spread(kind, size, processors), *usual * len(STARTS))
    if kind.direction == "backward" or processors == 1:
        return usual * len(GROWTHS)
    scores, read = _in_tiles(kind, size, processors)
    return (*usual * len(SPREADS), *(scores + start * read for start in STARTS))


def _spread(kind: Kind, size: Size, processors: int) -> Iterator[float]:
    """Yield the work for few queries. Fewer blocks than multiprocessors take as long as a block for each."""
    one_each = kind._replace(ratio=1)
    for amount, heads in ((work(kind, size), heads_k(kind, size)), (work(one_each, size), size.heads_q)):
        share = max(size.batch * heads, 1) / processors
        yield from (amount * ceil(share) / share, amount * max(1.0, 1.0 / share), amount)


def _in_tiles(kind: Kind, size: Size, processors: int) -> tuple[float, float]:
    """Return the work of blocks that compute whole tiles, and the work to add for each key of a start.

    The second is proportional to the numbers read: queries, and keys once for each key head. Without a mask
    the blocks of equal sequences take equally long, and run in waves.
    """
    batch = max(size.batch, 1)
    # Single lengths of packed sequences aren't known: their last tiles count as half full.
    ragged = kind.varlen and size.tokens_q < batch * size.max_q
    queries, keys = (
        mean + TILE / 2 if ragged else ceil(mean / TILE) * TILE
        for mean in (max(tokens / batch, 1.0) for tokens in (size.tokens_q, size.tokens_k))
    )
    scores = size.heads_q * _pairs(kind.mask, size.window, queries, keys, TILE)
    if kind.mask == "none" and not ragged:
        share = batch * max(size.heads_q, 1) * queries / TILE / processors
        scores *= ceil(share) / share
    read = size.heads_q * queries + heads_k(kind, size) * size.tokens_k / batch
    each = batch * (kind.head_dim + kind.head_dim_v + 1)
    return each * scores, each * read


def work(kind: Kind, size: Size) -> float:
    """Return the approximate number of multiplications of a call; above 0."""
    batch = max(size.batch, 1)
    queries, keys = max(size.tokens_q / batch, 1.0), max(size.tokens_k / batch, 1.0)
    read = size.heads_q * queries + heads_k(kind, size) * keys
    scores = size.heads_q * _pairs(kind.mask, size.window, queries, keys)
    return batch * (kind.head_dim + kind.head_dim_v + 1) * (scores + READING * read)


def _pairs(mask: str, window: tuple[int, int], queries: float, keys: float, tile: int = 0) -> float:
    """Return how many pairs of a query and a key a sequence's mask allows, rounded up to whole tiles."""
    if mask == "none":
        return queries * keys
    if mask == "causal":
        rows = min(queries, keys)
        return rows * (max(keys - queries, 0.0) + (rows + tile) / 2)
    left, right = (keys if bound < 0 else float(bound) for bound in window)
    return queries * min(keys, left + right + 1 + tile)


def distance_between(wanted: Kind, other: Kind) -> float | None:
    """Return the distance of a family from the wanted family; None if its times can't replace those.

    Times of the other 16-bit dtype can replace them. So can times of a larger head dim, because kernels pad
    to it. Times with and without an option that has a distance (`Option.distance`) can replace each other,
    and are preferred. Times of another mask or layout, a smaller head dim, or other options can't.
    """
    if (wanted.direction, *wanted[5:7]) != (other.direction, *other[5:7]):
        return None
    if (different := {*wanted.extras} ^ {*other.extras}) - DISTANCES.keys():
        return None
    if wanted.dtype != other.dtype and not (wanted.dtype in HALVES and other.dtype in HALVES):
        return None
    if other.head_dim < wanted.head_dim or other.head_dim_v < wanted.head_dim_v or not wanted.head_dim_v:
        return None
    dims = other.head_dim * other.head_dim_v / max(wanted.head_dim * wanted.head_dim_v, 1)
    options = sum(DISTANCES[name] for name in different)
    return (wanted.dtype != other.dtype) * 0.5 + 2 * log2(dims) + options
