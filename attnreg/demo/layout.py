"""The same documents as a batch in two layouts: packed without padding, and padded to the longest.

A `Layout` has all that a model trains on, its attention included; so the model is the same for both.
Each layout is written as a user of attnreg or of plain torch would write it.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

import attnreg

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

# The target at padding: the default `ignore_index` of `cross_entropy`.
IGNORED = -100


class Layout(NamedTuple):
    """One batch of documents, as the model takes it.

    Attributes:
        tokens: bytes, any shape.
        positions: the index of each in its document; broadcasts to `tokens`.
        targets: the byte that follows each.
        attend: causal attention within each document; query, key and value are each
            (*tokens.shape, heads, head dim).
    """

    tokens: Tensor
    positions: Tensor
    targets: Tensor
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]


def packed(documents: list[bytes], device: torch.device) -> Layout:
    """Lay the documents end to end, (T,), and attend through `attnreg.varlen_attn`."""
    tokens, targets = (torch.cat(rows).to(device) for rows in _shifted(documents))
    lengths = [len(document) - 1 for document in documents]
    positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    longest = max(lengths)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = attnreg.varlen_attn(query, key, value, cu_seqlens, cu_seqlens, longest, longest, is_causal=True)
        assert isinstance(out, torch.Tensor)
        return out

    return Layout(tokens, positions, targets, attend)


def padded(documents: list[bytes], device: torch.device) -> Layout:
    """Pad the documents to the longest, (B, S), and attend through `F.scaled_dot_product_attention`.

    The padding is at the end, where a causal mask hides it from all text, so `is_causal` is enough.
    """
    rows, following = _shifted(documents)
    tokens = pad_sequence(rows, batch_first=True).to(device)
    targets = pad_sequence(following, batch_first=True, padding_value=IGNORED).to(device)
    positions = torch.arange(tokens.shape[1], device=device)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)

    return Layout(tokens, positions, targets, attend)


def _shifted(documents: list[bytes]) -> tuple[list[Tensor], list[Tensor]]:
    """Return each document without its last byte, and without its first."""
    rows = [torch.tensor(list(document)) for document in documents]
    return [row[:-1] for row in rows], [row[1:] for row in rows]
