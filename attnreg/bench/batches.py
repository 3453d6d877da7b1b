"""The tensors of a shape in several sets, and the fronts that take them."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from attnreg.measure import Sample, copies, copies_beyond_the_cache
from attnreg.varlen import front

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

    from attnreg.bench.shapes import Shape
    from attnreg.measure import Inputs
    from attnreg.measure.sample import Verdict

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

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Tensors:
        """Return leaves of their own, each changed in the same way."""
        q, k, v, grad = (change(x.detach()) for x in self)
        return Tensors(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), grad)


class Batch:
    """The tensors of a shape, as several sets of values.

    Attributes:
        case: the shape as `attnreg.measure` describes it.
        given: the first set as kernels are given it.
        sets: in the contract's layout, (B, S, H, D) or packed (T, H, D); taken in turn they don't stay
            in the device's cache.
        front_sets: the same memory as SDPA takes it, (B, H, S, D), or as they are where they are packed.
        call: the other arguments of a kernel.
        offsets: both tensors of offsets and the longest lengths, as both `varlen_attn` take them.
    """

    def __init__(self, shape: Shape, device: torch.device, sets: int = 1) -> None:
        self.shape, self.device, self.case = shape, device, shape.case()
        drawn = copies(self.case, device, sets)
        self.given: Inputs = drawn[0]
        self.call = call = self.given.call
        offsets: tuple[Any, Any] = call.cu_seqlens_q, call.cu_seqlens_k
        self.offsets = *offsets, call.max_q, call.max_k
        self.sets = [Tensors(*one[:4]).mapped(lambda x: x) for one in drawn]
        to_bhsd = [one.mapped(lambda x: x.transpose(1, 2)) for one in self.sets] if not shape.varlen else []
        self.front_sets = to_bhsd or self.sets

    @functools.cached_property
    def sample(self) -> Sample:
        """What the first set should give."""
        return Sample(self.case, self.given, backward=self.shape.backward)

    def verdict(self, results: Iterable[Tensor]) -> Verdict:
        """Return how wrong the output and gradients of a front are."""
        return self.sample.verdict(named(x if self.shape.varlen else x.transpose(1, 2) for x in results))

    def with_attnreg(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Call the front through which attnreg runs such a call: its `varlen_attn`, or torch's SDPA."""
        if not self.shape.varlen:
            return self._sdpa(q, k, v)
        return front.varlen_attn(  # type: ignore[return-value]
            q, k, v, *self.offsets,
            is_causal=self.shape.causal, enable_gqa=q.shape[1] != k.shape[1], **options,
        )  # fmt: skip

    def with_torch(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Call torch's front: `torch.nn.attention.varlen.varlen_attn`, or SDPA."""
        if not self.shape.varlen:
            return self._sdpa(q, k, v)
        window = (-1, 0) if self.shape.causal else (-1, -1)
        run = _torch_varlen_attn(q.shape[1] != k.shape[1])
        return run(q, k, v, *self.offsets, window_size=window)  # type: ignore[no-any-return]

    def _sdpa(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.shape[1] == k.shape[1]:
            return F.scaled_dot_product_attention(q, k, v, is_causal=self.shape.causal)
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.shape.causal, enable_gqa=True)


def named(results: Iterable[Tensor]) -> dict[str, Tensor]:
    """Return output and gradients, or the output alone, by the names of `measure.Sample`."""
    return {name: x.detach() for name, x in zip(("out", "dq", "dk", "dv"), results, strict=False)}


@functools.cache
def _torch_varlen_attn(gqa: bool) -> Callable[..., Any]:
    from torch.nn.attention.varlen import varlen_attn

    # Without an option for fewer key heads its kernel sees them.
    named = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return functools.partial(varlen_attn, enable_gqa=True) if gqa and named else varlen_attn


def batch_beyond_the_cache(shape: Shape, device: torch.device) -> Batch:
    """Return a batch whose sets are twice the GPU's last cache, and eight where they are small.

    Two on other devices.
    """
    if device.type != "cuda":
        return Batch(shape, device, 2)
    case = shape.case()
    fewest = LAYERS if LAYERS * case.nbytes <= LAYERS_BYTES else 1
    return Batch(shape, device, copies_beyond_the_cache(case, device, fewest))
