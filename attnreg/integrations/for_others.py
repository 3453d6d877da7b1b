"""Attention of transformers' layers in a call that stands for several inputs: jit.trace, vmap, functionalize.

A recorded call repeats PyTorch's operations; every other value would be a constant of the recording. So such
calls are dense, by PyTorch's own function, and no mask is read back.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnreg.errors import UnsupportedInputError
from attnreg.integrations.masked import apart, masked
from attnreg.integrations.packing import LayerOptions, Window, starts_of_positions
from attnreg.integrations.shared_mask import SharedMask


def attend_for_others(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: SharedMask | Tensor | None,
    window: Window,
    options: LayerOptions,
    others: dict[str, Any],
) -> Tensor:
    """Compute a layer's call.

    Args:
        query: (B, H, S_q, D), floating point.
        key: (B, H_k, S_k, D), of the same dtype.
        value: (B, H_k, S_k, D_v), of the same dtype.
        mask: a shared mask, or a tensor (B, 1, S_q, S_k) as for `masked`, or None.
        window: (left, right), aligned bottom-right; -1 is no bound.
        options: the layer's dropout, scale, softcap and sinks.
        others: the layer's further arguments.

    Returns:
        The output (B, S_q, H, D_v).

    Raises:
        UnsupportedInputError: the call has offsets, whose number would be a constant of the recording.
    """
    if others.get("cu_seq_lens_q") is not None:
        raise UnsupportedInputError(
            "cu_seq_lens_q: got offsets in torch.jit.trace, vmap or functionalize, or on the meta device, "
            "expected attention_mask or position_ids, or torch.export"
        )
    positions = others.get("position_ids")
    if isinstance(mask, SharedMask):
        dense = mask.dense_apart(positions)
    elif mask is not None:
        dense = mask
    elif window == (-1, -1) and not options.softcap and options.sinks is None:
        is_grouped = bool(query.shape[1] != key.shape[1])  # a trace has tensors for sizes
        out = F.scaled_dot_product_attention(
            query, key, value, dropout_p=options.dropout, scale=options.scale, enable_gqa=is_grouped
        )
        return out.transpose(1, 2)
    else:
        # If a layer isn't causal, its positions may be a decoder's and its keys an encoder's.
        dense = mask_of(query, key, window, positions if window[1] == 0 else None)
    return masked(query, key, value, dense, options)


def mask_of(query: Tensor, key: Tensor, window: Window, positions: Tensor | None) -> Tensor:
    """Return a mask for a call that has none: bool (1 or B, 1, S_q, S_k), true where a key is seen."""
    batch, length_q, length_k = query.shape[0], query.shape[2], key.shape[2]
    of_queries = torch.arange(length_q, device=query.device) + (length_k - length_q)
    ahead = torch.arange(length_k, device=query.device) - of_queries[:, None]
    visible = torch.ones_like(ahead, dtype=torch.bool)
    if window[0] != -1:
        visible = visible & (ahead >= -window[0])
    if window[1] != -1:
        visible = visible & (ahead <= window[1])
    return apart(visible[None, None], starts_of_positions(positions, (batch, length_q, length_k)))
