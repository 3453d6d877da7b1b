"""One call to hold a kernel to, described without its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from attnreg.contract.spec import AttentionSpec

if TYPE_CHECKING:
    from attnreg.contract.spec import Device

__all__ = ["Case", "Layout"]

Layout = Literal["plain", "heads first", "packed", "last dim strided", "one key head", "offset", "odd rows"]
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
        scale: factor on the scores; None for 1 / sqrt(dim).
        magnitude: factor on the values of query, key and value.
        layout, grad_layout: how query, key and value, and the incoming gradient, lie in memory.
        bias: what kind of `attn_bias`.
        seqused_k: how many keys of each sequence count.
        page_size: tokens in a page of the key-value cache.
        tail: rows past the last sequence of a varlen call.
        poison: whether all that no query may see is NaN: the tail, keys past `seqused_k`, free pages.
        heavy: whether it takes seconds or gigabytes; not part of `QUICK`.
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
    grad_layout: Literal["plain", "heads first", "expanded"] = "plain"
    bias: Bias = "none"
    alibi: bool = False
    seqused_k: tuple[int, ...] | None = None
    page_size: int | None = None
    tail: int = 0
    poison: bool = False
    heavy: bool = False

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}"

    @property
    def max_q(self) -> int:
        """The longest query sequence."""
        return max(self.lens_q, default=0)

    @property
    def max_k(self) -> int:
        """The longest key sequence."""
        return max(self.lens_k, default=0)

    @property
    def lens_seen(self) -> tuple[int, ...]:
        """How many keys of each sequence count."""
        return self.lens_k if self.seqused_k is None else self.seqused_k

    def spec(self, device: Device, *, needs_backward: bool = True) -> AttentionSpec:
        """Return what the call asks of a backend."""
        return AttentionSpec(
            device=device,
            dtype=self.dtype,
            batch=len(self.lens_q),
            max_q=self.max_q,
            max_k=self.max_k,
            heads_q=self.heads[0],
            heads_k=self.heads[1],
            head_dim=self.dims[0],
            head_dim_v=self.dims[1],
            tokens_q=sum(self.lens_q) + self.tail if self.varlen else -1,
            tokens_k=sum(self.lens_k) + self.tail if self.varlen else -1,
            varlen=self.varlen,
            window=self.window,
            bias=self.bias != "none",
            alibi=self.alibi,
            seqused_k=self.seqused_k is not None,
            page_size=self.page_size,
            positive_scale=self.scale is None or self.scale > 0.0,
            needs_backward=needs_backward,
        )
