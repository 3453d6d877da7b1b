"""The calls that `attnreg tune` measures by default: the kinds of calls that models make, at several sizes.

The order is from coarse to fine: a run that stops early has the most important kinds, each at a medium size,
its smallest and its largest, and lacks only sizes in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product, zip_longest
from typing import TYPE_CHECKING, TypeVar

from attnreg.contract.spec import AttentionSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from attnreg.contract.spec import Device

T = TypeVar("T")

CAUSAL, FULL = (-1, 0), (-1, -1)

# Queries over a cache of keys, and their mask: one token, a chunk of a prompt, and a few speculated tokens,
# for which programs use a mask of their own or none.
DECODES = ((1, FULL), (16, CAUSAL), (4, FULL))

# Between powers of two, and no multiples of a kernel's tile: without a mask, kernels take longer for those.
BETWEEN = (181, 362, 724, 1448, 2896, 5793, 11585, 23170)

# Sequences of a packed batch differ in length: their tokens are this fraction of batch x longest.
FILL = 0.6


@dataclass(frozen=True, slots=True)
class Plan:
    """The sizes of one kind of call.

    Attributes:
        dim: head dim.
        heads: (query, key).
        window: the mask.
        varlen: whether the sequences are packed.
        shapes: (batch, max_q, max_k) of each size.
        dtype: its name.
        usual: whether most models make such calls.
    """

    dim: int
    heads: tuple[int, int]
    window: tuple[int, int]
    varlen: bool
    shapes: tuple[tuple[int, int, int], ...]
    dtype: str = "bfloat16"
    usual: bool = True

    def specs(self, device: Device) -> list[AttentionSpec]:
        """Return the calls."""
        return [self._spec(device, *shape) for shape in self.shapes]

    def _spec(self, device: Device, batch: int, max_q: int, max_k: int) -> AttentionSpec:
        def tokens(longest: int) -> int:
            ragged = self.varlen and batch > 1 and longest > 1
            return max(int(batch * longest * FILL), longest) if ragged else batch * longest

        return AttentionSpec(
            device=device, dtype=self.dtype, batch=batch, max_q=max_q, max_k=max_k,
            heads_q=self.heads[0], heads_k=self.heads[1], head_dim=self.dim, head_dim_v=self.dim,
            tokens_q=tokens(max_q), tokens_k=tokens(max_k), varlen=self.varlen, window=self.window,
            needs_backward=max_q > 16,
        )  # fmt: skip


def grid(name: str, device: Device) -> list[AttentionSpec]:
    """Return the calls of the grid `"quick"` or `"full"` for a device, the most valuable first."""
    full = name == "full"
    plans = list(_gpu(full) if device.type == "cuda" else _cpu(full))
    usual, rare = (
        list(coarse_to_fine([plan.specs(device) for plan in plans if plan.usual is wanted]))
        for wanted in (True, False)
    )
    # Three sizes of each usual kind, then two calls of those for one of the others.
    head = 3 * sum(plan.usual for plan in plans)
    rest = zip_longest(usual[head::2], usual[head + 1 :: 2], rare)
    found = [*usual[:head], *(spec for turn in rest for spec in turn if spec is not None)]
    return list(dict.fromkeys(found))


def coarse_to_fine(groups: Iterable[Sequence[T]]) -> Iterator[T]:
    """Yield the middle of each group, its ends, then the middles of the gaps, and so on; groups alternate."""
    for turn in zip_longest(*([group[i] for i in _halving(len(group))] for group in groups)):
        yield from (one for one in turn if one is not None)


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


def _gpu(full: bool) -> Iterator[Plan]:
    """Yield the kinds of a GPU, the most usual first."""
    dims = ((128, 16), (64, 16), *(((96, 16), (256, 8), (192, 8), (32, 16)) if full else ()))
    ratios = (1, 4, 8) if full else (1, 4)
    for (dim, heads), ratio in product(dims, ratios):
        if not full and (dim, ratio) == (64, 4):
            continue
        usual = dim in (64, 128) and ratio < 8
        for varlen, window in product((False, True), (CAUSAL, FULL)):
            uneven = full and usual and window == FULL and not varlen
            shapes = (*_squares(full and usual), *(_uneven_squares() if uneven else ()))
            yield Plan(dim, (heads, heads // ratio), window, varlen, shapes, usual=usual)
        if not full or dim in (64, 128):
            for queries, window in DECODES if full else DECODES[:2]:
                uneven = full and usual and window == FULL
                shapes = (*_decodes(full and usual, queries), *(_uneven_decodes(queries) if uneven else ()))
                yield Plan(dim, (heads, heads // ratio), window, False, shapes)


def _squares(fine: bool) -> Iterator[tuple[int, int, int]]:
    """Yield self-attention of a few thousand tokens and more, by length."""
    if not fine:
        yield from ((16, 256, 256), (8, 1024, 1024), (4, 4096, 4096), (1, 16384, 16384))
        return
    for length in (128, 256, 512, 1024, 2048, 4096, 8192, 16384):
        for batch in dict.fromkeys((1, max(4096 // length, 1), max(32768 // length, 1))):
            yield batch, length, length


def _decodes(fine: bool, queries: int) -> Iterator[tuple[int, int, int]]:
    """Yield short queries over long keys."""
    for keys in (1024, 2048, 4096, 8192, 16384, 32768) if fine else (1024, 32768):
        for batch in (1, 16) if fine else (8,):
            yield batch, queries, keys


def _uneven_squares() -> Iterator[tuple[int, int, int]]:
    for length in BETWEEN[:-1]:
        yield max(16384 // length, 1), length, length


def _uneven_decodes(queries: int) -> Iterator[tuple[int, int, int]]:
    # How many waves of blocks such a call takes (two, or two and a half) is half of its time.
    for keys in BETWEEN[3::2]:
        for batch in (1, 6, 16, 24, 64):
            yield batch, queries, keys


def _cpu(full: bool) -> Iterator[Plan]:
    """Yield the kinds of a CPU, in sizes that take it milliseconds."""
    lengths = (32, 64, 128, 256, 512, 1024) if full else (64, 512)
    squares = tuple((2, length, length) for length in lengths)
    kinds = product(("float32", "bfloat16"), (64, 128) if full else (64,), (1, 4) if full else (1,))
    for dtype, dim, ratio in kinds:
        for varlen, window in product((False, True), (CAUSAL, FULL)):
            yield Plan(dim, (4, 4 // ratio), window, varlen, squares, dtype)
        yield Plan(dim, (4, 4 // ratio), FULL, False, ((2, 1, 1024),), dtype)
