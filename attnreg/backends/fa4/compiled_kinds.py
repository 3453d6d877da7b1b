"""Kinds of calls: FA4 compiles each once, and this process remembers which it has run.

A kind is a family and a class of lengths. The family has everything that the package's compile keys read of a
call except lengths (`compile_key` in its interface.py), and what differs between attnreg's calls. Lengths
enter the keys in two ways only: whether they fit into a tile, and whether the batch has many sequences. Calls
of one kind never compile twice; two kinds may share compiled functions.

With `key_ranges` the package gets the whole batch as one sequence, so the tokens of the batch are its length.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from typing import NamedTuple

import torch
from torch import Tensor

from attnreg.core.contract.backend import Call
from attnreg.core.contract.spec import AttentionSpec
from attnreg.core.launching import visible
from attnreg.core.launching.programs import ANY, Bounds

# Above so many sequences a further kernel sums up their tiles.
MANY = 256

# On GPUs other than Hopper tile edges are multiples of TILE, up to LONGEST.
TILE, LONGEST = 16, 256

# Queries and keys of a tile with a softcap, for causal masks and windows with head dims above 96, to 128. It
# has one more group of warps than the package's tile, 128 by 128. That group computes while the others wait
# for a tanh. On an H100 five such forwards took 1.15 to 1.20 of the time without a softcap, in place of 1.22
# to 1.25 (that file isn't kept). The tile is slower with open masks and few queries.
SOFTCAP_TILE, FEWEST_QUERIES = (192, 80), 129

Repeated = tuple[tuple[bool, ...] | None, ...]
Class = tuple[int, int, int]


class Family(NamedTuple):
    """A kind without its lengths.

    Attributes:
        direction: "forward" or "backward".
        major, device: the device's major compute capability, and its index.
        dtype, dim, dim_v: the dtype, and the head dims of query and value.
        group: the number of query heads for each key head.
        page_size, softcap: None and 0 if the call has none.
        left, right: whether the window has a bound on that side. A causal mask has none.
        causal, packed, seqused, grad_lse: whether the call has the property or argument.
        deterministic: whether the call is a deterministic backward.
        sinks, repeated: the dtype of sinks, and the `repeated_dims` of tensors. A spec has neither.
        ranges: the number of ranges of a query in the compiled mask, and whether the query has a single head:
            the table of blocks depends on that. False for a call without `key_ranges`. A spec says only
            whether a call has them.
    """

    direction: str
    major: int
    device: int | None
    dtype: torch.dtype
    dim: int
    dim_v: int
    group: int
    page_size: int | None
    softcap: float
    left: bool
    right: bool
    causal: bool
    deterministic: bool
    packed: bool
    seqused: bool
    grad_lse: bool
    sinks: torch.dtype | bool | None
    repeated: Repeated = ()
    ranges: tuple[int, bool] | bool = False

    def __str__(self) -> str:
        mask = "causal" if self.causal else "windowed" if self.left or self.right else ""
        properties = {
            "packed": self.packed,
            mask: mask,
            f"softcap {self.softcap}": self.softcap,
            f"{self.group} query heads a key head": self.group > 1,
            **{name: getattr(self, name) for name in ("sinks", "seqused", "grad_lse", "deterministic")},
            "pages": self.page_size,
            "key_ranges": self.ranges,
        }
        dims = self.dim if self.dim == self.dim_v else (self.dim, self.dim_v)
        dtype = str(self.dtype).removeprefix("torch.")
        return ", ".join(
            (f"{dtype}, head dim {dims}", *(name for name, is_present in properties.items() if is_present))
        )

    def as_of_spec(self) -> Family:
        """Return the family without the fields that a spec doesn't have."""
        return self._replace(sinks=bool(self.sinks), repeated=(), ranges=bool(self.ranges))

    def class_of(self, batch: int, max_q: int, max_k: int) -> Class:
        """Return the class of these lengths: the package compiles the same for all lengths of a class."""
        of_batch, of_q, of_k = cuts(self)
        return bisect_left(of_batch, batch), bisect_left(of_q, max_q), bisect_left(of_k, max_k)


# The kinds that have run in this process: pairs of a family (also `as_of_spec`) and a class of lengths.
have_run: set[tuple[Family, Class]] = set()


def family_of(
    direction: str, query: Tensor, key: Tensor, value: Tensor, call: Call, *further: Tensor
) -> Family:
    """Return the family of a call; `further` are a backward's grad_out and out.

    Tensors are (B, S, H, D), or packed (T, H, D).
    """
    left, right = call.window
    return Family(
        direction, major_of(query.device), query.device.index, query.dtype, query.shape[-1],
        value.shape[-1], query.shape[-2] // key.shape[-2], None if call.block_table is None else key.shape[1],
        call.softcap, left >= 0, right >= 0 and (left, right) != (-1, 0), (left, right) == (-1, 0),
        direction == "backward" and call.repeatable, call.cu_seqlens_q is not None,
        call.seqused_k is not None, call.grad_lse is not None,
        None if call.sinks is None else call.sinks.dtype, repeated_dims(query, key, value, *further),
        False if call.key_ranges is None else (
            visible.rounded(call.key_ranges.shape[1]), query.shape[-2] == 1
        ),
    )  # fmt: skip


