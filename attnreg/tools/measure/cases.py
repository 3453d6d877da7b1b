"""A call described without its tensors, and the cases that every kernel is checked with.

The cases are every shape, mask and memory layout that kernels have been wrong on. Where the numbers
come from: the test suites of flash-attention, PyTorch, xformers and tokamax, and the issues that their
users reported.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from attnreg.core.contract.options import OPTIONS, Option
from attnreg.core.contract.spec import LEAST_SCALE, AttentionSpec, Device, arguments_of

Layout = Literal["plain", "bhsd", "fused qkv", "last dim strided", "one key head", "offset", "odd rows"]
Bias = Literal["none", "key padding", "additive"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The lengths, sizes and options of one call, and how its tensors lie in memory.

    Attributes:
        name: unique within a dtype.
        lens_q, lens_k: the length of each sequence; all the same for a dense call.
        heads: (query, key).
        dims: (query and key, value).
        window: (left, right), -1 unbounded, aligned bottom-right.
        scale: A factor on the scores. None means 1 / sqrt(dim).
        magnitude: A factor on the values of query, key and value.
        layout: The memory layout of query, key and value.
        grad_layout: The memory layout of the incoming gradient.
        one_cu_seqlens: Query and key share one tensor of offsets, as in self-attention. Some backends check
            for that.
        bias: The kind of `attn_bias`.
        bias_gradient: An additive `attn_bias` has a gradient, too.
        seqused_k: The number of keys of each sequence that count.
        page_size: Tokens in a page of the key-value cache.
        tail: Rows past the last sequence of a packed call.
        poison: All that no query may see is NaN: the tail, keys past `seqused_k`, free pages.
        dropout: The probability of dropping a weight. The value is then the identity, so that the output
            shows which weights were dropped. No sequence may have more keys than the value's head dim.
        softcap: A bound on the scores. 0 means none.
        grad_lse: The LSE has a gradient, too.
        sinks: Each row has one more key, without a value, that the kernels don't know of. Their backward
            gets the output and the LSE with that key counted.
        counts_sinks: The kernels get such keys and count them, in a packed call. Kernels that count them
            themselves need a key for every row.
        key_ranges: How many ranges of keys each query has; 0 means that it sees all keys of its window.
        score_mod: A function changes each score: by its sequence, head and places, and not in proportion.
        mask_mod: A function hides scores, by sequence, head and places.
        num_splits: The most pieces that the keys may be split into.
        deterministic: The gradients have to be bitwise repeatable.
        batch_invariant: A sequence has to have the same bits in every batch.
        seen_nan: The case is run again with a NaN that queries see. Every row of the first sequence has to
            see its first key.
        heavy: The case takes seconds or gigabytes, and isn't part of `QUICK`.
    """

    name: str
    lens_q: tuple[int, ...]
    lens_k: tuple[int, ...]
    varlen: bool = False
    heads: tuple[int, int] = (2, 2)
    dims: tuple[int, int] = (64, 64)
    window: tuple[int, int] = (-1, -1)
    dtype: str = "bfloat16"
    scale: float | None = None
    magnitude: float = 1.0
    layout: Layout = "plain"
    grad_layout: Literal["plain", "bhsd", "expanded"] = "plain"
    one_cu_seqlens: bool = False
    bias: Bias = "none"
    bias_gradient: bool = False
    alibi: bool = False
    seqused_k: tuple[int, ...] | None = None
    page_size: int | None = None
    tail: int = 0
    poison: bool = False
    dropout: float = 0.0
    softcap: float = 0.0
    grad_lse: bool = False
    sinks: bool = False
    counts_sinks: bool = False
    key_ranges: int = 0
    score_mod: bool = False
    mask_mod: bool = False
    num_splits: int | None = None
    deterministic: bool = False
    batch_invariant: bool = False
    seen_nan: bool = False
    heavy: bool = False

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}"

    @property
    def shapes(self) -> str:
        """The shapes of its tensors, the lengths of packed sequences, and its options, as one line."""
        own = ("name", "lens_q", "lens_k", "varlen", "heads", "dims", "dtype", "page_size", "tail", "heavy")
        options = [
            f"{field.name}={value!r}"
            for field in fields(self)
            if field.name not in own and (value := getattr(self, field.name)) != field.default
        ]
        return ", ".join((*self._tensors(), *options))

    def _tensors(self) -> Iterator[str]:
        (heads_q, heads_k), (dim, dim_v) = self.heads, self.dims
        same = self.lens_q == self.lens_k and self.page_size is None
        for side, lens in (("q", self.lens_q), ("k", self.lens_k)):
            rows = f"{len(lens)}, {max(lens, default=0)}"
            rows = str(sum(lens) + self.tail) if self.varlen else rows
            if side == "q":
                yield f"q ({rows}, {heads_q}, {dim})"
            elif self.page_size is not None:
                yield f"k and v in pages of {self.page_size}, {heads_k} heads, dims {dim} and {dim_v}"
            elif dim == dim_v:
                yield f"k and v ({rows}, {heads_k}, {dim})"
            else:
                yield f"k ({rows}, {heads_k}, {dim}), v ({rows}, {heads_k}, {dim_v})"
            if self.varlen and (side == "k" or not same):
                yield f"{'' if same else f'{side} '}lengths {_listed(lens)}"
        if self.tail:
            yield f"{self.tail} rows past the last offset"

    @property
    def is_causal(self) -> bool:
        """Whether no query sees a key after it, and each sees all before."""
        return self.window == (-1, 0)

    @property
    def max_q(self) -> int:
        """The longest query sequence."""
        return max(self.lens_q, default=0)

    @property
    def max_k(self) -> int:
        """The longest key sequence."""
        return max(self.lens_k, default=0)

    @property
    def lens(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The lengths of queries and of keys."""
        return self.lens_q, self.lens_k

    @property
    def lens_seen(self) -> tuple[int, ...]:
        """How many keys of each sequence count."""
        return self.lens_k if self.seqused_k is None else self.seqused_k

    @property
    def nbytes(self) -> int:
        """How much memory query, key, value and the gradient of the output take."""
        rows = sum(self.lens_q) * self.heads[0] + sum(self.lens_k) * self.heads[1]
        return rows * sum(self.dims) * DTYPES[self.dtype]

    @property
    def every_row_sees_a_key(self) -> bool:
        """Whether it is known of a packed call as it is of calls: no sequence has fewer keys than queries."""
        return not self.tail and all(q <= k for q, k in zip(self.lens_q, self.lens_seen, strict=True))

    def reordered(self) -> Case:
        """Return the call with its sequences in reverse order: equal shapes, other offsets."""
        used = None if self.seqused_k is None else self.seqused_k[::-1]
        return replace(self, lens_q=self.lens_q[::-1], lens_k=self.lens_k[::-1], seqused_k=used)

    def scaled(self, queries: float, keys: float) -> Case:
        """Return the call with longer or shorter sequences; an empty sequence stays empty.

        The same share of a sequence's keys counts as before. Equal factors keep the order of lengths: a
        sequence with fewer keys than queries has no more after.
        """

        def scale(lens: tuple[int, ...], factor: float) -> tuple[int, ...]:
            return tuple(math.ceil(length * factor) for length in lens)

        used = None if self.seqused_k is None else scale(self.seqused_k, keys)
        return replace(
            self, lens_q=scale(self.lens_q, queries), lens_k=scale(self.lens_k, keys), seqused_k=used
        )

    def spec(self, device: Device, *, needs_backward: bool = True) -> AttentionSpec:
        """Return the spec of the call, as selection would see it."""
        return AttentionSpec(
            device=device, dtype=self.dtype, batch=len(self.lens_q), max_q=self.max_q, max_k=self.max_k,
            heads_q=self.heads[0], heads_k=self.heads[1], head_dim=self.dims[0], head_dim_v=self.dims[1],
            tokens_q=sum(self.lens_q) + self.tail if self.varlen else -1,
            tokens_k=sum(self.lens_k) + self.tail if self.varlen else -1,
            varlen=self.varlen, window=self.window,
            positive_scale=self.scale is None or self.scale >= LEAST_SCALE,
            deterministic=self.deterministic, needs_backward=needs_backward,
            batch_invariant=self.batch_invariant,
            **arguments_of({row.field: self._described(row) for row in OPTIONS}),
        )  # fmt: skip

    def has(self, option: Option) -> bool:
        """Whether the call has an option."""
        field = field_of(option)
        return bool(field) and getattr(self, field) != WITHOUT_OPTIONS[field]

    def _described(self, option: Option) -> Any:
        """Return the value of `AttentionSpec`'s field: of a tensor only whether there is one."""
        if option.values not in ("number", "integer", "pages"):
            return self.has(option)
        return getattr(self, field_of(option)) if field_of(option) else option.off


def field_of(option: Option) -> str:
    """Return the field that a `Case` has for an option, or an empty string."""
    name = "counts_sinks" if option.name == "sinks" else option.field
    return name if name in Case.__dataclass_fields__ else ""


# The fields of a `Case` for options, and their values in a call without options.
WITHOUT_OPTIONS: dict[str, Any] = {
    field.name: field.default for field in fields(Case) if field.name in map(field_of, OPTIONS)
}

# The options whose number any case can have. Dropout isn't among them: its cases have a value of their own.
FREE_NUMBERS = [row for row in OPTIONS if row.values == "number" and row.name != "dropout" and field_of(row)]


def _listed(lens: tuple[int, ...]) -> str:
    """Return lengths as text; of many the first eight."""
    more = f", ... ({len(lens)} in all)" if len(lens) > 8 else ""
    return f"({', '.join(map(str, lens[:8]))}{more})"


DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}  # bytes


