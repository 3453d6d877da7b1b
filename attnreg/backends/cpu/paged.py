"""Calls whose keys are in pages of a cache, for kernels that don't read pages: torch's, and every backward.

Keys and values are first gathered into a tensor with the longest sequence's length. `seqused_k` has the
number of keys of each sequence. Gradients of pages that sequences share are added up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnreg.backends.cpu.sequences import sequences_of
from attnreg.core.contract.backend import Call
from attnreg.errors import InvalidInputError

Results = tuple[Tensor, ...]


def gathered_forward(function: Callable[..., Results]) -> Callable[..., Any]:
    """Wrap a forward without pages so that it supports pages."""

    @functools.wraps(function)
    def forward(*arguments: Any) -> Results:
        *first, k, v, call = arguments
        if (table := call.block_table) is None or not k.numel():
            return function(*arguments)
        key, value, alone, _ = _gathered(first[-1], k, v, table, call)
        return function(*first, key, value, alone)

    return forward


def gathered_backward(function: Callable[..., Results]) -> Callable[..., Any]:
    """Wrap a backward without pages so that it supports pages."""

    @functools.wraps(function)
    def backward(*arguments: Any) -> Results:
        *first, k, v, out, lse, call = arguments
        if (table := call.block_table) is None or not k.numel():
            return function(*arguments)
        key, value, alone, rows = _gathered(first[-1], k, v, table, call)
        grad_q, *grads = function(*first, key, value, out, lse, alone)
        return grad_q, *(_scattered(grad, x, rows) for grad, x in zip(grads, (k, v), strict=True))

    return backward


def check_pages(k: Tensor, table: Tensor, call: Call) -> None:
    """Raise InvalidInputError if a call reads a page that doesn't exist.

    `k` is (pages, page size, H, D) in any dtype, `table` (B, pages of a sequence) of integers.
    """
    starts = torch.arange(table.size(1), device="cpu") * k.size(1)
    wanted = table[_lengths(k, table, call)[:, None] > starts]
    wrong = wanted[(wanted < 0) | (wanted >= k.size(0))]
    if wrong.numel():
        raise InvalidInputError(f"block_table: got page {int(wrong[0])}, expected 0 to {k.size(0) - 1}")


def _lengths(k: Tensor, table: Tensor, call: Call) -> Tensor:
    """Return the number of keys of each sequence, (B,) of integers."""
    used = call.seqused_k
    return table.new_full((len(table),), table.size(1) * k.size(1)) if used is None else used


def _gathered(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, call: Call
) -> tuple[Tensor, Tensor, Call, Tensor]:
    """Return keys, values and the call without pages, and the indices of their rows in the pages.

    Keys and values are (B, longest, H, D), or packed (B * longest, H, D); the indices are (B * longest,)
    int64.
    """
    sequences_of(q, k, call)  # checks the lengths
    check_pages(k, table, call)
    used, size = _lengths(k, table, call), k.size(1)
    longest = int(used.max()) if len(used) else 0
    place = torch.arange(longest, device="cpu")
    page, within = table.long()[:, place // size], place % size
    page = page.masked_fill(place >= used[:, None], 0)  # uncounted keys may be read from any page
    key, value, offsets = k[page, within], v[page, within], None
    if call.varlen:
        key, value = key.flatten(0, 1), value.flatten(0, 1)
        offsets = torch.arange(len(used) + 1, dtype=torch.int32, device="cpu") * longest
    alone = call._replace(block_table=None, seqused_k=used, cu_seqlens_k=offsets, max_k=longest)
    return key, value, alone, (page * size + within).flatten()


def _scattered(grad: Tensor, pages: Tensor, rows: Tensor) -> Tensor:
    """Return the gradient of pages; uncounted keys add a gradient of 0 to any page, which is harmless."""
    total = torch.zeros(pages.shape, dtype=torch.promote_types(grad.dtype, torch.float32), device="cpu")
    total.flatten(0, 1).index_add_(0, rows, grad.reshape(-1, *grad.shape[-2:]).to(total.dtype))
    return total.to(grad.dtype)
