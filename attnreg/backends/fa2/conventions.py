"""What flash-attn's kernels do differently from attnreg's contract, whichever provider brings them.

Empty calls, rows without a key and rows past the last offset are converted here. The provider only passes a
call's arguments on: torch's op, the package flash-attn, or a kernel from the hub.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from attnreg.backends.fa2.native import keeps_contract
from attnreg.core.contract.backend import Call
from attnreg.core.contract.lengths import Cut
from attnreg.core.contract.spec import AttentionSpec
from attnreg.core.launching.offsets import empty_results, is_empty
from attnreg.core.launching.regular import fills
from attnreg.core.launching.rows import clear_backward, clear_forward

MOST = 2**31  # the number of elements that 32 bits can't count


class Provider(Protocol):
    """What passes a call on to flash-attn's kernels, in their own conventions."""

    def forward(self, tensors: tuple[Tensor, ...], call: Call) -> tuple[Tensor, Tensor]:
        """Return output and LSE of (query, key, value).

        Tensors are (B, S, H, D) or packed (T, H, D). The LSE is float32, (B, H, S) or (H, T).
        """

    def backward(self, tensors: tuple[Tensor, ...], call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value, in their shapes and dtype.

        `tensors` are (grad_out, query, key, value, out, lse), in the layouts of `forward`: (B, S, H, D) or
        (T, H, D).
        """


def adapt(provider_of: Callable[[Call], Provider]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the forward and the backward of the contract; `provider_of` chooses who runs a call."""

    def forward(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        if is_empty(query, key, call):
            return empty_results(query, value, call)
        out, lse = provider_of(call).forward((query, key, value), call)
        return (out, lse) if keeps_contract(query, key, call) else _to_contract(out, lse, call)

    def backward(
        grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, call: Call
    ) -> tuple[Tensor, Tensor, Tensor]:
        if is_empty(query, key, call):
            return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
        provider = provider_of(call)
        if keeps_contract(query, key, call):
            return provider.backward((grad_out, query, key, value, out, lse), call)
        if call.cu_seqlens_q is not call.cu_seqlens_k or call.cu_seqlens_q is None:
            lse = torch.nan_to_num(lse, torch.nan, torch.inf, torch.inf)  # marks such rows for the kernels
        grad_q, grad_k, grad_v = provider.backward((grad_out, query, key, value, out, lse), call)
        if _has_offsets(call):
            clear_backward(grad_q, grad_k, grad_v, call.cu_seqlens_q, call.cu_seqlens_k)  # type: ignore[arg-type]
            return grad_q, grad_k, grad_v
        return (
            _zero_unused_rows(grad_q, call.cu_seqlens_q),
            _zero_unused_rows(grad_k, call.cu_seqlens_k),
            _zero_unused_rows(grad_v, call.cu_seqlens_k),
        )

    return forward, backward


def _to_contract(out: Tensor, lse: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Set rows without a key and unused rows to the contract's values, in place."""
    cu_seqlens_q, cu_seqlens_k = call.cu_seqlens_q, call.cu_seqlens_k
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        clear_forward(out, lse, cu_seqlens_q, cu_seqlens_k, call.window, call.seqused_k)
        return out, lse
    lse = lse.nan_to_num_(torch.nan, -torch.inf, -torch.inf)
    if call.cu_seqlens_q is None or fills(call.cu_seqlens_q, len(out)):
        return out, lse
    lse.masked_fill_(_unused(lse.shape[-1], call.cu_seqlens_q), -torch.inf)
    return _zero_unused_rows(out, call.cu_seqlens_q), lse


def _has_offsets(call: Call) -> bool:
    """Whether the lengths of both sides follow from their offsets."""
    return call.cu_seqlens_q is not None and call.cu_seqlens_k is not None and call.seqused_k is None


def _zero_unused_rows(packed: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Zero the rows past the last offset, which the kernels don't write, in place."""
    if cu_seqlens is None:
        return packed
    return packed.masked_fill_(_unused(packed.shape[0], cu_seqlens)[:, None, None], 0.0)


def _unused(tokens: int, cu_seqlens: Tensor) -> Tensor:
    return torch.arange(tokens, device=cu_seqlens.device) >= cu_seqlens[-1]


def against_card(spec: AttentionSpec) -> Iterator[str]:
    """Yield the reason against a backward for which a card has too little shared memory."""
    # torch/aten/src/ATen/native/transformers/cuda/sdp_utils.cpp
    small = spec.device.capability is not None and (
        (8, 6) <= spec.device.capability <= (8, 9) or spec.device.capability >= (12, 0)
    )
    if small and spec.head_dim > 192 and (spec.head_dim <= 224 or spec.dropout > 0.0):
        yield (
            "head_dim must be at most 192, or above 224 without dropout, on compute capability "
            f"8.6 to 8.9 and 12, got {spec.head_dim}"
        )


def against_size(spec: AttentionSpec) -> Iterator[str]:
    """Yield the reason against packed tensors whose elements 32 bits can't count."""
    largest = max(spec.tokens_q * spec.heads_q, spec.tokens_k * spec.heads_k) * spec.head_dim
    if spec.varlen and largest >= MOST:
        yield f"packed tensors must have fewer than 2**31 elements, got {largest}"


def cuts_of_size(spec: AttentionSpec) -> Iterator[Cut]:
    """Yield the lengths at which the reasons of `against_size` and `against_sums` change."""
    for tokens, heads in (("tokens_q", spec.heads_q), ("tokens_k", spec.heads_k)):
        yield Cut.of(tokens, at=-(-MOST // max(heads * spec.head_dim, 1)))
    width = spec.heads_q * rounded_dim(spec)
    yield Cut(((1, ("tokens_q",)), (128, ("batch",))), at=-(-MOST // max(width, 1)))


def against_sums(spec: AttentionSpec, what: str) -> Iterator[str]:
    """Yield the reason against a packed backward whose sums for dq begin beyond 32 bits.

    `what` names what has the package's kernel run it. csrc/flash_attn/src/flash_bwd_kernel.h up to 2.8.3
    computes in 32 bits where a sequence's sums begin. On overflow the kernel writes to any address, and the
    CUDA context is lost. Torch's kernels use 64 bits
    (https://github.com/Dao-AILab/flash-attention/pull/2260).
    """
    step = 32 if spec.head_dim <= 128 else 64
    sums = (spec.tokens_q + 128 * spec.batch) * spec.heads_q * rounded_dim(spec)
    if spec.varlen and sums >= MOST:
        yield (
            f"(tokens + 128 * sequences) * heads * head dim rounded up to {step} must be below 2**31 for "
            f"a packed backward with {what}, got {sums}"
        )


def rounded_dim(spec: AttentionSpec) -> int:
    """Return the head dim that the backward computes with."""
    step = 32 if spec.head_dim <= 128 else 64
    return -(-spec.head_dim // step) * step
