"""torch's CPU flash kernel, called so that it keeps the contract of `attnreg.backend`.

What it does otherwise, found by running torch 2.13, and what is put right here:

- A last dimension whose stride isn't 1 is read as if it were, with wrong numbers: it is copied.
- A mask has to have the dtype of the query, and can't be boolean.
- A row that sees no key gets LSE 0 from the forward; from an LSE of -inf the backward makes NaN.
- An empty query or key ends the process by a division by zero: callers pass none.
- With few rows its bfloat16 products, and with any its float16 ones, are slower than float32.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from attnreg import native

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["Flash"]

_FORWARD = "_scaled_dot_product_flash_attention_for_cpu"

# From this many rows on the bfloat16 backward is faster than the float32 one (AVX-512, 2 cores).
_NATIVE_BACKWARD_ROWS = 320


class Flash(NamedTuple):
    """The two captured kernels, on tensors (B, S, H, D) that are never empty, LSE (B, S, H)."""

    forward_kernel: Callable[..., Any]
    backward_kernel: Callable[..., Any]

    @classmethod
    def captured(cls) -> Flash:
        """Return torch's own kernels, whatever router covers them."""
        return cls(native.kernel(_FORWARD, "CPU"), native.kernel(f"{_FORWARD}_backward", "CPU"))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = False, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return output and LSE, both in the precision that was computed in.

        `causal` is aligned top-left; `mask` is additive and broadcasts to (B, H, S_q, S_k).
        """
        dtype = _accumulate_dtype(q)
        heads_first = [_readable(x, dtype).transpose(1, 2) for x in (q, k, v)]
        added = None if mask is None else mask.to(dtype)
        out, lse = self.forward_kernel(*heads_first, 0.0, causal, attn_mask=added, scale=scale)
        if mask is not None:
            lse = lse.masked_fill((mask == -inf).all(-1), -inf)
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
        causal: bool = False,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value, in the precision that was computed in.

        `out` and `lse` may be those of more keys than are passed: the gradients are then these
        keys' share. A row of LSE +inf or -inf takes and gives none.
        """
        dtype = _backward_dtype(q)
        tensors = [_readable(x, dtype).transpose(1, 2) for x in (grad_out, q, k, v, out)]
        # exp(score - inf) is 0, and the row drops out of every sum.
        rows = lse.to(_accumulate_dtype(q)).masked_fill(lse == -inf, inf).transpose(1, 2)
        added = None if mask is None else mask.to(dtype)
        grads = self.backward_kernel(*tensors, rows, 0.0, causal, attn_mask=added, scale=scale)
        return tuple(grad.transpose(1, 2) for grad in grads)


def _accumulate_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _backward_dtype(q: Tensor) -> torch.dtype:
    if q.dtype == torch.bfloat16 and q.size(1) >= _NATIVE_BACKWARD_ROWS:
        return q.dtype
    return _accumulate_dtype(q)


def _readable(x: Tensor, dtype: torch.dtype) -> Tensor:
    x = x.to(dtype)
    # Rows closer together than they are long (an expanded tensor) would be read by a slow product.
    return x if x.stride(-1) == 1 and x.stride(1) >= x.size(-1) else x.contiguous()
