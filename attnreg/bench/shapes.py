"""What a call is made of, as data: lengths, heads, mask; and how much there is to compute."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from attnreg.contract.spec import AttentionSpec
from attnreg.dispatch.calls import bounds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnreg.contract.spec import Device

__all__ = ["BACKWARD", "BOTH", "FORWARD", "Shape", "decode", "dense", "packed", "ragged"]

FORWARD, BACKWARD, BOTH = "forward", "backward", "forward + backward"

# A forward is two matrix products, a backward five, as in the FlashAttention-2 paper.
COST = {FORWARD: 1.0, BACKWARD: 2.5, BOTH: 3.5}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One call.

    Attributes:
        lengths_q, lengths_k: of each sequence, in tokens; all equal where they aren't packed.
        heads: (query, key).
        dim: the head dim.
        causal: whether a query sees no later key; lengths of queries and keys are then the same.
        varlen: whether the sequences are packed.
        dtype: its name.
        backward: whether a program would ask for the gradient.
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
        """Return "dense", "varlen" or "decode"."""
        if not self.backward:
            return "decode"
        return "varlen" if self.varlen else "dense"

    def spec(self, device: Device) -> AttentionSpec:
        """Return the call as selection sees it."""
        max_q, max_k = max(self.lengths_q), max(self.lengths_k)
        return AttentionSpec(
            device=device, dtype=self.dtype, batch=len(self.lengths_q), max_q=max_q, max_k=max_k,
            heads_q=self.heads[0], heads_k=self.heads[1], head_dim=self.dim, head_dim_v=self.dim,
            tokens_q=sum(self.lengths_q), tokens_k=sum(self.lengths_k), varlen=self.varlen,
            window=bounds((-1, -1), self.causal, max_q, max_k), needs_backward=self.backward,
        )  # fmt: skip

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
            name: found[0] if len(set(found)) == 1 else list(found)
            for name, found in (("lengths_q", self.lengths_q), ("lengths_k", self.lengths_k))
        }
        return {"batch": len(self.lengths_q), **asdict(self), **lengths}

    def __str__(self) -> str:
        batch, longest, (heads_q, heads_k) = len(self.lengths_q), max(self.lengths_q), self.heads
        length = f"≤{longest}" if self.varlen and len(set(self.lengths_q)) > 1 else str(longest)
        if self.lengths_k != self.lengths_q:
            length += f"/{max(self.lengths_k)}"
        heads = f"h{heads_q}" if heads_q == heads_k else f"h{heads_q}:{heads_k}"
        return f"{self.group} {batch}x{length} {heads} d{self.dim}{' causal' if self.causal else ''}"


def dense(
    batch: int, length: int, heads_q: int, heads_k: int, dim: int, causal: bool, dtype: str = "bfloat16"
) -> Shape:
    """Return self-attention of sequences of one length."""
    lengths = (length,) * batch
    return Shape(
        lengths_q=lengths, lengths_k=lengths, heads=(heads_q, heads_k), dim=dim, causal=causal, dtype=dtype
    )


def packed(
    lengths: Sequence[int], heads_q: int, heads_k: int, dim: int, causal: bool, dtype: str = "bfloat16"
) -> Shape:
    """Return self-attention of packed sequences."""
    given = tuple(lengths)
    return Shape(
        lengths_q=given, lengths_k=given, heads=(heads_q, heads_k), dim=dim, causal=causal, varlen=True,
        dtype=dtype,
    )  # fmt: skip


def ragged(
    batch: int, longest: int, heads_q: int, heads_k: int, dim: int, causal: bool, dtype: str = "bfloat16"
) -> Shape:
    """Return packed sequences as text has them: lognormal lengths, always the same, the last the longest."""
    draw = random.Random(batch * 1_000_003 + longest)
    drawn = (round(longest * 0.3 * draw.lognormvariate(0.0, 0.8)) for _ in range(batch - 1))
    lengths = [*(min(max(length, 1 + longest // 64), longest) for length in drawn), longest]
    return packed(lengths, heads_q, heads_k, dim, causal, dtype)


def decode(
    batch: int, queries: int, keys: int, heads_q: int, heads_k: int, dim: int, dtype: str = "bfloat16"
) -> Shape:
    """Return a few queries over many keys, without a gradient."""
    return Shape(
        lengths_q=(queries,) * batch, lengths_k=(keys,) * batch, heads=(heads_q, heads_k), dim=dim,
        dtype=dtype, backward=False,
    )  # fmt: skip
