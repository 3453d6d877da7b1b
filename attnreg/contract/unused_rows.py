"""Rows that no sequence counts, and the results of calls without keys.

Kernels load whole tiles. A tile that ends beyond its sequence also loads the rows after it, at a weight of
zero, and zero times NaN is NaN. So for some kernels rows that no query may see have to be finite, whatever
the caller has left there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnreg.contract.backend import Call
from attnreg.contract.offsets import derived
from attnreg.torchlib.layout import stream_of


def find_unused(query: Tensor, key: Tensor, call: Call) -> tuple[Tensor | None, Tensor | None]:
    """Return masks of the query rows and key rows that no sequence counts; None if there can't be any."""
    if call.cu_seqlens_q is None and call.seqused_k is None:
        return None, None
    stream = stream_of(query) if query.is_cuda else 0
    purpose = ("unused rows", call.block_table is None, query.shape[:-2], key.shape[:-2])
    return derived(call, stream, purpose, lambda: _find(query, key, call))


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
    return queries, rows >= ends[torch.searchsorted(cu_seqlens_k[1:].contiguous(), rows, right=True)]


def empty_results(query: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Return output and LSE of rows that see no key."""
    *rows, heads, _ = query.shape
    shape = (heads, *rows) if call.varlen else (rows[0], heads, rows[1])
    out = query.new_zeros((*rows, heads, value.shape[-1]))
    return out, query.new_full(shape, -torch.inf, dtype=torch.float32)


def _past(tokens: int, offsets: Tensor) -> Tensor:
    return _arange(tokens, offsets) >= offsets[-1]


def _arange(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, dtype=like.dtype, device=like.device)
