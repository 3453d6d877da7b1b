"""The calls to measure: which ones `attnreg tune` measures by default, and the tensors of any call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, product, zip_longest
from typing import Any, TypeVar

import torch

from attnreg.core.contract.options import OPTIONS
from attnreg.core.contract.spec import AttentionSpec, Device
from attnreg.tools import measure
from attnreg.tools.measure import Case, Inputs, copies_beyond_the_cache
from attnreg.tools.measure.cases import FREE_NUMBERS, field_of

T = TypeVar("T")

CAUSAL, FULL = (-1, 0), (-1, -1)

# Queries over a cache of keys, and their mask: one token, a chunk of a prompt, and a few speculated tokens,
# for which programs use a mask of their own or none.
DECODES = ((1, FULL), (16, CAUSAL), (4, FULL))

# Between powers of two, and no multiples of a kernel's tile: without a mask, kernels take longer for those.
BETWEEN = (181, 362, 724, 1448, 2896, 5793, 11585, 23170)

# What `--grid quick` measures on a GPU, in its order, each size with three head dims: query heads for each
# key head, whether packed, the mask, (batch, max_q, max_k). FA4 compiles for seconds for each ratio of heads,
# so there are few. Like the lengths of most calls, the lengths here are no multiples of a kernel's tile.
# The first 13 sizes were simulated by the nearest of an H200's 904 points. On 247 random shapes they chose
# nearly as well as all points. Each further size mends a wrong prediction. Losses are times over the best
# backend's time.
# - 2 x 900: with few blocks FA4 takes a third less than larger calls predict (H100).
# - 4 queries over 300 keys: each backend takes 1.4 times the predicted time (H100).
# - 1 query with as many key heads as query heads: FA2 took three times what points with shared key heads
#   predict (H100). With this size the mean loss of 287 random forwards is 1.012 instead of 1.017.
# - More such blocks than the GPU runs at once: FA4 took 1.7 times cuDNN's time (H200). With these sizes the
#   mean loss of 155 random forwards is 1.011 instead of 1.019.
# - 4 queries over 6,000 shared keys, and over 300 keys with as many key heads: with both the mean loss of 48
#   random calls of 4 queries is 1.015 instead of 1.054, the worst 1.34 instead of 1.68 (H100).
# - Packed calls of few queries: no other points predict them (see `times.index`).
QUICK = (
    (4, False, CAUSAL, ((8, 1000, 1000),)),
    (4, False, FULL, ((8, 1000, 1000), (8, 1, 1024), (1, 1, 16384))),
    (4, True, CAUSAL, ((8, 1024, 1024),)),
    (4, True, FULL, ((8, 1024, 1024),)),
    (4, False, FULL, ((8, 1, 8192), (16, 4, 4096), (1, 4, 4096), (16, 4, 300), (4, 4, 6000))),
    (4, False, FULL, ((16, 250, 250), (4, 4000, 4000))),
    (4, False, CAUSAL, ((16, 256, 256), (2, 900, 900), (4, 4096, 4096))),
    (1, False, CAUSAL, ((8, 1000, 1000), (16, 256, 256), (2, 900, 900), (4, 4096, 4096))),
    (1, False, FULL, ((8, 1000, 1000), (16, 250, 250), (2, 900, 900), (4, 4000, 4000))),
    (1, False, FULL, ((6, 1, 1448), (20, 1, 2048), (4, 4, 2048), (16, 4, 300))),
    (1, True, CAUSAL, ((8, 1024, 1024),)),
    (4, True, FULL, ((8, 1, 1024), (32, 1, 4096), (16, 4, 4096))),
    (4, False, FULL, ((2, 900, 900),)),
    (4, True, CAUSAL, ((2, 900, 900),)),
    (4, True, FULL, ((2, 900, 900),)),
)
QUICK_DIMS, QUICK_HEADS = (128, 64, 96), 16

# Sequences of a packed batch differ in length: their tokens are this fraction of batch x longest.
FILL = 0.6


def _specs(
    device: Device,
    dim: int,
    heads: tuple[int, int],
    window: tuple[int, int],
    varlen: bool,
    shapes: Iterable[tuple[int, int, int]],
    dtype: str = "bfloat16",
) -> list[AttentionSpec]:
    """Return the calls of one kind, for the (batch, max_q, max_k) of each of its sizes.

    `heads` are the heads of query and key; `varlen` says whether the sequences are packed.
    """

    def tokens(batch: int, longest: int) -> int:
        ragged = varlen and batch > 1 and longest > 1
        return max(int(batch * longest * FILL), longest) if ragged else batch * longest

    return [
        AttentionSpec(
            device=device, dtype=dtype, batch=batch, max_q=max_q, max_k=max_k, heads_q=heads[0],
            heads_k=heads[1], head_dim=dim, head_dim_v=dim, tokens_q=tokens(batch, max_q),
            tokens_k=tokens(batch, max_k), varlen=varlen, window=window, needs_backward=max_q > 16,
        )
        for batch, max_q, max_k in shapes
    ]  # fmt: skip


def grid(name: str, device: Device) -> list[AttentionSpec]:
    """Return the calls of the grid `"quick"` or `"full"` for a device, the most valuable first.

    The grid has the kinds of calls that models make, at several sizes, from coarse to fine. A run that stops
    early has measured the most important kinds, each at a medium, the smallest and the largest size. It lacks
    only sizes in between.
    """
    full = name == "full"
    if device.type == "cuda" and not full:
        return list(_quick_gpu(device))
    kinds = list(_gpu(device) if device.type == "cuda" else _cpu(device, full))
    usual, rare = (
        list(coarse_to_fine([specs for is_usual, specs in kinds if is_usual is wanted]))
        for wanted in (True, False)
    )
    # Three sizes of each usual kind, then two calls of those for one of the others.
    head = 3 * sum(is_usual for is_usual, _ in kinds)
    rest = zip_longest(usual[head::2], usual[head + 1 :: 2], rare)
    specs = [*usual[:head], *(spec for turn in rest for spec in turn if spec is not None)]
    return list(dict.fromkeys(specs))


def coarse_to_fine(groups: Iterable[Sequence[T]]) -> Iterator[T]:
    """Yield the middle of each group, its ends, then the middles of the gaps, and so on; groups alternate."""
    for turn in zip_longest(*([group[i] for i in _halving(len(group))] for group in groups)):
        yield from (member for member in turn if member is not None)


def _halving(count: int) -> list[int]:
    """Return the numbers below `count`: the middle, both ends, then the middle of each remaining gap."""
    middle, last = count // 2, count - 1
    order = list(dict.fromkeys((middle, 0, last))) if count else []
    gaps = [(0, middle), (middle, last)]
    while gaps:
        low, high = gaps.pop(0)
        if high - low > 1:
            middle = (low + high) // 2
            order.append(middle)
            gaps += [(low, middle), (middle, high)]
    return order


def _quick_gpu(device: Device) -> Iterator[AttentionSpec]:
    for ratio, varlen, window, shapes in QUICK:
        for shape, dim in product(shapes, QUICK_DIMS):
            yield from _specs(device, dim, (QUICK_HEADS, QUICK_HEADS // ratio), window, varlen, (shape,))


def _gpu(device: Device) -> Iterator[tuple[bool, list[AttentionSpec]]]:
    """Yield the kinds of a GPU, the most usual first, and of each whether most models make it."""
    dims = ((128, 16), (64, 16), (96, 16), (256, 8), (192, 8), (32, 16))
    for (dim, heads), ratio in product(dims, (1, 4, 8)):
        usual, both = dim in (64, 128) and ratio < 8, (heads, heads // ratio)
        for varlen, window in product((False, True), (CAUSAL, FULL)):
            shapes = _squares(usual, uneven=window == FULL and not varlen)
            yield usual, _specs(device, dim, both, window, varlen, shapes)
        if dim in (64, 96, 128):
            for queries, window in DECODES:
                shapes = _decodes(usual, window == FULL, queries)
                yield True, _specs(device, dim, both, window, False, shapes)
            yield False, _specs(device, dim, both, FULL, True, _decodes(False, False, 1))


def _squares(fine: bool, uneven: bool) -> Iterator[tuple[int, int, int]]:
    """Yield self-attention of a few thousand tokens and more, by length."""
    if not fine:
        for batch, length in (
            ((16, 250), (8, 1000), (4, 4000)) if uneven else ((16, 256), (8, 1024), (4, 4096))
        ):
            yield batch, length, length
        yield 1, 16384, 16384
        return
    for length in (128, 256, 512, 1024, 2048, 4096, 8192, 16384):
        for batch in dict.fromkeys((1, max(4096 // length, 1), max(32768 // length, 1))):
            yield batch, length, length
    for length in BETWEEN[:-1] if uneven else ():
        yield max(16384 // length, 1), length, length


def _decodes(fine: bool, uneven: bool, queries: int) -> Iterator[tuple[int, int, int]]:
    """Yield short queries over long keys."""
    if not fine:
        yield from ((8, queries, 1024), (8, queries, 32768))
        return
    sizes = [*product((1024, 2048, 4096, 8192, 16384, 32768), (1, 16))]
    if uneven:
        # How many waves of blocks such a call takes (two, or two and a half) is half of its time.
        sizes += product(BETWEEN[3::2], (1, 6, 16, 24, 64))
    for keys, batch in sizes:
        yield batch, queries, keys


def _cpu(device: Device, full: bool) -> Iterator[tuple[bool, list[AttentionSpec]]]:
    """Yield the kinds of a CPU like those of a GPU, in sizes that take it milliseconds."""
    lengths = (32, 64, 128, 256, 512, 1024) if full else (64, 512)
    squares = tuple((2, length, length) for length in lengths)
    kinds = product(("float32", "bfloat16"), (64, 128) if full else (64,), (1, 4) if full else (1,))
    for dtype, dim, ratio in kinds:
        for varlen, window in product((False, True), (CAUSAL, FULL)):
            yield True, _specs(device, dim, (4, 4 // ratio), window, varlen, squares, dtype)
        yield True, _specs(device, dim, (4, 4 // ratio), FULL, False, ((2, 1, 1024),), dtype)


def unmeasurable(spec: AttentionSpec) -> str:
    """Return why a call can't be measured, or an empty string."""
    measured = case_of(spec).spec(spec.device)
    # Sinks that no kernel gets are left out: times with them are those of the call without them.
    options = [
        row.field
        for row in OPTIONS
        if not row.rescales and getattr(measured, row.field) != getattr(spec, row.field)
    ]
    if options:
        return f"{' and '.join(options)} can't be measured: the default order decides"
    tokens = spec.max_q, spec.max_k, spec.tokens_q, spec.tokens_k
    return (
        "" if all((*tokens, spec.heads_q, spec.head_dim, spec.head_dim_v)) else "there is nothing to compute"
    )


