"""`key_ranges` on Hopper, as a mask function that the package compiles into its kernels (`mask_mod`).

The package's backward takes a table of blocks only for dense tensors. So a packed batch is one long sequence
to it, as to flex. Which keys of that sequence a query sees is in two tensors of bounds, which the mask
function reads. The table says which blocks of 128 queries and 128 keys have such keys, and which need no
mask.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import Tensor

from attnreg.core.contract.spec import Direction
from attnreg.core.launching import visible
from attnreg.core.launching.visible import Visible
from attnreg.errors import UnsupportedInputError


def options(direction: Direction, visible_keys: Visible, rows: tuple[int, int]) -> dict[str, Any]:
    """Return the keywords of one of the package's functions that say what each query sees.

    Args:
        direction: whose function it is.
        visible_keys: what the queries of the packed batch see.
        rows: how many queries and keys the batch has.

    Raises:
        UnsupportedInputError: the batch is so long that a block of its table is larger than the kernels'.
    """
    size = visible.block_size(*rows)
    if size != visible.BLOCK:
        raise UnsupportedInputError(
            f"packed tokens must be at most {visible.MOST_BLOCKS} blocks of {visible.BLOCK} queries and "
            f"{visible.BLOCK} keys with key_ranges, got {rows[0]} queries and {rows[1]} keys"
        )
    # Blocks of keys for each block of queries in a forward, and the other way round in a backward.
    table = map(_dense, visible_keys.table[:4] if direction == "forward" else visible_keys.table[4:])
    block_sparsity = import_module("flash_attn.cute.block_sparsity")
    bounds = [_along_queries(x[0]) for x in (visible_keys.low, visible_keys.high)]
    keywords = {
        "mask_mod": _in_ranges(len(bounds[0])),
        "aux_tensors": bounds,
        "block_sparse_tensors": block_sparsity.BlockSparseTensorsTorch(*table, block_size=(size, size)),
    }
    # The table is about queries, and not about the heads of a key head, which a forward would put into rows.
    return keywords | {"pack_gqa": False} if direction == "forward" else keywords


def _dense(x: Tensor) -> Tensor:
    """Return a contiguous tensor with the strides of its shape, also along dimensions of size 1."""
    return x.reshape(-1).view(x.shape)


def _along_queries(bounds: Tensor) -> Tensor:
    """Return int32 (R, S_q) with a note for the package, which can't tell by the strides of one query."""
    bounds = _dense(bounds)
    bounds.__leading_dim__ = 1  # type: ignore[attr-defined]
    return bounds


@functools.cache
def _in_ranges(count: int) -> Callable[..., Any]:
    """Return the function that says whether a key lies in any of the `count` ranges of its query.

    The package tells functions apart by their source and this number.
    """
    cutlass, cute = import_module("cutlass"), import_module("cutlass.cute")
    utils = import_module("flash_attn.cute.utils")

    # The package reads the source, and passes the position of a score and the bounds by position.
    @cute.jit  # type: ignore[untyped-decorator]
    def in_ranges(batch: Any, head: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any) -> Any:
        low, high = aux_tensors[0], aux_tensors[1]
        row = q_idx[0]
        first = utils.scalar_to_ssa(low[0, row], cutlass.Int32)
        last = utils.scalar_to_ssa(high[0, row], cutlass.Int32)
        is_visible = (kv_idx >= first) & (kv_idx < last)
        for number in cutlass.range_constexpr(1, count):
            first = utils.scalar_to_ssa(low[number, row], cutlass.Int32)
            last = utils.scalar_to_ssa(high[number, row], cutlass.Int32)
            is_visible = is_visible | ((kv_idx >= first) & (kv_idx < last))
        return is_visible

    return in_ranges  # type: ignore[no-any-return]