def _dense(name: str, len_q: int, len_k: int, batch: int = 2, **options: Any) -> Case:
    return replace(Case(name=name, lens_q=(len_q,) * batch, lens_k=(len_k,) * batch), **options)


def _varlen(name: str, *lens: tuple[int, int], **options: Any) -> Case:
    lens_q, lens_k = zip(*lens, strict=True)
    return replace(Case(name=name, lens_q=lens_q, lens_k=lens_k, varlen=True), **options)


def _batch(length: int) -> int:
    """Return how many sequences of a length take their fair share of a run's time."""
    return 2 if length < 500 else 1


CAUSAL = (-1, 0)
ODD_LENGTHS = (1, 3, 7, 15, 31, 33, 63, 65, 113, 127, 129, 143, 203, 257, 587, 799, 1023)
UNEQUAL = ((64, 1), (1, 239), (799, 3), (256, 8), (8, 256), (7, 8), (64, 32), (113, 211), (1024, 1023))
HEADS = ((1, 1), (4, 2), (3, 1), (4, 1), (6, 3), (12, 4), (8, 1))
DIMS = (1, 2, 3, 4, 5, 6, 7, 8, 21, 31, 40, 80, 96, 128, 160, 192, 203, 256, 288, 512)
UNEQUAL_DIMS = ((64, 32), (32, 64), (192, 128), (40, 64), (5, 3))
WINDOWS = (
    (-1, -1), (-1, 0), (4, 0), (-1, 4), (0, 0), (1, 0), (0, 1), (0, -1), (4, 4), (8, 2), (1025, 1025),
)  # fmt: skip
LAYOUTS: tuple[Layout, ...] = get_args(Layout)[1:]  # all but the plain one

