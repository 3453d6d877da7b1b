"""Offsets of sequences that are all equally long, of which the host knows the values.

flash-attn's functions make packed calls of dense batches with them. What a backend has to read back of other
offsets is known of these, in a CUDA graph, too.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from attnreg.core.torchlib.layout import stream_of
from attnreg.core.torchlib.modes import is_plain

_lengths: WeakIdKeyDictionary = WeakIdKeyDictionary()


def regular_offsets(batch: int, length: int, like: Tensor, dtype: torch.dtype = torch.int32) -> Tensor:
    """Return the offsets, (B + 1,) on the device of `like`, of a batch of equally long sequences.

    The same tensor for the same sizes, so that what is known of it needn't be found out in each call.
    """
    if torch.compiler.is_compiling() or not is_plain(like):
        return _made(batch, length, like.device, dtype)
    if not like.is_cuda:
        return _kept(batch, length, like.device, dtype, 0)
    if torch.cuda.is_current_stream_capturing():  # the memory would be the graph's
        return _noted(_made(batch, length, like.device, dtype), length)
    return _kept(batch, length, like.device, dtype, stream_of(like))


def regular_length(offsets: Tensor) -> int | None:
    """Return how long each sequence is by offsets that `regular_offsets` made; None of others.

    Offsets are integers (B + 1,).
    """
    length: int | None = _lengths.get(offsets)  # type: ignore[no-untyped-call]
    return length


def fills(offsets: Tensor | None, rows: int) -> bool:
    """Whether it is known of offsets that so many rows all belong to a sequence.

    Offsets are integers (B + 1,), or None.
    """
    if offsets is None or (length := regular_length(offsets)) is None:
        return False
    return length * (len(offsets) - 1) == rows


@functools.lru_cache(maxsize=64)
def _kept(batch: int, length: int, device: torch.device, dtype: torch.dtype, stream: int) -> Tensor:
    """Return offsets; of each stream its own, as another's may not have been computed yet."""
    with torch.inference_mode(False):  # they have to serve calls outside of it, too
        return _noted(_made(batch, length, device, dtype), length)


def _made(batch: int, length: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.arange(batch + 1, dtype=dtype, device=device) * length


def _noted(offsets: Tensor, length: int) -> Tensor:
    _lengths[offsets] = length
    return offsets
