"""Kinds of calls: FA4 compiles each once, and this process remembers which it has run.

A kind holds what the package's compile keys read (`compile_key` in its interface.py) and what differs
between attnreg's calls; lengths enter as numbers of tiles. Calls of one kind never compile twice; two kinds
may share what was compiled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
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
    offsets = call.cu_seqlens_q
    return _kind(
        direction, query.device.index, query.dtype, query.shape[-1], value.shape[-1], query.shape[-2],
        key.shape[-2], call.window, offsets is not None, call.seqused_k is not None,
        None if call.block_table is None else key.shape[1], call.deterministic,
        query.shape[0] if offsets is None else len(offsets) - 1, call.max_q, call.max_k,
    )  # fmt: skip


def kind_of_spec(direction: str, spec: AttentionSpec) -> Kind:
    """Return the kind of the calls that a spec describes."""
    return _kind(
        direction, spec.device.index, getattr(torch, spec.dtype), spec.head_dim, spec.head_dim_v,
        spec.heads_q, spec.heads_k, spec.window, spec.varlen, spec.seqused_k, spec.page_size,
        spec.deterministic, spec.batch, spec.max_q, spec.max_k,
    )  # fmt: skip


def repeated_dims(*tensors: Tensor) -> Kind:
    """Return which dimensions of each tensor have stride 0, as expanded ones do: that is compiled in."""
    return tuple(
        tuple(step == 0 for step in strides) if 0 in strides else None
        for strides in (tensor.stride() for tensor in tensors)
    )


def _kind(
    direction: str,
    device: int | None,
    dtype: torch.dtype,
    head_dim: int,
    head_dim_v: int,
    heads_q: int,
    heads_k: int,
    window: tuple[int, int],
    varlen: bool,
    seqused_k: bool,
    page_size: int | None,
    deterministic: bool,
    batch: int,
    max_q: int,
    max_k: int,
) -> Kind:
    left, right = window
    group = heads_q // heads_k
    return (
        direction, device, dtype, head_dim, head_dim_v, group,
        left >= 0, right >= 0, left < 0 and right == 0,
        varlen, seqused_k, page_size, deterministic and direction == "backward",
        varlen and batch > MANY, _tiles(max_q), _tiles(max_q * group), _tiles(max_k),
    )  # fmt: skip


def _tiles(length: int) -> int:
    return (min(length, LONGEST + 1) + TILE - 1) // TILE
