"""Attention of transformers' layers where one call is for several inputs: jit.trace, vmap, functionalize.

Whatever PyTorch's operations don't say would stay what it is in the call that is recorded. So such calls are
dense ones, by PyTorch's own function, and nothing is read back of their masks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnreg.errors import UnsupportedInputError
from attnreg.integrations.masked import apart, masked
from attnreg.integrations.packing import Options, Window, starts_of_positions
from attnreg.integrations.shared_mask import SharedMask


def attend_for_others(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: SharedMask | Tensor | None,
    window: Window,
    options: Options,
    others: dict[str, Any],
) -> Tensor:
    """Compute a layer's call: (B, S, H, D_v) of (B, H, S, D).

    Raises:
        UnsupportedInputError: the call has offsets, whose number would stay the same.
    """
    if others.get("cu_seq_lens_q") is not None:
        raise UnsupportedInputError(
            "cu_seq_lens_q: got offsets in torch.jit.trace, vmap or functionalize, expected attention_mask "
            "or position_ids, or torch.export"
        )
    positions = others.get("position_ids")
    if isinstance(mask, SharedMask):
        dense = mask.dense() if mask.structure is None else mask.dense_apart(positions)
    elif mask is not None:
        dense = mask
    elif window == (-1, -1) and not options.softcap and options.sinks is None:
        is_grouped = bool(query.shape[1] != key.shape[1])  # a trace has tensors for sizes
        out = F.scaled_dot_product_attention(
            query, key, value, dropout_p=options.dropout, scale=options.scale, enable_gqa=is_grouped
        )
        return out.transpose(1, 2)
    else:
        # Those of a layer that isn't causal may be a decoder's, and its keys an encoder's.
        dense = _mask_of(query, key, window, positions if window[1] == 0 else None)
    return masked(query, key, value, dense, options)


def _mask_of(query: Tensor, key: Tensor, window: Window, positions: Tensor | None) -> Tensor:
    """Return the mask of a call that has none, (1 or B, 1, S_q, S_k)."""
    batch, length_q, length_k = query.shape[0], query.shape[2], key.shape[2]
    of_queries = torch.arange(length_q, device=query.device) + (length_k - length_q)
    ahead = torch.arange(length_k, device=query.device) - of_queries[:, None]
    seen = torch.ones_like(ahead, dtype=torch.bool)
    if window[0] != -1:
        seen = seen & (ahead >= -window[0])
    if window[1] != -1:
        seen = seen & (ahead <= window[1])
    return apart(seen[None, None], starts_of_positions(positions, (batch, length_q, length_k)))