RAGGED = ((113, 113), (1, 1), (64, 64), (7, 7), (129, 129))
RAGGED_UNEQUAL = ((113, 203), (1, 65), (64, 1), (31, 33), (203, 113))
MORE_KEYS = ((113, 203), (1, 65), (64, 64), (31, 33))
# Lengths that kernels may treat otherwise, as they may those of a batch with others.
MIXED = ((160, 160), (1, 600), (16, 16), (0, 3), (400, 400), (7, 130), (160, 160))
SHORT = tuple((1 + n % 4, 1 + n % 4 + n % 3) for n in range(300))
EMPTIES = {
    "empty first": ((0, 0), (33, 33)),
    "empty between": ((33, 33), (0, 0), (7, 7)),
    "empty last": ((33, 33), (0, 0)),
    "all empty": ((0, 0), (0, 0)),
    "no queries": ((0, 33), (7, 7)),
    "no keys": ((33, 0), (7, 7)),
    "at most one": ((1, 1), (0, 0), (1, 1)),
}

SHAPES: tuple[Case, ...] = (
    *(_dense(f"length {n}", n, n, _batch(n), window=CAUSAL if n % 4 == 3 else (-1, -1)) for n in ODD_LENGTHS),
    *(_dense(f"lengths {q} and {k}", q, k, _batch(q)) for q, k in UNEQUAL),
    *(_dense(f"causal lengths {q} and {k}", q, k, _batch(q), window=CAUSAL) for q, k in UNEQUAL),
    _dense("no queries", 0, 33),
    _dense("no keys", 33, 0),
    _dense("no batch", 33, 33, batch=0),
    _dense("batch of 9", 17, 33, batch=9),
    _varlen("packed 300 sequences", *SHORT, heads=(1, 1), window=CAUSAL),
    *(_varlen(f"packed {name}", *lens) for name, lens in EMPTIES.items()),
    *(_dense(f"heads {q}:{k}", 65, 129, heads=(q, k), window=CAUSAL, seen_nan=q == 8) for q, k in HEADS),
    *(
        _varlen(f"packed heads {q}:{k}", *RAGGED, heads=(q, k), window=CAUSAL, seen_nan=q == 8)
        for q, k in HEADS
    ),
    *(_dense(f"dim {n}", 33, 65, dims=(n, n)) for n in DIMS),
    *(_dense(f"dims {qk} and {v}", 33, 65, dims=(qk, v), heads=(4, 2)) for qk, v in UNEQUAL_DIMS),
    *(_dense(f"window {w}", 113, 113, window=w) for w in WINDOWS),
    *(_dense(f"window {w}, few queries", 63, 203, window=w) for w in WINDOWS),
    *(_dense(f"window {w}, few keys", 203, 63, window=w) for w in WINDOWS),
    # As far to the right as there are keys, and yet a bound: rows see keys one more with each row.
    _dense("window (-1, 100), few keys", 203, 63, window=(-1, 100)),
    *(_varlen(f"packed window {w}", *RAGGED_UNEQUAL, window=w, heads=(4, 2)) for w in WINDOWS),
    *(_dense(f"layout {name}", 65, 65, layout=name, heads=(4, 2)) for name in LAYOUTS),
    *(_varlen(f"packed layout {name}", *RAGGED, layout=name, heads=(4, 2)) for name in LAYOUTS),
    _dense("gradient bhsd", 65, 33, grad_layout="bhsd"),
    _dense("gradient of a sum", 65, 33, grad_layout="expanded"),
    _varlen("packed gradient of a sum", *RAGGED, grad_layout="expanded"),
    _dense("values x5", 113, 203, magnitude=5.0),
    _dense("values x5, causal", 203, 203, magnitude=5.0, window=CAUSAL),
    _dense("scale 0.3", 33, 65, scale=0.3, window=CAUSAL),
    _varlen("packed scale 0.3", *RAGGED_UNEQUAL, scale=0.3, heads=(4, 2)),
    _dense("scale 0", 33, 65, scale=0.0),
    _dense("scale below 0", 33, 65, scale=-0.125),
    _varlen("packed scale below 0", *RAGGED_UNEQUAL, scale=-0.125),
    _dense("key padding mask", 63, 113, bias="key padding"),
    _dense("additive bias", 63, 113, bias="additive", heads=(4, 2)),
    _dense("additive bias, causal", 113, 63, bias="additive", window=CAUSAL),
    _dense("gradient of a bias", 63, 113, 3, bias="additive", bias_gradient=True),
    # Some kernels have no such gradient unless the number of keys is a multiple of eight.
    _dense("gradient of a bias, causal", 72, 72, bias="additive", bias_gradient=True, window=CAUSAL),
    _dense("gradient of a bias, shared heads", 81, 72, bias="additive", bias_gradient=True, heads=(4, 2)),
    _dense("alibi", 113, 203, alibi=True, heads=(4, 2), window=CAUSAL),
    _varlen("packed alibi", *RAGGED_UNEQUAL, alibi=True),
    _varlen("packed tail", *RAGGED, tail=17),
    _varlen("packed tail of NaN", *RAGGED_UNEQUAL, tail=17, poison=True, window=CAUSAL),
    _dense("seqused_k", 33, 65, seqused_k=(65, 31), window=CAUSAL),
    _varlen("packed seqused_k", *RAGGED_UNEQUAL, seqused_k=(200, 0, 1, 32, 65), window=CAUSAL, poison=True),
    _varlen("pages", (1, 65), (7, 40), (0, 9), seqused_k=(65, 39, 9), page_size=16),
    _varlen(
        "pages of NaN", (1, 600), (113, 113), seqused_k=(513, 99), page_size=256, poison=True, window=CAUSAL
    ),
    _varlen("packed self-attention", *RAGGED, one_cu_seqlens=True, window=CAUSAL),
    _dense("dropout", 33, 64, dropout=0.3),
    _varlen("packed dropout", (33, 64), (7, 3), (65, 33), dropout=0.3),
    _dense("dropout, window (8, 2)", 33, 64, dropout=0.3, window=(8, 2)),
    _varlen("packed dropout, causal", (33, 64), (7, 8), (33, 33), dropout=0.3, window=CAUSAL),
    _dense("softcap 2", 113, 203, softcap=2.0, heads=(4, 2), window=CAUSAL),
    _dense("softcap 30, values x5", 65, 129, softcap=30.0, magnitude=5.0),
    _varlen("packed softcap 1.5", *RAGGED_UNEQUAL, softcap=1.5, scale=0.3, heads=(4, 2), window=(40, 3)),
    _varlen("packed softcap 50, scale below 0", *RAGGED, softcap=50.0, scale=-2.0, tail=17, poison=True),
    _dense("gradient of the LSE", 113, 63, grad_lse=True, heads=(4, 2), window=CAUSAL),
    _dense("gradient of the LSE, few keys", 65, 3, grad_lse=True, grad_layout="expanded"),
    _varlen("packed gradient of the LSE", *RAGGED_UNEQUAL, grad_lse=True, tail=17, poison=True),
    _varlen("packed gradient of the LSE, softcap", *RAGGED, grad_lse=True, softcap=2.0, heads=(4, 1)),
    _dense("sinks", 113, 203, sinks=True, heads=(4, 2), window=CAUSAL),
    _varlen("packed sinks", *RAGGED_UNEQUAL, sinks=True, heads=(4, 2), tail=17, poison=True),
    # The gradient has a number for each head: of a few numbers the largest error may be small by chance.
    _varlen("packed counted sinks", *RAGGED, counts_sinks=True, heads=(16, 8), window=CAUSAL),
    _varlen("packed counted sinks, window", *MORE_KEYS, counts_sinks=True, heads=(18, 6), window=(40, 3)),
    _varlen(
        "packed counted sinks, scale 0.3",
        *RAGGED,
        counts_sinks=True,
        heads=(16, 16),
        scale=0.3,
        one_cu_seqlens=True,
    ),
    _varlen("packed key_ranges 1", *RAGGED_UNEQUAL, key_ranges=1, tail=17, poison=True),
    _varlen("packed key_ranges 3, window", *RAGGED, key_ranges=3, window=(90, 0), one_cu_seqlens=True),
    _varlen("packed key_ranges 2, seqused_k", *RAGGED_UNEQUAL, key_ranges=2, seqused_k=(200, 0, 1, 32, 65)),
    _varlen("packed score_mod", *RAGGED_UNEQUAL, score_mod=True, heads=(4, 2), tail=17, poison=True),
    _varlen("packed mask_mod", *RAGGED, mask_mod=True, heads=(4, 2), window=(90, 0), key_ranges=2),
    _varlen(
        "packed score_mod and mask_mod, softcap, alibi, seqused_k",
        *RAGGED_UNEQUAL,
        score_mod=True,
        mask_mod=True,
        softcap=2.0,
        alibi=True,
        seqused_k=(200, 0, 1, 32, 65),
    ),
    _dense("num_splits 3", 7, 257, num_splits=3, heads=(4, 2)),
    _varlen("packed num_splits 2", *RAGGED_UNEQUAL, num_splits=2, window=CAUSAL),
    _dense("deterministic", 257, 257, deterministic=True, heads=(4, 2)),
    _varlen("packed deterministic", (200, 257), (1, 130), deterministic=True, window=CAUSAL),
    _dense("batch-invariant", 129, 257, 3, batch_invariant=True, heads=(4, 2)),
    _dense("batch-invariant, key padding", 65, 257, 3, batch_invariant=True, bias="key padding"),
    _varlen("packed batch-invariant", *MIXED, batch_invariant=True, window=CAUSAL, heads=(4, 2)),
    _varlen("packed batch-invariant, window", *MIXED, batch_invariant=True, window=(40, 5)),
    _dense("long", 4224, 4224, batch=1, window=CAUSAL, heavy=True),
    _dense("long, few keys", 4224, 1023, batch=1, heads=(4, 1), heavy=True),
    _dense("wide window", 2304, 2304, batch=1, window=(1025, 1025), heavy=True),
    _dense("300 heads", 129, 129, heads=(300, 300), heavy=True),
    *(
        _dense(f"batch {n}", 2, 3, batch=n, dims=(8, 8), heads=(1, 1), heavy=True)
        for n in (65535, 65536, 65537)
    ),
    _varlen("packed batch 65537", *(((1, 2),) * 65537), dims=(32, 32), heads=(1, 1), heavy=True),
)

CASES = tuple(replace(case, dtype=dtype) for dtype in DTYPES for case in SHAPES)
QUICK = tuple(case for case in CASES if not case.heavy)
