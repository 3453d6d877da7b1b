"""Calls whose keys are in pages of a cache, for kernels that don't read pages: torch's, and every backward.

Keys and values are gathered into a tensor of the longest sequence's length first, and `seqused_k` says how
many of each sequence count. Gradients of pages that sequences share are added up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnreg.core.backends.cpu.sequences import sequences_of
from attnreg.core.contract.backend import Call
from attnreg.errors import InvalidInputError

Results = tuple[Tensor, ...]


def gathered_forward(function: Callable[..., Results]) -> Callable[..., Any]:
    """Return a forward that takes pages, of one that doesn't."""

    @functools.wraps(function)
    def forward(*given: Any) -> Results:
        *first, k, v, call = given
        if (table := call.block_table) is None or not k.numel():
            return function(*given)
        key, value, alone, _ = _gathered(first[-1], k, v, table, call)
        return function(*first, key, value, alone)

    return forward


def gathered_backward(function: Callable[..., Results]) -> Callable[..., Any]:
    """Return a backward that takes pages, of one that doesn't."""

    @functools.wraps(function)
    def backward(*given: Any) -> Results:
        *first, k, v, out, lse, call = given
        if (table := call.block_table) is None or not k.numel():
            return function(*given)
        key, value, alone, rows = _gathered(first[-1], k, v, table, call)
        grad_q, *grads = function(*first, key, value, out, lse, alone)
        return grad_q, *(_scattered(grad, x, rows) for grad, x in zip(grads, (k, v), strict=True))

    return backward


def check_pages(k: Tensor, table: Tensor, call: Call) -> None:
    """Raise an error if a page that a call reads isn't there."""
    starts = torch.arange(table.size(1), device="cpu") * k.size(1)
    wanted = table[_lengths(k, table, call)[:, None] > starts]
    wrong = wanted[(wanted < 0) | (wanted >= k.size(0))]
    if wrong.numel():
        raise InvalidInputError(f"block_table: got page {int(wrong[0])}, expected 0 to {k.size(0) - 1}")


def _lengths(k: Tensor, table: Tensor, call: Call) -> Tensor:
    """Return how many keys each sequence has."""
    used = call.seqused_k
    return table.new_full((len(table),), table.size(1) * k.size(1)) if used is None else used


def _gathered(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, call: Call
) -> tuple[Tensor, Tensor, Call, Tensor]:
    """Return keys, values and the call without pages, and from which rows of the pages they are."""
    sequences_of(q, k, call)  # checks the lengths
    check_pages(k, table, call)
    used, size = _lengths(k, table, call), k.size(1)
    longest = int(used.max()) if len(used) else 0
    place = torch.arange(longest, device="cpu")
    page, within = table.long()[:, place // size], place % size
    page = page.masked_fill(place >= used[:, None], 0)  # what isn't counted is read from anywhere
    key, value, offsets = k[page, within], v[page, within], None
    if call.varlen:
        key, value = key.flatten(0, 1), value.flatten(0, 1)
        offsets = torch.arange(len(used) + 1, dtype=torch.int32, device="cpu") * longest
    alone = call._replace(block_table=None, seqused_k=used, cu_seqlens_k=offsets, max_k=longest)
    return key, value, alone, (page * size + within).flatten()


def _scattered(grad: Tensor, pages: Tensor, rows: Tensor) -> Tensor:
    """Return the gradient of pages: that of keys which aren't counted is 0, wherever it is added."""
    total = torch.zeros(pages.shape, dtype=torch.promote_types(grad.dtype, torch.float32), device="cpu")
    total.flatten(0, 1).index_add_(0, rows, grad.reshape(-1, *grad.shape[-2:]).to(total.dtype))
    return total.to(grad.dtype)
