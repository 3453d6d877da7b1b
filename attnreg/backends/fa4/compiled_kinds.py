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

from attnreg.backends.fa4.package import TESTED_RELEASES, installed
from attnreg.core.contract.backend import Call
from attnreg.core.contract.spec import AttentionSpec
from attnreg.core.launching import visible
from attnreg.core.launching.programs import ANY, Bounds
from attnreg.core.torchlib.layout import aligned

# Above so many sequences a further kernel sums up their tiles.
MANY = 256

# On GPUs other than Hopper tile edges are multiples of TILE, up to LONGEST.
TILE, LONGEST = 16, 256

# Queries and keys of a tile with a softcap, for causal masks and windows with head dims above 96, to 128. It
# has one more group of warps than the package's tile, 128 by 128. That group computes while the others wait
# for a tanh. On an H100 five such forwards took 1.15 to 1.20 of the time without a softcap, in place of 1.22
# to 1.25 (that file isn't kept). The tile is slower with open masks and few queries.
SOFTCAP_TILE, FEWEST_QUERIES = (192, 80), 129

# Head dims above 128 whose forward with pages is right. With 4.0.0b36 on an H200 outputs of (256, 80) differ
# from run to run, and so do outputs with tiles of 144 keys (`key_tile`). Head dims of 144 to 176 and 208 to
# 240 end in an illegal memory access.
PAGED = ((192, 128), (192, 192), (256, 128), (256, 256))

# Up to so many queries a sequence, packed keys are read as pages though all of them count. Then no values are
# copied, which took 0.5 to 1.1 of the forward's time. Pages take 1.01 to 1.10 of the time of tiles (H200).
FEW_QUERIES = 16

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
        as_pages: whether packed keys are read as pages; see `reads_as_pages`.
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
    as_pages: bool = False

    def __str__(self) -> str:
        mask = "causal" if self.causal else "windowed" if self.left or self.right else ""
        properties = {
            "packed": self.packed,
            mask: mask,
            f"softcap {self.softcap}": self.softcap,
            f"{self.group} query heads a key head": self.group > 1,
            **{name: getattr(self, name) for name in ("sinks", "seqused", "grad_lse", "deterministic")},
            "pages": self.page_size or self.as_pages,
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
        direction == "forward" and reads_as_pages(query, key, value, call),
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
        as_pages=direction == "forward" and spec_reads_as_pages(spec),
    )  # fmt: skip


def counts_keys(query: Tensor, key: Tensor, value: Tensor, call: Call) -> bool:
    """Whether the package is told how many keys each sequence has, so that it reads them as pages.

    Tensors are (B, S, H, D) or packed (T, H, D). With the same offsets for queries and keys no values would
    be copied before the call.
    """
    return (
        call.varlen
        and call.max_q <= FEW_QUERIES
        and (call.cu_seqlens_q is None or len(call.cu_seqlens_q) > 1)
        and call.seqused_k is None
        and call.sinks is None
        and not call.batch_invariant
        and call.cu_seqlens_q is not call.cu_seqlens_k
        and reads_as_pages(query, key, value, call._replace(seqused_k=call.cu_seqlens_k))
    )


def may_count_keys(spec: AttentionSpec) -> bool:
    """Whether `counts_keys` may hold for calls that a spec describes, if there are few queries."""
    return (
        spec.varlen
        and not (spec.seqused_k or spec.sinks or spec.batch_invariant or spec.page_size is not None)
        and spec_reads_as_pages(spec.but(seqused_k=True))
    )


def reads_as_pages(query: Tensor, key: Tensor, value: Tensor, call: Call) -> bool:
    """Whether a forward that is told how many packed keys count reads them as pages.

    Tensors are (B, S, H, D) or packed (T, H, D). The package loads pages row by row, and no row that doesn't
    count. Otherwise it loads whole tiles, for which values have to be copied, because unused values may be
    NaN. Pages overlap: page p begins at row p, and any sequence fits into it, so offsets are the table.
    """
    is_counted = call.seqused_k is not None and call.cu_seqlens_k is not None and call.key_ranges is None
    return (
        is_counted
        and major_of(query.device) == 9
        and installed() in TESTED_RELEASES
        and all(aligned(x, repeats=False) for x in (key, value))
        and _may_read_as_pages(query.shape[-1], value.shape[-1], call.window)
    )


def spec_reads_as_pages(spec: AttentionSpec) -> bool:
    """Whether calls that a spec describes read keys as pages, if their tensors are aligned."""
    is_counted = spec.seqused_k and spec.varlen and spec.page_size is None and not spec.key_ranges
    return (
        is_counted
        and (spec.device.capability or (0,))[0] == 9
        and (spec.device.simulated or installed() in TESTED_RELEASES)
        and _may_read_as_pages(spec.head_dim, spec.head_dim_v, spec.window)
    )


def _may_read_as_pages(dim: int, dim_v: int, window: tuple[int, int]) -> bool:
    return not why_no_pages(9, (dim, dim_v), key_tile_of(dim, dim_v, window))


def why_no_pages(major: int, dims: tuple[int, int], tile: int) -> str:
    """Return why the package can't read pages with these head dims; else an empty string."""
    if dims[0] % 16 or dims[1] % 16:
        return f"head dims must be multiples of 16 with pages, got {dims}"
    if major == 9 and dims[0] > 128 and dims not in PAGED:
        return f"head dims above 128 must be one of {', '.join(map(str, PAGED))} with pages, got {dims}"
    if tile == 144:
        return f"head_dim must not be 65 to 96 with pages and an open mask, got {dims[0]}"
    return ""


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
    has_pages = family.page_size is not None or family.as_pages
    own = family.softcap and bounded and not has_pages and 96 < family.dim <= 128
    return bool(own) and max_q >= FEWEST_QUERIES


def key_tile_of(dim: int, dim_v: int, window: tuple[int, int]) -> int:
    """Return the `key_tile` of a call with this window, (left, right) as in `Call`."""
    return key_tile(dim, dim_v, window != (-1, -1), window not in ((-1, -1), (-1, 0)))


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
