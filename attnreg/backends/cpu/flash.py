"""Torch's CPU flash kernel, corrected to keep the contract of `attnreg.core.contract.backend`.

README.md lists the differences that are corrected here. An empty query or key would end the process: callers
must not pass any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnreg.core.contract.spec import LEAST_SCALE
from attnreg.core.torchlib import captured
from attnreg.core.torchlib.modes import resolved
from attnreg.core.torchlib.nan_rows import show_nan

# In a band (low, high) row i sees key j if low <= j - i <= high.
Band = tuple[int, int]

_FORWARD = "_scaled_dot_product_flash_attention_for_cpu"


class Flash(NamedTuple):
    """The two captured kernels.

    Query, key, value, output and gradients are (B, H, S, D), in one dtype and never empty. The LSE is (B, H,
    S) in `lse_dtype`. A `bias` is as `additive` returns it.
    """

    forward_kernel: Callable[..., Any]
    backward_kernel: Callable[..., Any]

    @classmethod
    def captured(cls) -> Flash:
        """Return torch's own kernels, as captured before attnreg's routers covered them."""
        return cls(*(captured.kernel(op, "CPU") for op in (_FORWARD, f"{_FORWARD}_backward")))

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        band: Band | None = None,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return output (B, H, S_q, D_v), in the query's dtype, and LSE (B, H, S_q), in `lse_dtype`.

        Query, key and value are (B, H, S, D) in one floating-point dtype. Row i sees key j if `j - i` is
        within the `band`; without one it sees all keys. `bias` broadcasts to (B, H, S_q, S_k), as `additive`
        returns it.
        """
        causal, mask = _mask(q, k, band, bias)
        if causal and scale < LEAST_SCALE:
            # The kernel multiplies the -inf of its causal mask by the scale, too: NaN, or hidden keys count.
            q, scale = _above_zero(q, scale)
        out, lse = self.forward_kernel(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
        show_nan(out, lse, q, k, causal, mask)
        if bias is not None and mask is not None:
            lse = lse.masked_fill((mask == -inf).all(-1), -inf)
        return out, lse

    def backward(
        self, tensors: Sequence[Tensor], scale: float, band: Band | None = None, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value, in their shapes and dtype.

        `tensors` are the output's gradient, query, key, value, output, each (B, H, S, D), and the LSE (B, H,
        S_q). Output and LSE may belong to more keys than are passed: the gradients are then the share of the
        passed keys. Scale, band and bias are as in `forward`.
        """
        grad_out, q, k, v, out, lse = tensors
        causal, mask = _mask(q, k, band, bias)
        if bias is not None:
            # exp(score - inf) is 0, so that the row contributes to no sum.
            lse = lse.masked_fill(lse == -inf, inf)
        sign = 1.0
        if causal and scale < LEAST_SCALE:
            sign = -1.0 if scale <= -LEAST_SCALE else 0.0
            q, scale = _above_zero(q, scale)
        grad_q, grad_k, grad_v = self.backward_kernel(
            grad_out, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale
        )
        return grad_q if sign == 1.0 else grad_q * sign, grad_k, grad_v


def lse_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of the LSE, in which the backward is computed, for a query of any shape."""
    return torch.promote_types(x.dtype, torch.float32)


def forward_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of a forward's computation, for a query of any shape.

    It isn't float16, whose products are up to ten times slower.
    """
    return x.dtype if x.dtype == torch.bfloat16 else lse_dtype(x)


def readable(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor (B, S, H, D) as (B, H, S, D) in `dtype`, with a layout that the kernels can read."""
    x = resolved(x).to(dtype)
    # Overlapping rows (of an expanded tensor) would be multiplied by a slow product.
    return (x if x.stride(-1) == 1 and x.stride(1) >= x.size(-1) else x.contiguous()).transpose(1, 2)


def additive(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a bias in the kernels' form: four dimensions, in `dtype`, added to the scores.

    `bias` broadcasts to (B, H, S_q, S_k); a boolean bias is False where keys are hidden.
    """
    if bias is None:
        return None
    bias = resolved(bias)
    bias = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
    if bias.dtype == torch.bool:
        return torch.zeros_like(bias, dtype=dtype).masked_fill_(~bias, -inf)
    return bias.to(dtype).contiguous()


def _above_zero(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """Return a query and a scale above 0 that produce the same scores as `q` and `scale`."""
    return (-q, -scale) if scale <= -LEAST_SCALE else (q * 0.0, 1.0)


def _mask(q: Tensor, k: Tensor, band: Band | None, bias: Tensor | None) -> tuple[bool, Tensor | None]:
    """Return whether the kernel's own causal mask (aligned top-left) suffices, and else a mask."""
    if band is None:
        return False, bias
    rows, keys = q.size(2), k.size(2)
    if bias is None and band[0] <= 1 - rows and band[1] == 0:
        return True, None
    distance = torch.arange(keys, device=q.device) - torch.arange(rows, device=q.device)[:, None]
    hidden = ((distance < band[0]) | (distance > band[1]))[None, None]
    base = q.new_zeros(hidden.shape) if bias is None else bias
    return False, base.masked_fill(hidden, -inf)
