"""The calls that are measured, as data: lengths, heads, mask, how much there is to compute."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import exp, log
from typing import Any

from attnreg.core.contract.spec import AttentionSpec, Device
from attnreg.tools.measure import Case

FORWARD, BACKWARD, BOTH = "forward", "backward", "forward + backward"

# A forward is two matrix products, a backward five, as in the FlashAttention-2 paper.
COST = {FORWARD: 1.0, BACKWARD: 2.5, BOTH: 3.5}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One call.

    Attributes:
        lengths_q, lengths_k: The length of each sequence, in tokens. Sequences of a dense call have equal
            lengths.
        heads: (query, key).
        dim: The head dim.
        causal: No query sees a later key. Query and key lengths are then the same.
        varlen: The sequences are packed.
        dtype: The name of the dtype.
        backward: A program would need the gradient.
    """

    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    heads: tuple[int, int]
    dim: int
    causal: bool = False
    varlen: bool = False
    dtype: str = "bfloat16"
    backward: bool = True

    @property
    def group(self) -> str:
        """Return "dense", "packed" or "decode"."""
        if not self.backward:
            return "decode"
        return "packed" if self.varlen else "dense"

    def case(self) -> Case:
        """Return the call as `attnreg.tools.measure` describes it."""
        masked = self.causal and max(self.lengths_q) > 1  # one query sees all keys
        return Case(
            name=str(self), lens_q=self.lengths_q, lens_k=self.lengths_k, varlen=self.varlen,
            heads=self.heads, dims=(self.dim, self.dim), window=(-1, 0 if masked else -1), dtype=self.dtype,
            one_cu_seqlens=self.lengths_q == self.lengths_k,
        )  # fmt: skip

    def spec(self, device: Device) -> AttentionSpec:
        """Return the call as selection sees it."""
        return self.case().spec(device, needs_backward=self.backward)

    def flops(self, step: str) -> float:
        """Return the floating-point operations of a step: 4 x dim for each pair of query and key that counts.

        Half the pairs count under a causal mask; a backward takes 2.5 times a forward. It is the
        convention of the FlashAttention-2 paper.
        """
        pairs = sum(q * k for q, k in zip(self.lengths_q, self.lengths_k, strict=True))
        return 4.0 * self.dim * self.heads[0] * pairs * (0.5 if self.causal else 1.0) * COST[step]

    def to_dict(self) -> dict[str, Any]:
        """Return the same as plain data; where all sequences have the same length, it once."""
        lengths = {
            name: sequences[0] if len(set(sequences)) == 1 else list(sequences)
            for name, sequences in (("lengths_q", self.lengths_q), ("lengths_k", self.lengths_k))
        }
        return {"batch": len(self.lengths_q), **asdict(self), **lengths}

    def __str__(self) -> str:
        batch, longest, (heads_q, heads_k) = len(self.lengths_q), max(self.lengths_q), self.heads
        length = f"≤{longest}" if self.varlen and len(set(self.lengths_q)) > 1 else str(longest)
        if self.lengths_k != self.lengths_q:
            length += f"/{max(self.lengths_k)}"
        heads = f"h{heads_q}" if heads_q == heads_k else f"h{heads_q}:{heads_k}"
        return f"{self.group} {batch}x{length} {heads} d{self.dim}{' causal' if self.causal else ''}"


def packed(
    lengths: Sequence[int], heads_q: int, heads_k: int, dim: int, causal: bool, dtype: str = "bfloat16"
) -> Shape:
    """Return self-attention of packed sequences."""
    lens = tuple(lengths)
    return Shape(
        lengths_q=lens, lengths_k=lens, heads=(heads_q, heads_k), dim=dim, causal=causal, varlen=True,
        dtype=dtype,
    )  # fmt: skip


def dense(batch: int, length: int, *rest: Any) -> Shape:
    """Return self-attention of sequences of equal length. `rest` are the further arguments of `packed`."""
    return replace(packed((length,) * batch, *rest), varlen=False)


def decode(
    batch: int, queries: int, keys: int, heads_q: int, heads_k: int, dim: int, dtype: str = "bfloat16"
) -> Shape:
    """Return a few queries over many keys, without a gradient."""
    return Shape(
        lengths_q=(queries,) * batch, lengths_k=(keys,) * batch, heads=(heads_q, heads_k), dim=dim,
        dtype=dtype, backward=False,
    )  # fmt: skip


def pull_request(device: str) -> list[Shape]:
    """Return the setting of PyTorch's PR 164502, and on a CPU a small one of the kind.

    Lengths are random multiples of 64, the last of them the longest.
    """
    gpu = device == "cuda"
    batch, longest, heads, dtype = (8, 2048, 16, "bfloat16") if gpu else (4, 256, 4, "float32")
    draw = random.Random(0)
    lengths = [*(64 * draw.randint(1, longest // 64) for _ in range(batch - 1)), longest]
    return [packed(lengths, heads, heads, d, causal, dtype) for d in (64, 128) for causal in (False, True)]


def sdpa_grid(device: str) -> list[Shape]:
    """Return dense calls of as many tokens in all, as many short sequences or one long; heads x dim alike."""
    gpu = device == "cuda"
    tokens, width, dtype = (16384, 2048, "bfloat16") if gpu else (512, 256, "float32")
    lengths = (512, 1024, 2048, 4096, 8192, 16384) if gpu else (64, 128, 512)
    return [
        dense(tokens // length, length, width // dim, width // dim // ratio, dim, causal, dtype)
        for dim in (64, 128)
        for causal in (False, True)
        for ratio in ((1, 4) if gpu else (1, 2))
        for length in lengths
    ]


# Lengths, the most tokens in a call, the most floating-point operations of a forward.
GPU, CPU = (180, 11_600, 48_000, 6e11), (12, 400, 1_200, 2e8)


def drawn(seed: int, number: int, device: str) -> Shape:
    """Draw a shape at random; one seed and number are always the same shape."""
    rng = random.Random(f"{seed}/{number}")
    gpu = device == "cuda"
    least, longest, tokens, most = GPU if gpu else CPU
    dtype = "bfloat16" if gpu else "float32"

    def length() -> int:
        return round(exp(rng.uniform(log(least), log(longest))))

    group, dim = rng.choice((1, 4, 8)), rng.choice((64, 96, 128))
    heads = rng.choice((8, 16, 24, 32))
    kind, causal = rng.choices(("dense", "packed", "decode"), (4, 4, 2))[0], rng.random() < 0.75
    while True:
        batch = round(exp(rng.uniform(0.0, log(24))))
        rest = heads, heads // group, dim
        if kind == "decode":
            shape = decode(batch, rng.choice((1, 1, 1, 4)), length(), *rest, dtype)
        elif kind == "packed":
            shape = packed([length() for _ in range(batch)], *rest, causal, dtype)
        else:
            shape = dense(batch, length(), *rest, causal, dtype)
        if sum(shape.lengths_k) <= tokens * (4 if kind == "decode" else 1) and shape.flops(FORWARD) <= most:
            return shape
