"""The same documents in two shapes: packed without padding, and padded to the longest.

A `Layout` holds all that a model needs to train on them; the model can't tell which of the two it
is given. Each is written as its user would write it.
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

__all__ = ["IGNORED", "Layout", "packed", "padded"]

# The target of a place that holds no byte; what `cross_entropy` leaves out unless told otherwise.
IGNORED = -100


class Layout(NamedTuple):
    """One batch of documents as a model sees it.

    Attributes:
        tokens: bytes, any shape.
        positions: the place of each in its document; broadcasts to `tokens`.
        targets: the byte that follows each.
        attend: causal attention of query, key and value, each (*tokens.shape, heads, head dim),
            within each document.
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
    offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    longest = max(lengths)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = attnreg.varlen_attn(query, key, value, offsets, offsets, longest, longest, is_causal=True)
        assert isinstance(out, torch.Tensor)
        return out

    return Layout(tokens, positions, targets, attend)


def padded(documents: list[bytes], device: torch.device) -> Layout:
    """Fill a rectangle, (B, S), and attend through `F.scaled_dot_product_attention`.

    The padding comes last, where a causal mask hides it from all text, so the fast `is_causal` does.
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
