"""FA2: FlashAttention 2, the CUDA kernels that come with torch.

They sit below `aten::_flash_attention_forward` and its backward, whose convention is the contract's
but for the LSE of a row without a key (+inf there, -inf here) and rows past the last offset, which
the kernels never write.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attnreg import native
from attnreg.backend import Backend, Call, Kernels
from attnreg.capabilities import Capabilities, Range

if TYPE_CHECKING:
    from torch import Tensor

    from attnreg.spec import AttentionSpec

__all__ = ["BACKEND"]

OP = "_flash_attention_{}"

# torch/aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp: compute capability 8.0 on,
# fp16 and bf16, head dims in steps of 8 up to 256, equal for value and query.
FORWARD = Capabilities(
    devices=("cuda",),
    dtypes=("float16", "bfloat16"),
    compute_capability=((8, 0), (12, 1)),
    head_dim=Range(8, 256, 8),
    varlen=True,
    gqa=True,
    causal=True,
    window=True,
    deterministic=True,
    capture=True,
)
BACKWARD = FORWARD


def _unavailable() -> str | None:
    if not torch.cuda.is_available():
        return "torch finds no CUDA GPU here"
    if not torch.backends.cuda.is_flash_attention_available():
        return "this torch was built without its flash attention kernels"
    return None


def _refuses(spec: AttentionSpec) -> tuple[str, ...]:
    reasons = []
    left, right = spec.window
    if left >= 0 and right < 0 and spec.max_k < spec.max_q - 1:
        # The kernel takes an open right bound for one of max_k, which then hides keys.
        reasons.append(
            f"window {spec.window} must not meet more queries than keys, got {spec.max_q} and {spec.max_k}"
        )
    largest = max(spec.tokens_q * spec.heads_q, spec.tokens_k * spec.heads_k) * spec.head_dim
    if spec.varlen and largest >= 2**31:
        reasons.append(f"packed tensors must have fewer than 2**31 elements, got {largest}")
    return tuple(reasons)


def _load() -> Kernels:
    run_forward = native.kernel(OP.format("forward"), "CUDA")
    run_backward = native.kernel(OP.format("backward"), "CUDA")

    def forward(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        if _nothing_to_do(query, key):
            return _empty(query, value, call)
        arguments = map(_readable, (query, key, value))
        out, lse, *_ = run_forward(*arguments, *_masks(query, key, call), False, **_options(call))
        return _zero_tail(out, call.cu_seqlens_q), _contract_lse(lse, call)

    def backward(
        grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, call: Call
    ) -> tuple[Tensor, Tensor, Tensor]:
        if _nothing_to_do(query, key):
            return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
        # This kernel knows a row without a key by an LSE of +inf.
        lse = torch.where(lse == -torch.inf, torch.inf, lse)
        nothing = torch.empty(2, dtype=torch.uint64, device=query.device)
        arguments = map(_readable, (grad_out, query, key, value, out))
        grads = run_backward(
            *arguments, lse, *_masks(query, key, call), nothing, nothing[0], **_options(call)
        )
        offsets = (call.cu_seqlens_q, call.cu_seqlens_k, call.cu_seqlens_k)
        grad_q, grad_k, grad_v = (_zero_tail(grad, ends) for grad, ends in zip(grads, offsets, strict=True))
        return grad_q, grad_k, grad_v

    return Kernels(forward, backward)


def _masks(query: Tensor, key: Tensor, call: Call) -> tuple[Any, ...]:
    """Return the offsets, the longest lengths, dropout and is_causal, as both ops order them."""
    # With one query per sequence and fewer key heads the kernel folds heads into rows, and then
    # takes no empty sequence; a longest length of 2 keeps it from that.
    folds = call.varlen and call.max_q == 1 and query.shape[-2] != key.shape[-2]
    return call.cu_seqlens_q, call.cu_seqlens_k, 2 if folds else call.max_q, call.max_k, 0.0, call.causal


def _options(call: Call) -> dict[str, Any]:
    return {"scale": call.scale, "window_size_left": call.window[0], "window_size_right": call.window[1]}


def _nothing_to_do(query: Tensor, key: Tensor) -> bool:
    return query.numel() == 0 or key.numel() == 0


def _empty(query: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    out = query.new_zeros((*query.shape[:-1], value.shape[-1]))
    shape = query.shape[:-1]
    lse_shape = (shape[1], shape[0]) if call.varlen else (shape[0], shape[2], shape[1])
    return out, query.new_full(lse_shape, -torch.inf, dtype=torch.float32)


def _readable(x: Tensor) -> Tensor:
    """Return a tensor that sixteen-byte loads along the head dim can read; a copy only where needed."""
    width = 16 // x.element_size()
    aligned = x.data_ptr() % 16 == 0 and all(step % width == 0 for step in x.stride()[:-1])
    return x if aligned and x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)


def _contract_lse(lse: Tensor, call: Call) -> Tensor:
    lse = torch.where(lse == torch.inf, -torch.inf, lse)
    return (
        lse
        if call.cu_seqlens_q is None
        else lse.masked_fill_(_tail(lse.shape[-1], call.cu_seqlens_q), -torch.inf)
    )


def _zero_tail(packed: Tensor, offsets: Tensor | None) -> Tensor:
    """Zero the rows past the last offset, which the kernel has never written."""
    if offsets is None:
        return packed
    return packed.masked_fill_(_tail(packed.shape[0], offsets)[:, None, None], 0.0)


def _tail(tokens: int, offsets: Tensor) -> Tensor:
    return torch.arange(tokens, device=offsets.device) >= offsets[-1]


BACKEND = Backend(
    name="FA2",
    forward=FORWARD,
    backward=BACKWARD,
    load=_load,
    unavailable=_unavailable,
    version=lambda: torch.__version__,
    refuses=_refuses,
    priority=10,
)
