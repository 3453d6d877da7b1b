"""Head dims that a kernel doesn't take, padded with zeros to the next multiple of 8.

Zeros in query and key leave the scores as they are; zeros in the value make columns of zeros in the output,
which are cut off. In a backward the zeros in the gradient and in the output add nothing to delta or to the
gradients of weights. The scale is the call's, which comes of the head dim before it was padded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from attnreg.core.contract.capabilities import Capabilities
from attnreg.core.contract.spec import AttentionSpec, Direction

if TYPE_CHECKING:  # limits are looked up without torch
    from torch import Tensor

# Kernels take head dims in steps of 8, which keep 16-bit rows aligned to 16 bytes.
STEP = 8


class PaddedDims:
    """The adaptation of calls whose head dims a kernel declares only when they are padded."""

    def applies(self, spec: AttentionSpec, direction: Direction, limits: Capabilities) -> bool:
        """Whether the padded head dims are declared, but not the call's own."""
        wide = self.adapted(spec)
        return wide is not spec and not limits.has_dims(spec) and not any(limits.against_dims(wide))

    def adapted(self, spec: AttentionSpec) -> AttentionSpec:
        """Return the spec with padded head dims; the same object if there is nothing to pad.

        Pages of a cache stay as they are: padding would copy all of it at each call.
        """
        if not (spec.head_dim % STEP or spec.head_dim_v % STEP) or spec.page_size is not None:
            return spec
        return spec.but(head_dim=_padded(spec.head_dim), head_dim_v=_padded(spec.head_dim_v))

    def plain(self, spec: AttentionSpec) -> None:
        """Return None: every call has head dims."""

    def in_reason(self, spec: AttentionSpec) -> str:
        """Return the head dims before and after."""
        wide = self.adapted(spec)
        before, after = (
            str(shown.head_dim if spec.head_dim == spec.head_dim_v else (shown.head_dim, shown.head_dim_v))
            for shown in (spec, wide)
        )
        return f"head dims padded from {before} to {after}"

    described = in_reason

    def wrap(self, kernel: Callable[..., Any], direction: Direction) -> Callable[..., Any]:
        """Return a kernel for any head dims, from one of that direction for multiples of 8.

        It copies each tensor whose head dim isn't one, and reads nothing back.
        """

        def forward(*arguments: Any) -> tuple[Tensor, ...]:
            *tensors, call = arguments
            out, lse = kernel(*map(_wide, tensors), call)
            return _cut(out, tensors[2]), lse

        def backward(*arguments: Any) -> tuple[Tensor, ...]:
            *tensors, lse, call = arguments
            # Gradients of options may follow the gradients of query, key and value. They have no head dim.
            grad_q, grad_k, grad_v, *rest = kernel(*map(_wide, tensors), lse, call)
            return *map(_cut, (grad_q, grad_k, grad_v), tensors[1:4]), *rest

        return forward if direction == "forward" else backward


def with_zeros(x: Tensor, dim: int) -> Tensor:
    """Return a copy of `x`, (..., D) in any dtype, as (..., dim), with zeros in the further columns."""
    wide = x.new_empty((*x.shape[:-1], dim))
    wide[..., : x.shape[-1]].copy_(x)
    wide[..., x.shape[-1] :].zero_()
    return wide


def _padded(dim: int) -> int:
    return -(-dim // STEP) * STEP


def _wide(x: Tensor) -> Tensor:
    dim = _padded(x.shape[-1])
    return x if x.shape[-1] == dim else with_zeros(x, dim)


def _cut(result: Tensor, model: Tensor) -> Tensor:
    """Return a result with as many columns as `model`, contiguous as programs expect of a new tensor."""
    dim = model.shape[-1]
    return result if result.shape[-1] == dim else result[..., :dim].contiguous()
