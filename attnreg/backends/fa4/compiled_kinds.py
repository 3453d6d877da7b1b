"""Kinds of calls: FA4 compiles each once, and this process remembers which it has run.

A kind has what the package's compile keys read (`compile_key` in its interface.py) and what differs
between attnreg's calls; lengths enter as numbers of tiles. Calls of one kind never compile twice; two kinds
may share what was compiled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnreg.contract.backend import Call
from attnreg.contract.spec import AttentionSpec

Kind = tuple[Any, ...]

# Tile edges are multiples of 16, none beyond 256; above 256 sequences one more kernel looks them up.
TILE, LONGEST, MANY = 16, 256, 256

# What has run in this process: kinds, and pairs of a kind and the `repeated_dims` of its tensors.
have_run: set[Kind] = set()


def kind_of(direction: str, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Kind:
    """Return the kind of a call."""
    offsets, group = call.cu_seqlens_q, query.shape[-2] // key.shape[-2]
    tensors = query.device.index, query.dtype, query.shape[-1], value.shape[-1], group
    page_size = None if call.block_table is None else key.shape[1]
    packed = None if offsets is None else len(offsets) - 1
    given = call.seqused_k is not None, call.grad_lse is not None, call.sinks is not None
    return _kind(direction, call, tensors, given, page_size, packed)


def kind_of_spec(direction: str, spec: AttentionSpec) -> Kind:
    """Return the kind of the calls that a spec describes."""
    dtype, group = getattr(torch, spec.dtype), spec.heads_q // spec.heads_k
    tensors = spec.device.index, dtype, spec.head_dim, spec.head_dim_v, group
    packed = spec.batch if spec.varlen else None
    given = spec.seqused_k, spec.grad_lse, spec.sinks
    return _kind(direction, spec, tensors, given, spec.page_size, packed)


def repeated_dims(*tensors: Tensor) -> Kind:
    """Return which dimensions of each tensor have stride 0, as expanded ones do: that is compiled in."""
    return tuple(
        tuple(step == 0 for step in strides) if 0 in strides else None
        for strides in (tensor.stride() for tensor in tensors)
    )


def _kind(
    direction: str,
    call: Call | AttentionSpec,
    tensors: tuple[Any, ...],
    given: tuple[bool, ...],
    page_size: int | None,
    packed: int | None,
) -> Kind:
    (left, right), (*_, group) = call.window, tensors
    return (
        direction, *tensors, *given, page_size, left >= 0, right >= 0, left < 0 and right == 0,
        direction == "backward" and (call.deterministic or call.batch_invariant),
        packed is not None, (packed or 0) > MANY,
        _tiles(call.max_q), _tiles(call.max_q * group), _tiles(call.max_k), call.softcap,
    )  # fmt: skip


def _tiles(length: int) -> int:
    return (min(length, LONGEST + 1) + TILE - 1) // TILE
