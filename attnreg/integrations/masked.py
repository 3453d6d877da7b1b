"""Attention of transformers' layers with a dense mask, (B, 1, S_q, S_k), if sequences can't express it."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnreg.core.torchlib import versions
from attnreg.core.torchlib.frames import leave_module_uncompiled
from attnreg.errors import InvalidInputError
from attnreg.integrations.packing import LayerOptions, is_captured

# Without PyTorch's cuDNN kernel: the first call of cuDNN in a thread can't be captured, because it allocates
# memory (torch 2.11 on an H100).
_RECORDABLE = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def masked(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, options: LayerOptions, has_run: bool = True
) -> Tensor:
    """Compute a call with a dense mask.

    It runs by PyTorch's own function, or, with a softcap or sinks, which that lacks, by PyTorch operations.

    Args:
        query: (B, H, S_q, D), floating point.
        key: (B, H_k, S_k, D), of the same dtype.
        value: (B, H_k, S_k, D_v), of the same dtype.
        mask: (B, 1, S_q, S_k or more): bool, true where a key is seen, or floating-point numbers that are
            added to the scores.
        options: the layer's dropout, scale, softcap and sinks.
        has_run: whether such calls have run before; if not, a captured call avoids cuDNN's kernel.

    Returns:
        The output (B, S_q, H, D_v).

    Raises:
        InvalidInputError: the mask has another shape or dtype.
    """
    if mask.ndim != 4:
        raise InvalidInputError(f"attention_mask: got shape {tuple(mask.shape)}, expected (B, 1, S_q, S_k)")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise InvalidInputError(
            f"attention_mask: got {mask.dtype}, expected torch.bool, true where a key is seen, or numbers "
            "that are added to the scores"
        )
    mask = mask[..., : key.shape[2]]
    groups, by_scores = query.shape[1] // key.shape[1], bool(options.softcap) or options.sinks is not None
    # Up to torch 2.13 SDPA's `enable_gqa` leads to the math kernel on a GPU, with a mask.
    # Under torch.jit.trace sizes are tensors.
    is_grouped = bool(groups > 1) and versions.EFFICIENT_SHARES_HEADS and not by_scores
    if groups > 1 and not is_grouped:
        key, value = (_repeat_heads(x, groups) for x in (key, value))
    if by_scores:
        return _by_scores(query, key, value, mask, options).transpose(1, 2)
    with nullcontext() if has_run or not is_captured() else sdpa_kernel(_RECORDABLE):
        out = F.scaled_dot_product_attention(
            query, key, value, mask, dropout_p=options.dropout, scale=options.scale,
            enable_gqa=is_grouped,
        )  # fmt: skip
    return out.transpose(1, 2)


def joined(mask: Tensor, other: Tensor) -> Tensor:
    """Return a mask, (B, H, S_q, S_k), that says what two say: bool, or numbers to add to the scores."""
    if mask.dtype == torch.bool and other.dtype == torch.bool:
        return mask & other
    if other.dtype == torch.bool:
        return torch.where(other, mask, -torch.inf)
    return torch.where(mask, other, -torch.inf) if mask.dtype == torch.bool else mask + other


def apart(dense: Tensor, starts: Tensor | None) -> Tensor:
    """Hide keys of other documents in a bool mask (B, 1, S_q, S_k), by `starts`, bool (B, S)."""
    if starts is None:
        return dense
    numbers = starts.long().cumsum(-1)  # ONNX sums no bool
    behind = dense.shape[-1] - numbers.shape[-1]  # unused keys of a static cache
    of_keys = torch.nn.functional.pad(numbers, (0, behind))
    return dense.logical_and(numbers[:, None, :, None] == of_keys[:, None, None, :])


def _repeat_heads(x: Tensor, times: int) -> Tensor:
    """Repeat each head of (B, H_k, S, D), any dtype; returns (B, H_k * times, S, D)."""
    if versions.EXPORTS_REPEATED_HEADS or not torch.compiler.is_exporting():
        return x.repeat_interleave(times, 1)
    # In memory the heads come after the tokens, so that no stride of a head depends on the length.
    return x.transpose(1, 2).repeat_interleave(times, 2).transpose(1, 2)


def _by_scores(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, options: LayerOptions) -> Tensor:
    """Compute attention by PyTorch operations over the whole matrix of scores; no backend supports this."""
    scale = query.shape[-1] ** -0.5 if options.scale is None else options.scale
    scores = (query @ key.transpose(-1, -2)) * scale
    scores = scores if scores.dtype == torch.float64 else scores.float()
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    hidden = mask.logical_not() if mask.dtype == torch.bool else mask.isneginf()
    scores = scores.masked_fill(hidden, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if options.sinks is not None:
        sinks = options.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], -1)
    # A row that sees no key, such as padding, gives 0, as from SDPA.
    weights = scores.softmax(-1)[..., : key.shape[2]].masked_fill(hidden.all(-1, keepdim=True), 0.0)
    return F.dropout(weights, options.dropout).to(value.dtype) @ value


leave_module_uncompiled(__name__)
