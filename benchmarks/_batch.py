"""Packed batches on the GPU, and what attention over them is in float64."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn as torch_varlen_attn

import attnreg
from attnreg.backend import Call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["TOLERANCE", "Batch", "Tensors", "exact", "far"]

# Relative, of a whole tensor in bfloat16: right kernels are at 0.003, a wrong mask at 0.1 and more.
TOLERANCE = 0.01


class Tensors(NamedTuple):
    """Query, key and value, which take a gradient, and the incoming gradient."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return those that take a gradient."""
        return self.q, self.k, self.v

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Tensors:
        """Return leaves of their own, each changed in the same way."""
        q, k, v, grad = (change(x.detach()) for x in self)
        return Tensors(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), grad)


class Batch:
    """Sequences of some lengths, packed (T, H, D) in bfloat16, as several sets of values.

    Attributes:
        lengths, longest: of the sequences, in tokens.
        offsets: int32 (B + 1,), where they begin.
        sets: the tensors; taken in turn they don't stay in the device's cache.
    """

    def __init__(self, lengths: Sequence[int], heads: int, dim: int, causal: bool, sets: int = 1) -> None:
        self.lengths, self.longest = list(lengths), max(lengths)
        self.heads, self.dim, self.causal = heads, dim, causal
        self.offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda")
        torch.manual_seed(0)
        shape = (sum(lengths), heads, dim)
        drawn = [[torch.randn(shape, device="cuda").bfloat16() for _ in range(4)] for _ in range(sets)]
        self.sets = [Tensors(*tensors).mapped(lambda x: x) for tensors in drawn]

    def call(self, varlen: bool = True) -> Call:
        """Return the arguments that a backend's kernels take beside the tensors."""
        window = (-1, 0) if self.causal else (-1, -1)
        offsets = (self.offsets, self.offsets) if varlen else (None, None)
        return Call(self.dim**-0.5, self.longest, self.longest, window, *offsets)

    def with_attnreg(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Call `attnreg.varlen_attn`."""
        return attnreg.varlen_attn(  # type: ignore[return-value]
            q, k, v, self.offsets, self.offsets, self.longest, self.longest, is_causal=self.causal
        )

    def with_torch(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Call `torch.nn.attention.varlen.varlen_attn`."""
        window = (-1, 0) if self.causal else (-1, -1)
        return torch_varlen_attn(  # type: ignore[return-value]
            q, k, v, self.offsets, self.offsets, self.longest, self.longest, window_size=window
        )


def exact(tensors: Tensors, lengths: Sequence[int], causal: bool) -> list[Tensor]:
    """Return output and gradients of packed tensors in float64, one sequence at a time."""
    found = []
    for q, k, v, grad in zip(*(x.detach().split(list(lengths)) for x in tensors), strict=True):
        inputs = [x.double().transpose(0, 1)[None].requires_grad_() for x in (q, k, v)]
        out = F.scaled_dot_product_attention(*inputs, is_causal=causal)
        grads = torch.autograd.grad(out, inputs, grad.double().transpose(0, 1)[None])
        found.append([x.detach()[0].transpose(0, 1) for x in (out, *grads)])
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


def far(got: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """Return the largest relative error of the tensors; NaN where one has NaN."""
    errors = [
        float((ours.detach().double() - theirs.detach().double()).norm() / theirs.detach().double().norm())
        for ours, theirs in zip(got, expected, strict=True)
    ]
    return max(errors) if all(error == error for error in errors) else float("nan")
