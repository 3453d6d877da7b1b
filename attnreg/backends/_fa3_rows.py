"""Rows that belong to no sequence, and tensors that FA3 can read.

Its kernels load whole tiles. A tile that ends beyond its sequence takes the rows after it along, at a
weight of zero, and zero times NaN is NaN. So what no query may see is set to zero before; that costs
a copy, as only the GPU knows where a packed batch ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from attnreg.backend import Call

__all__ = ["blank", "keys_past", "rows_past"]


def rows_past(packed: Tensor, offsets: Tensor | None) -> Tensor | None:
    """Return which rows come after the last sequence; None for a dense call."""
    if offsets is None:
        return None
    return torch.arange(packed.shape[0], device=offsets.device) >= offsets[-1]


def keys_past(key: Tensor, call: Call) -> Tensor | None:
    """Return which keys no query may see, whatever the mask; None where there can't be any."""
    offsets, used = call.cu_seqlens_k, call.seqused_k
    if call.block_table is not None:
        return None
    if used is None:
        return rows_past(key, offsets)
    if offsets is None:
        return torch.arange(key.shape[1], device=key.device) >= used[:, None]
    rows = torch.arange(key.shape[0], device=key.device, dtype=offsets.dtype)
    # The rows after the last sequence count as one more, of which nothing is used.
    ends = torch.cat((offsets[:-1] + used, offsets.new_zeros(1)))
    return rows >= ends[torch.searchsorted(offsets[1:].contiguous(), rows, right=True)]


def blank(rows: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors with zeros in those rows; themselves where there are none."""
    if rows is None:
        return tensors
    return tuple(tensor.masked_fill(rows[..., None, None], 0.0) for tensor in tensors)
