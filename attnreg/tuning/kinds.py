"""What makes two calls comparable: their kind, and where they lie within it.

Within a kind kernels take the same paths, so times may be interpolated between its sizes, and between
kinds that differ in nothing but the ratio of heads. Between others they may not, but for the few steps
that `distance_between` allows.
"""

from __future__ import annotations

from math import log2
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from attnreg.contract.spec import AttentionSpec, Direction

__all__ = ["Kind", "Size", "coordinates", "distance_between", "family_of", "kind_of", "size_of", "work"]

MASKS = ("none", "causal", "window")

# Run by the same units at the same rate, so that one stands in for the other.
HALVES = ("bfloat16", "float16")

# Reading a number costs about as much as so many multiplications: short queries are bound by that.
READING = 100

# How far a factor of two in the ratio of heads is, in those of a size: leaving each point of the H200's
# table out and predicting it from the others is best there (0.25 and 1 are worse). Few queries do little but
# read the keys, and whether a kernel reads those of several heads once is what counts: it is farther then.
RATIO, SHORT, FARTHER = 0.5, 16, 2.0

# Kernels take so many keys at a time. Without a mask they look at which of the last ones exist only where
# that isn't all of them, which takes cuDNN a quarter longer on an H200.
TILE, PARTIAL = 128, 1.0

# For one query kernels take other paths than for two.
SINGLE = 2.0


class Kind(NamedTuple):
    """What calls have in common whose times depend on their sizes alone.

    Attributes:
        direction: `"forward"` or `"backward"`.
        dtype, head_dim, head_dim_v: as in the spec.
        ratio: query heads for each key head.
        mask: `"none"`, `"causal"` or `"window"`.
        varlen: whether sequences are packed.
        extras: what else takes kernels to other paths, by the names of the spec's fields.
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
        dims = (
            str(self.head_dim) if self.head_dim == self.head_dim_v else f"{self.head_dim}/{self.head_dim_v}"
        )
        mask = {"none": "no mask"}.get(self.mask, self.mask)
        layout = "varlen" if self.varlen else "dense"
        heads = (f"{self.ratio}:1 heads",) if self.ratio else ()
        parts = (self.dtype, f"head dim {dims}", *heads, mask, layout, *self.extras)
        return ", ".join((*parts, self.direction))


class Size(NamedTuple):
    """The numbers in which calls of a kind differ."""

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
    if spec.dropout or spec.bias or spec.alibi or spec.seqused_k or spec.deterministic:
        extras = _extras(spec, direction)
    else:
        extras = _paging(spec)
    return Kind(
        direction,
        spec.dtype,
        spec.head_dim,
        spec.head_dim_v,
        spec.heads_q // spec.heads_k,
        "window" if spec.windowed else "causal" if spec.causal else "none",
        spec.varlen,
        extras,
    )


def size_of(spec: AttentionSpec) -> Size:
    """Return the size of a call."""
    return Size(spec.batch, spec.max_q, spec.max_k, spec.heads_q, spec.tokens_q, spec.tokens_k, spec.window)


def _extras(spec: AttentionSpec, direction: Direction) -> tuple[str, ...]:
    asked = {
        "alibi": spec.alibi,
        "bias": spec.bias,
        # A forward is repeatable as it is.
        "deterministic": spec.deterministic and direction == "backward",
        "dropout": spec.dropout > 0.0,
        "seqused_k": spec.seqused_k,
    }
    return tuple(sorted((*(name for name, on in asked.items() if on), *_paging(spec))))


def _paging(spec: AttentionSpec) -> tuple[str, ...]:
    if spec.page_size is None and spec.num_splits is None:
        return ()
    asked = {"num_splits": spec.num_splits is not None, "page_size": spec.page_size is not None}
    return tuple(name for name, on in asked.items() if on)


def family_of(kind: Kind) -> Kind:
    """Return what a kind has in common with those that differ in the ratio of heads alone: that is 0."""
    return kind._replace(ratio=0)


def coordinates(kind: Kind, size: Size) -> tuple[float, ...]:
    """Return where a call lies among its family: powers of two.

    They are of batch x heads, both lengths, how ragged the sequences are, and the ratio of heads; and
    whether the last keys of each sequence are less than a kernel takes at a time, and the queries one.
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


def work(kind: Kind, size: Size) -> float:
    """Return how much there is to do, in multiplications, about; above 0."""
    batch = max(size.batch, 1)
    queries, keys = max(size.tokens_q / batch, 1.0), max(size.tokens_k / batch, 1.0)
    read = size.heads_q * queries + max(size.heads_q / kind.ratio, 1.0) * keys
    scores = size.heads_q * _pairs(kind.mask, size.window, queries, keys)
    return batch * (kind.head_dim + kind.head_dim_v + 1) * (scores + READING * read)


def _pairs(mask: str, window: tuple[int, int], queries: float, keys: float) -> float:
    """Return how many pairs of a query and a key of one sequence count."""
    if mask == "none":
        return queries * keys
    if mask == "causal":
        seen = min(queries, keys)
        return queries * keys - queries * queries / 2 if keys >= queries else seen * seen / 2
    left, right = (keys if bound < 0 else float(bound) for bound in window)
    return queries * min(keys, left + right + 1)


def distance_between(wanted: Kind, other: Kind) -> float | None:
    """Return how far a family is from the one wanted; None where it says nothing about that.

    The other half precision does, and a larger head dim, to which kernels pad. Another mask or layout,
    a smaller head dim and further options don't.
    """
    if wanted.direction != other.direction or wanted[5:] != other[5:]:
        return None
    if wanted.dtype != other.dtype and not (wanted.dtype in HALVES and other.dtype in HALVES):
        return None
    if other.head_dim < wanted.head_dim or other.head_dim_v < wanted.head_dim_v or not wanted.head_dim_v:
        return None
    dims = other.head_dim * other.head_dim_v / max(wanted.head_dim * wanted.head_dim_v, 1)
    return (wanted.dtype != other.dtype) * 0.5 + 2 * log2(dims)