def copies(spec: AttentionSpec, device: torch.device) -> list[Inputs]:
    """Return the tensors of a call, so often that one round of them is twice the cache."""
    case = case_of(spec)
    return measure.copies(case, device, copies_beyond_the_cache(case, device))


def case_of(spec: AttentionSpec) -> Case:
    """Return the call as a `Case`, with lengths for its sequences."""
    (tokens_q, max_q), (tokens_k, max_k) = (spec.tokens_q, spec.max_q), (spec.tokens_k, spec.max_k)
    return Case(
        name=str(spec),
        lens_q=lengths(spec.batch, tokens_q, max_q) if spec.varlen else (max_q,) * spec.batch,
        lens_k=lengths(spec.batch, tokens_k, max_k) if spec.varlen else (max_k,) * spec.batch,
        varlen=spec.varlen,
        heads=(spec.heads_q, spec.heads_k),
        dims=(spec.head_dim, spec.head_dim_v),
        window=spec.window,
        dtype=spec.dtype,
        one_cu_seqlens=(tokens_q, max_q) == (tokens_k, max_k),
        deterministic=spec.deterministic,
        **_options_of(spec),
    )


def _options_of(spec: AttentionSpec) -> dict[str, Any]:
    """Return the fields of a `Case` for the options whose values don't have to be the program's.

    These are numbers, the gradient of the LSE and sinks. The tensors of other options can't be generated.
    """
    fields = {field_of(row): getattr(spec, row.field) for row in FREE_NUMBERS}
    return fields | {"grad_lse": spec.grad_lse, "counts_sinks": spec.gives_sinks}


