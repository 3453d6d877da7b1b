"""Removes the padding of a batch and restores it, as `flash_attn.bert_padding` does."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnreg.core.torchlib.frames import leave_module_uncompiled
from attnreg.errors import InvalidInputError

# flash-attn's module imports these functions of einops, and programs such as verl import them from it.
_OF_EINOPS = ("rearrange", "repeat")


def __getattr__(name: str) -> Any:
    """Import a function of einops on first use, because attnreg itself doesn't need einops."""
    if name not in _OF_EINOPS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module("einops"), name)
    except ImportError as error:
        raise ImportError(
            f"flash_attn.bert_padding.{name} is a function of einops, which can't be imported ({error}); "
            "install it with pip install einops"
        ) from error


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Return the rows of `input`, (rows, ...) of any dtype, at `indices`, int64 (n,)."""
    return input.index_select(0, indices)  # its backward is faster than indexing's, which sorts


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return `index_first_axis`, and a view of `input`, for a residual connection.

    `input` is (rows, ...) of any dtype, `indices` int64 (n,).
    """
    return index_first_axis(input, indices), input.view_as(input)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Return `first_axis_dim` rows: `values`, (n, ...), at `indices`, int64 (n,), and zeros elsewhere."""
    return values.new_zeros((first_axis_dim, *values.shape[1:])).index_put((indices,), values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Return the rows of a padded batch that count, packed. Waits for the device.

    Args:
        hidden_states: (B, S, ...), of any dtype.
        attention_mask: (B, S), bool or integers, 1 or True for each row that counts.
        unused_mask: (B, S), 1 or True for rows that are kept though they don't count.

    Returns:
        Five values:
        - the rows, (T, ...);
        - their places in the padded batch, int64 (T,);
        - the sequences' offsets, int32 (B + 1,);
        - the length of the longest sequence;
        - the number of rows that count in each sequence, int32 (B,).

    Raises:
        InvalidInputError: `attention_mask` hasn't the first two dimensions of `hidden_states`.
    """
    if hidden_states.shape[:2] != attention_mask.shape:
        got = tuple(attention_mask.shape)
        expected = tuple(hidden_states.shape[:2])
        raise InvalidInputError(f"attention_mask: got shape {got}, expected {expected}, as hidden_states has")
    used = attention_mask.sum(-1, dtype=torch.int32)
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    longest = int(lengths.max()) if len(lengths) else 0
    offsets = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, offsets, longest, used


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Return a padded batch (B, S, ...) with rows (T, ...) at `indices`, int64 (T,), and zeros elsewhere."""
    rows = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return rows.view(batch, seqlen, *hidden_states.shape[1:])


leave_module_uncompiled(__name__)
