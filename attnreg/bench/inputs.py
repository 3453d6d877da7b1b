"""The tensors of a shape, the two fronts that take them, and what attention over them is in float64."""

from __future__ import annotations

import functools
import inspect
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attnreg.contract.backend import Call
from attnreg.dispatch.calls import bounds
from attnreg.varlen import front

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from attnreg.bench.shapes import Shape

__all__ = ["Batch", "Tensors", "copies_beyond_the_cache", "far"]

MOST_COPIES = 16

# A model has some layers, and autograd's thread, once awake, goes through them all.
LAYERS, LAYERS_BYTES = 8, 2**30


class Tensors(NamedTuple):
    """Query, key and value, which take a gradient, and the incoming gradient."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return those that take a gradient."""
        return self.q, self.k, self.v

    def plain(self) -> Tensors:
        """Return the same without gradients, for kernels that are called by hand."""
        return Tensors(*(x.detach() for x in self))

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Tensors:
        """Return leaves of their own, each changed in the same way."""
        q, k, v, grad = (change(x.detach()) for x in self)
        return Tensors(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), grad)


class Batch:
    """The tensors of a shape, as several sets of values.

    Attributes:
        sets: in the contract's layout, (B, S, H, D) or packed (T, H, D); taken in turn they don't stay
            in the device's cache.
        front_sets: the same memory as SDPA takes it, (B, H, S, D), or as they are where they are packed.
        offsets_q, offsets_k: int32 (B + 1,), where the sequences begin.
    """

    def __init__(self, shape: Shape, device: torch.device, sets: int = 1) -> None:
        self.shape, self.device = shape, device
        self.offsets_q = self._offsets(shape.lengths_q)
        # One tensor for both where they are the same, as in self-attention: backends look at that.
        same = shape.lengths_q == shape.lengths_k
        self.offsets_k = self.offsets_q if same else self._offsets(shape.lengths_k)
        self.max_q, self.max_k = max(shape.lengths_q), max(shape.lengths_k)
        generator = torch.Generator(device).manual_seed(0)
        self.sets = [self._set(generator) for _ in range(sets)]
        self.front_sets = self.sets if shape.varlen else [self.heads_first(one) for one in self.sets]

    def _offsets(self, lengths: Sequence[int]) -> Tensor:
        return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=self.device)

    def _set(self, generator: torch.Generator) -> Tensors:
        shape, dtype = self.shape, getattr(torch, self.shape.dtype)

        def values(lengths: Sequence[int], heads: int) -> Tensor:
            rows = (sum(lengths),) if shape.varlen else (len(lengths), lengths[0])
            sizes = (*rows, heads, shape.dim)
            return torch.randn(sizes, generator=generator, device=self.device).to(dtype)

        (lengths_q, lengths_k), (heads_q, heads_k) = (shape.lengths_q, shape.lengths_k), shape.heads
        drawn = values(lengths_q, heads_q), values(lengths_k, heads_k), values(lengths_k, heads_k)
        return Tensors(*drawn, values(lengths_q, heads_q)).mapped(lambda x: x)

    @staticmethod
    def heads_first(tensors: Tensors) -> Tensors:
        """Return dense tensors as SDPA takes them, (B, H, S, D) in the memory of (B, S, H, D)."""
        return tensors.mapped(lambda x: x.transpose(1, 2))

    def contract(self, results: Iterable[Tensor]) -> list[Tensor]:
        """Return what a front gave in the contract's layout."""
        return [x.detach() if self.shape.varlen else x.detach().transpose(1, 2) for x in results]

    def call(self) -> Call:
        """Return the arguments that a backend's kernels take beside the tensors."""
        window = bounds((-1, -1), self.shape.causal, self.max_q, self.max_k)
        offsets = (self.offsets_q, self.offsets_k) if self.shape.varlen else (None, None)
        return Call(self.shape.dim**-0.5, self.max_q, self.max_k, window, *offsets)

    def with_attnreg(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Call the front through which attnreg serves such a call: its `varlen_attn`, or torch's SDPA."""
        if not self.shape.varlen:
            return self._sdpa(q, k, v)
        return front.varlen_attn(  # type: ignore[return-value]
            q, k, v, self.offsets_q, self.offsets_k, self.max_q, self.max_k,
            is_causal=self.shape.causal, enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip

    def with_torch(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Call torch's front: `torch.nn.attention.varlen.varlen_attn`, or SDPA."""
        if not self.shape.varlen:
            return self._sdpa(q, k, v)
        window = (-1, 0) if self.shape.causal else (-1, -1)
        asked = {"enable_gqa": True} if q.shape[1] != k.shape[1] and _torch_names_gqa() else {}
        offsets = (self.offsets_q, self.offsets_k, self.max_q, self.max_k)
        return _torch_varlen_attn()(q, k, v, *offsets, window_size=window, **asked)  # type: ignore[no-any-return]

    def _sdpa(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.shape[1] == k.shape[1]:
            return F.scaled_dot_product_attention(q, k, v, is_causal=self.shape.causal)
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.shape.causal, enable_gqa=True)


@functools.cache
def _torch_varlen_attn() -> Callable[..., Any]:
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn


@functools.cache
def _torch_names_gqa() -> bool:
    """Whether torch's varlen_attn has to be told of fewer key heads; where it isn't, its kernel sees them."""
    return "enable_gqa" in inspect.signature(_torch_varlen_attn()).parameters


def copies_beyond_the_cache(shape: Shape, device: torch.device) -> int:
    """Return how many sets of tensors are twice the GPU's last cache, and eight where they are small.

    Two on other devices.
    """
    if device.type != "cuda":
        return 2
    rows = 2 * sum(shape.lengths_q) * shape.heads[0] + 2 * sum(shape.lengths_k) * shape.heads[1]
    size = int(rows * shape.dim * getattr(torch, shape.dtype).itemsize)
    cache = int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)) or 2**26
    fewest = LAYERS if LAYERS * size <= LAYERS_BYTES else 1
    return max(min(-(-2 * cache // size), MOST_COPIES), fewest)


def far(got: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """Return the largest relative error of the tensors; NaN where one has NaN."""
    errors = [
        float((ours.detach().double() - theirs.detach().double()).norm() / theirs.detach().double().norm())
        for ours, theirs in zip(got, expected, strict=True)
    ]
    return max(errors) if all(error == error for error in errors) else float("nan")
