"""Rows that belong to no sequence: where they are, and copies of tensors with zeros in them.

FA4 loads whole tiles. A tile that ends beyond its sequence also loads the rows after it, at a weight of
zero, and zero times NaN is NaN. So rows that no query may see have to be finite, whatever the caller has
left there. Blanking them costs a copy, as only the GPU knows where a packed batch ends; once it has reported
that there are none (`contract.offsets.facts`), a batch costs nothing more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnreg.contract.offsets import derived, facts
from attnreg.torchlib.layout import stream_of

if TYPE_CHECKING:
    from torch import Tensor

    from attnreg.contract.backend import Call


def none_unused(query: Tensor, key: Tensor, call: Call) -> bool:
    """Whether it is known that every row belongs to a sequence and counts."""
    if call.cu_seqlens_q is None:
        return call.seqused_k is None
    return facts(call, len(query), len(key), _stream(query)).no_unused_rows


def find_unused(query: Tensor, key: Tensor, call: Call) -> tuple[Tensor | None, Tensor | None]:
    """Return masks of the query rows and key rows that no sequence counts; None if there can't be any."""
    purpose = ("FA4", call.block_table is None, query.shape[:-2], key.shape[:-2])
    return derived(call, _stream(query), purpose, lambda: _find(query, key, call))


def _find(query: Tensor, key: Tensor, call: Call) -> tuple[Tensor | None, Tensor | None]:
    cu_seqlens_q, cu_seqlens_k, used = call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_k
    queries = None if cu_seqlens_q is None else _past(query.shape[0], cu_seqlens_q)
    if call.block_table is not None:
        return queries, None
    if cu_seqlens_k is None:
        return queries, None if used is None else _arange(key.shape[1], used) >= used[:, None]
    if used is None:
        return queries, _past(key.shape[0], cu_seqlens_k)
    rows = _arange(key.shape[0], cu_seqlens_k)
    # One end more than there are sequences: that of the rows past the last, of which none counts.
    ends = torch.cat((cu_seqlens_k[:-1] + used, cu_seqlens_k.new_zeros(1)))
    return queries, rows >= ends[torch.searchsorted(cu_seqlens_k[1:], rows, right=True)]


def blanked(rows: Tensor | None, zeros: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return copies with zeros, taken from `zeros`, in these rows; without rows the tensors themselves."""
    if rows is None:
        return tensors
    # A view of a tensor that is filled already: a Python number would cost one more launch.
    rows, zero = rows[..., None, None], zeros.as_strided((), ())
    return tuple(torch.where(rows, zero, tensor) for tensor in tensors)


def empty_results(query: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Return output and LSE of rows that see no key.

    Also where the kernel writes the other rows: filling both first is one pass over the output and one
    launch each; clearing the rows past the last offset afterwards would be two passes and a mask.
    """
    *rows, heads, _ = query.shape
    shape = (heads, *rows) if call.varlen else (rows[0], heads, rows[1])
    out = query.new_zeros((*rows, heads, value.shape[-1]))
    return out, query.new_full(shape, -torch.inf, dtype=torch.float32)


def zero_gradient(tensor: Tensor) -> Tensor:
    """Return the gradient of a tensor that takes none."""
    return tensor.new_zeros(tensor.shape)


def _past(tokens: int, offsets: Tensor) -> Tensor:
    return _arange(tokens, offsets) >= offsets[-1]


def _arange(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, dtype=like.dtype, device=like.device)


def _stream(tensor: Tensor) -> int:
    return stream_of(tensor) if tensor.is_cuda else 0
