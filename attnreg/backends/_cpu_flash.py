"""torch's CPU flash kernel, called so that it keeps the contract of `attnreg.backend`.

What it does otherwise, found by running torch 2.13, and what is put right here:

- A last dimension whose stride isn't 1 is read as if it were, with wrong numbers: it is copied.
- A mask has to have the dtype of the query, and can't be boolean.
- A row that sees no key gets LSE 0 from the forward; from an LSE of -inf the backward makes NaN.
- An empty query or key ends the process by a division by zero: callers pass none.
- Its half-precision products are no faster than float32, of short sequences up to ten times
  slower, and its backward sums gradients in half precision: half types are computed in float32.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from attnreg import native
from attnreg.backends import _cpu_bfloat16 as bfloat16
from attnreg.backends._cpu_mask import ALL_KEYS, Mask

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["Flash"]

_FORWARD = "_scaled_dot_product_flash_attention_for_cpu"


class Flash(NamedTuple):
    """The two captured kernels, for tensors (B, S, H, D) that are never empty and LSE (B, S, H)."""

    forward_kernel: Callable[..., Any]
    backward_kernel: Callable[..., Any]
    bfloat16_products: bool

    @classmethod
    def captured(cls) -> Flash:
        """Return torch's own kernels, whatever router covers them."""
        forward, backward = (native.kernel(op, "CPU") for op in (_FORWARD, f"{_FORWARD}_backward"))
        return cls(forward, backward, bfloat16.is_fast())

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Mask = ALL_KEYS
    ) -> tuple[Tensor, Tensor]:
        """Return output and LSE, both in the precision that they were computed in."""
        dtype, causal = _working_dtype(q), mask.is_causal(q.size(1))
        added = None if causal else mask.additive(q.size(1), k.size(1), dtype)
        tensors = (_readable(x, dtype) for x in (q, k, v))
        out, lse = self.forward_kernel(*tensors, 0.0, causal, attn_mask=added, scale=scale)
        if mask.bias is not None and added is not None:
            lse = lse.masked_fill((added == -inf).all(-1), -inf)
        return out.transpose(1, 2), lse.transpose(1, 2)

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        scale: float,
        mask: Mask = ALL_KEYS,
    ) -> tuple[Tensor, ...]:
        """Return the gradients of query, key and value, in the precision that was computed in.

        `out` and `lse` may be those of more keys than are passed: the gradients are then these
        keys' share. A row whose LSE is infinite takes and gives none.
        """
        if self.bfloat16_products and bfloat16.takes(q, scale, mask):
            return bfloat16.backward(grad_out, q, k, v, out, lse, scale, mask)
        dtype, causal = _working_dtype(q), mask.is_causal(q.size(1))
        added = None if causal else mask.additive(q.size(1), k.size(1), dtype)
        tensors = (_readable(x, dtype) for x in (grad_out, q, k, v, out))
        # exp(score - inf) is 0: the row drops out of every sum.
        rows = lse.masked_fill(lse == -inf, inf).transpose(1, 2)
        grads = self.backward_kernel(*tensors, rows, 0.0, causal, attn_mask=added, scale=scale)
        return tuple(grad.transpose(1, 2) for grad in grads)


def _working_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _readable(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (B, H, S, D) as the kernel can read it."""
    x = x.to(dtype)
    # Rows closer together than they are long (an expanded tensor) would be read by a slow product.
    return (x if x.stride(-1) == 1 and x.stride(1) >= x.size(-1) else x.contiguous()).transpose(1, 2)