def lengths(batch: int, tokens: int, longest: int) -> tuple[int, ...]:
    """Return lengths of sequences: the longest, then evenly rising lengths that sum to the other tokens.

    A program's `max_q` may be above its longest sequence; no sequence is longer than all tokens.
    """
    longest = min(longest, tokens)
    tokens = min(tokens, batch * longest)
    others, rest = batch - 1, tokens - longest
    if others <= 0 or not longest:
        return (longest,) * batch
    mean = rest / others
    reach = min(mean, longest - mean)
    ramp = [mean + reach * (2 * (i + 0.5) / others - 1) for i in range(others)]
    ends = [round(end) for end in accumulate(ramp)]
    shorter = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    return (longest, *(min(max(length, 0), longest) for length in shorter))


def small_cases(spec: AttentionSpec) -> tuple[Case, ...]:
    """Return small calls of the same kind, quick to compute in float64; the first that runs is enough."""
    return tuple(_at_most(spec, most) for most in (192, 384))


def _at_most(spec: AttentionSpec, most: int) -> Case:
    n_q, n_k = min(spec.max_q, most), min(spec.max_k, most)
    if spec.max_q < spec.max_k and n_q == n_k:
        n_q = max(n_q * 2 // 3, 1)
    ratio = spec.heads_q // spec.heads_k
    parts = (1, 2, 3) if spec.varlen else (1, 1)
    return Case(
        name=f"{spec.dtype} {n_q} x {n_k}",
        lens_q=tuple(-(-n_q // part) for part in parts),
        lens_k=tuple(-(-n_k // part) for part in parts),
        varlen=spec.varlen,
        heads=(2 * ratio, 2),
        dims=(spec.head_dim, spec.head_dim_v),
        window=tuple(min(bound, most // 2) for bound in spec.window),  # type: ignore[arg-type]
        dtype=spec.dtype,
        **_options_of(spec),
    )
