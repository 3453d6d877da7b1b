"""The arguments of the aten ops that attnreg routes, as torch 2.11 to 2.15 declare them.

A class for each op has the op's arguments as fields, in the op's order. `ensure` compares them with the
installed torch. A call with an argument that its class lacks runs on torch's own kernel. A moved argument is
an error.
"""

from __future__ import annotations

from collections import namedtuple
from typing import NamedTuple

from torch import Tensor


class FlashForward(NamedTuple):
    """`_flash_attention_forward`: (B, S, H, D), or (T, H, D) with offsets."""

    query: Tensor
    key: Tensor
    value: Tensor
    cum_seq_q: Tensor | None
    cum_seq_k: Tensor | None
    max_q: int
    max_k: int
    dropout_p: float
    is_causal: bool
    return_debug_mask: bool
    scale: float | None = None
    window_size_left: int | None = None
    window_size_right: int | None = None
    seqused_k: Tensor | None = None
    alibi_slopes: Tensor | None = None
    block_table: Tensor | None = None  # torch 2.12
    num_splits: int | None = None  # torch 2.12


# `_flash_attention_forward_no_dropout_inplace` (torch 2.12): the same, into `out`.
_fields, _defaults = ("out", *FlashForward._fields), tuple(FlashForward._field_defaults.values())
FlashForwardInplace = namedtuple("FlashForwardInplace", _fields, defaults=_defaults)  # type: ignore[misc]


class FlashBackward(NamedTuple):
    """`_flash_attention_backward`; both offsets are None for a dense call."""

    grad_out: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    logsumexp: Tensor
    cum_seq_q: Tensor | None
    cum_seq_k: Tensor | None
    max_q: int
    max_k: int
    dropout_p: float
    is_causal: bool
    rng_state: Tensor
    unused: Tensor
    scale: float | None = None
    window_size_left: int | None = None
    window_size_right: int | None = None


class SdpaCpuForward(NamedTuple):
    """`_scaled_dot_product_flash_attention_for_cpu`: (B, H, S, D), causal aligned top-left."""

    query: Tensor
    key: Tensor
    value: Tensor
    dropout_p: float = 0.0
    is_causal: bool = False
    attn_mask: Tensor | None = None
    scale: float | None = None


class SdpaCpuBackward(NamedTuple):
    """`_scaled_dot_product_flash_attention_for_cpu_backward`."""

    grad_out: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    logsumexp: Tensor
    dropout_p: float
    is_causal: bool
    attn_mask: Tensor | None = None
    scale: float | None = None


class CudnnForward(NamedTuple):
    """`_cudnn_attention_forward`: (B, H, S, D), or (T, H, D) with offsets."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_bias: Tensor | None
    cum_seq_q: Tensor | None
    cum_seq_k: Tensor | None
    max_q: int
    max_k: int
    compute_log_sumexp: bool
    dropout_p: float = 0.0
    is_causal: bool = False
    return_debug_mask: bool = False
    scale: float | None = None
    seqused_k: Tensor | None = None  # torch 2.14
    block_table: Tensor | None = None  # torch 2.14


class CudnnForwardInplace(NamedTuple):
    """`_cudnn_attention_forward_no_dropout_inplace` (torch 2.15): (T, H, D) with offsets, into `out`."""

    out: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    cum_seq_q: Tensor
    cum_seq_k: Tensor | None
    max_q: int
    max_k: int
    is_causal: bool = False
    scale: float | None = None
    seqused_k: Tensor | None = None
    block_table: Tensor | None = None


class CudnnBackward(NamedTuple):
    """`_cudnn_attention_backward`."""

    grad_out: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    logsumexp: Tensor
    philox_seed: Tensor
    philox_offset: Tensor
    attn_bias: Tensor | None
    cum_seq_q: Tensor | None
    cum_seq_k: Tensor | None
    max_q: int
    max_k: int
    dropout_p: float
    is_causal: bool
    scale: float | None = None


class EfficientForward(NamedTuple):
    """`_efficient_attention_forward`: (B, S, H, D), or (1, T, H, D) with offsets."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    dropout_p: float
    custom_mask_type: int
    compute_log_sumexp: bool = False
    scale: float | None = None
    seqlen_k: Tensor | None = None
    window_size: int | None = None


class EfficientBackward(NamedTuple):
    """`_efficient_attention_backward`."""

    grad_out_: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    out: Tensor
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    logsumexp: Tensor
    dropout_p: float
    philox_seed: Tensor
    philox_offset: Tensor
    custom_mask_type: int
    bias_requires_grad: bool
    scale: float | None = None
    num_splits_key: int | None = None
    window_size: int | None = None
    shared_storage_dqdkdv: bool = False

    @property
    def grad_out(self) -> Tensor:
        """The incoming gradient, under its name in the other backwards."""
        return self.grad_out_