def family_of_spec(direction: str, spec: AttentionSpec) -> Family:
    """Return the family of the calls that a spec describes, as `Family.as_of_spec` does for a call."""
    left, right = spec.window
    return Family(
        direction, spec.device.capability[0] if spec.device.capability else 0, spec.device.index,
        getattr(torch, spec.dtype), spec.head_dim, spec.head_dim_v, spec.heads_q // spec.heads_k,
        spec.page_size, spec.softcap, left >= 0, right >= 0 and (left, right) != (-1, 0),
        (left, right) == (-1, 0), direction == "backward" and (spec.deterministic or spec.batch_invariant),
        spec.varlen, spec.seqused_k, spec.grad_lse, spec.sinks, ranges=spec.key_ranges,
    )  # fmt: skip


def lengths_of(query: Tensor, key: Tensor, call: Call) -> tuple[int, int, int]:
    """Return the batch and the longest query and key length, as the package gets them.

    Query and key are (B, S, H, D) or packed (T, H, D), in any dtype.
    """
    if call.key_ranges is not None:
        return 1, query.shape[0], key.shape[0]
    batch = query.shape[0] if call.cu_seqlens_q is None else call.cu_seqlens_q.shape[0] - 1
    return batch, call.max_q, call.max_k


def lengths_of_spec(spec: AttentionSpec) -> tuple[int, int, int]:
    """Return for the calls that a spec describes what `lengths_of` does for a call."""
    return (1, spec.tokens_q, spec.tokens_k) if spec.key_ranges else (spec.batch, spec.max_q, spec.max_k)


def repeated_dims(*tensors: Tensor) -> Repeated:
    """Return which dimensions of each tensor have stride 0, on which compiled functions depend.

    Tensors have any shape and dtype; the result has None for a tensor without such a dimension.
    """
    return tuple(
        tuple(step == 0 for step in strides) if 0 in strides else None
        for strides in (tensor.stride() for tensor in tensors)
    )


@functools.cache
def major_of(device: torch.device) -> int:
    """Return a device's major compute capability; 0 if it isn't a CUDA device."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


def tiles(family: Family, max_q: int) -> tuple[int, int]:
    """Return the queries and the keys of a tile on Hopper (`_tile_size_fwd_sm90`, `_tile_size_bwd_sm90`)."""
    dim, bounded = family.dim, family.causal or family.left or family.right
    local = bounded and not family.causal
    if family.direction == "forward":
        if has_softcap_tile(family, max_q):
            return SOFTCAP_TILE
        return 192 if dim <= 96 else 128, key_tile(dim, family.dim_v, bounded, local)
    if dim <= 64:
        return 128, 128
    if dim <= 128:
        return 64 if dim <= 96 or bounded else 80, 128
    return 64, 96 if dim <= 192 else 48


def has_softcap_tile(family: Family, max_q: int) -> bool:
    """Whether a forward uses `SOFTCAP_TILE`. Not with pages, which need the package's own `key_tile`."""
    bounded = family.causal or family.left or family.right
    own = family.softcap and bounded and family.page_size is None and 96 < family.dim <= 128
    return bool(own) and max_q >= FEWEST_QUERIES


def key_tile(dim: int, dim_v: int, bounded: bool, local: bool) -> int:
    """Return the number of keys that the forward on Hopper loads at once.

    `bounded` says whether the mask has a bound, `local` whether it is a window.
    """
    if 64 < dim <= 96:
        return 128 if bounded else 144
    if dim <= 128:
        return 128
    if dim <= 192:
        return 96 if local else 128 if dim_v <= 128 else 112
    return 64 if local else 80


@functools.lru_cache(maxsize=1024)
def cuts(family: Family) -> tuple[tuple[int, ...], ...]:
    """Return the last lengths of each class but the highest, for the batch, the queries and the keys."""
    if family.ranges:  # tiles that blocks of the table are multiples of
        rows = visible.BLOCK if family.dim <= 64 else visible.BLOCK // 2
        return (), *(((rows,), (visible.BLOCK,)) if family.direction == "backward" else ((), ()))
    batch = (MANY,) if family.packed else ()
    if family.major != 9:
        edges = range(TILE, LONGEST + 1, TILE)
        return batch, tuple(sorted({*edges, *(edge // family.group for edge in edges)})), tuple(edges)
    if family.direction == "backward":
        rows, columns = tiles(family, 1)
        return batch, (rows,), (columns,)
    # A forward's tile has rows of all query heads of a key head.
    ends = {tiles(family, length)[0] // family.group for length in (1, FEWEST_QUERIES)}
    return batch, tuple(sorted(ends | ({FEWEST_QUERIES - 1} if family.softcap else set()))), ()


def bounds_of(family: Family, of_lengths: Class) -> Bounds:
    """Return the least and the greatest of each length in a class; tokens may be any number."""
    bounds = []
    for edges, place in zip(cuts(family), of_lengths, strict=True):
        least = edges[place - 1] + 1 if place else ANY[0]
        bounds.append((least, edges[place] if place < len(edges) else ANY[1]))
    return *bounds, ANY, ANY
