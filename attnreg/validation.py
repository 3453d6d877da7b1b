"""Checks of a call's tensors against the contract: an error that says what was got and expected.

`check` reads shapes, dtypes and devices only, so it runs once per kind of call, when its decision
is made. `check_offsets` reads values, which costs nothing on a CPU and would cost a sync elsewhere.
"""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING

import torch

from attnreg.errors import InvalidInputError

if TYPE_CHECKING:
    from torch import Tensor

    from attnreg.backend import Call

__all__ = ["check", "check_offsets", "check_scale"]


def check(query: Tensor, key: Tensor, value: Tensor, call: Call) -> None:
    """Refuse a call that contradicts itself.

    Raises:
        InvalidInputError: a rank, dtype, device, head count or length doesn't fit.
    """
    tensors = {"query": query, "key": key, "value": value}
    _check_kind(tensors)
    rank = 3 if call.varlen else 4
    ranks = (rank, 4, 4) if call.block_table is not None else (rank, rank, rank)
    for (name, tensor), expected in zip(tensors.items(), ranks, strict=True):
        if tensor.dim() != expected:
            layout = "(tokens, heads, head_dim)" if expected == 3 else "(batch, length, heads, head_dim)"
            raise _wrong(name, f"shape {tuple(tensor.shape)}", f"{expected} dimensions {layout}")
    if query.shape[-1] != key.shape[-1]:
        raise _wrong("head_dim", f"{query.shape[-1]} for query and {key.shape[-1]} for key", "equal ones")
    if key.shape[:-1] != value.shape[:-1]:
        raise _wrong("key and value", f"shapes {tuple(key.shape)} and {tuple(value.shape)}", "equal lengths")
    heads_q, heads_k = query.shape[-2], key.shape[-2]
    if heads_k == 0 or heads_q % heads_k:
        raise _wrong("heads", f"{heads_q} for query and {heads_k} for key", "a multiple")
    if call.varlen:
        _check_varlen(query, call)
    elif query.shape[0] != key.shape[0]:
        raise _wrong("batch", f"{query.shape[0]} for query and {key.shape[0]} for key", "equal ones")


def _check_kind(tensors: dict[str, Tensor]) -> None:
    """Check that all live on one device in one floating dtype."""
    for what in ("dtype", "device"):
        if len({getattr(tensor, what) for tensor in tensors.values()}) > 1:
            got = ", ".join(f"{name} {getattr(tensor, what)}" for name, tensor in tensors.items())
            raise _wrong(what, got, f"one {what}")
    dtype = tensors["query"].dtype
    if not dtype.is_floating_point:
        raise _wrong("dtype", str(dtype), "a floating-point dtype")


def _check_varlen(query: Tensor, call: Call) -> None:
    rows = {"cu_seq_q": call.cu_seqlens_q, "cu_seq_k": call.cu_seqlens_k, "seqused_k": call.seqused_k}
    for name, offsets in rows.items():
        if offsets is not None:
            _check_integers(name, offsets, query, rank=1)
    if call.block_table is not None:
        _check_integers("block_table", call.block_table, query, rank=2)
    elif call.cu_seqlens_k is None:
        raise _wrong("cu_seq_k", "None", "a tensor (None goes with a block_table)")
    batch = len(call.cu_seqlens_q) - 1 if call.cu_seqlens_q is not None else 0
    if batch < 0:
        raise _wrong("cu_seq_q", "no element", "batch + 1 offsets, the first of them 0")
    lengths = {"cu_seq_k": (call.cu_seqlens_k, batch + 1), "seqused_k": (call.seqused_k, batch)}
    for name, (offsets, expected) in {**lengths, "block_table": (call.block_table, batch)}.items():
        if offsets is not None and offsets.shape[0] != expected:
            raise _wrong(name, f"{offsets.shape[0]} rows", f"{expected}, as cu_seq_q has {batch + 1} offsets")
    for name, longest in (("max_q", call.max_q), ("max_k", call.max_k)):
        if longest < 0:
            raise _wrong(name, str(longest), "0 or more")


def _check_integers(name: str, tensor: Tensor, query: Tensor, rank: int) -> None:
    if tensor.dtype != torch.int32:
        raise _wrong(name, str(tensor.dtype), "torch.int32")
    if tensor.device != query.device:
        raise _wrong(name, f"a tensor on {tensor.device}", f"{query.device}, where the query is")
    if tensor.dim() != rank:
        raise _wrong(name, f"shape {tuple(tensor.shape)}", f"{rank} dimension{'s' * (rank > 1)}")


def check_offsets(query: Tensor, key: Tensor, call: Call) -> None:
    """Check the values of a varlen call's offsets; for tensors whose values are at hand.

    Offsets may end before the last token (the rest is output 0 and gradient 0), never after it.

    Raises:
        InvalidInputError: they don't start at 0, decrease, end past the last token, or a sequence
            is longer than `max_q` or `max_k` says.
    """
    global _checked
    offsets_q, offsets_k = call.cu_seqlens_q, call.cu_seqlens_k
    if offsets_q is None:
        return
    now = (len(query), len(key), call.max_q, call.max_k, _version(offsets_q))
    last_q, last_k, last = _checked
    if last_q is offsets_q and last_k is offsets_k and last == now and now[-1] >= 0:
        return
    _check_values(offsets_q.tolist(), len(query), call.max_q, "q")
    shared = offsets_k is offsets_q and len(key) == len(query) and call.max_k == call.max_q
    if offsets_k is not None and call.block_table is None and not shared:
        _check_values(offsets_k.tolist(), len(key), call.max_k, "k")
        now = (*now[:-1], -1)
    _checked = (offsets_q, offsets_k, now)


# The layers of a model share their offsets, so what was checked last is what comes next. Only where
# query and key share them, too: that is self-attention, and one version to compare.
_checked: tuple[Tensor | None, Tensor | None, tuple[int, ...]] = (None, None, ())


def _version(tensor: Tensor) -> int:
    """Return how often a tensor was written to; -1 for an inference tensor, which doesn't count."""
    try:
        return tensor._version
    except RuntimeError:
        return -1


def _check_values(offsets: list[int], tokens: int, longest: int, side: str) -> None:
    if offsets[0] != 0:
        raise _wrong(f"cu_seq_{side}", f"first offset {offsets[0]}", "0")
    if sorted(offsets) != offsets:
        at = next(i for i in range(1, len(offsets)) if offsets[i] < offsets[i - 1])
        raise _wrong(f"cu_seq_{side}", f"{offsets[at]} after {offsets[at - 1]} at index {at}", "no decrease")
    if offsets[-1] > tokens:
        raise _wrong(
            f"cu_seq_{side}", f"last offset {offsets[-1]}", f"at most {tokens}, the tokens there are"
        )
    most = max(map(operator.sub, offsets[1:], offsets), default=0)
    if most > longest:
        raise _wrong(f"max_{side}", str(longest), f"at least {most}, the longest sequence")


def check_scale(scale: float) -> None:
    """Check a softmax scale: any finite number, zero and negative ones included.

    Raises:
        InvalidInputError: it is NaN or infinite.
    """
    if not math.isfinite(scale):
        raise _wrong("scale", str(scale), "a finite number")


def _wrong(what: str, got: str, expected: str) -> InvalidInputError:
    return InvalidInputError(f"{what}: got {got}, expected {expected}")
