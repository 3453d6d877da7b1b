"""Mask functions and tables of blocks in the stand-in for flash-attn-4, as its kernels on Hopper read them.

A kernel reads the blocks that the table lists. It calls the mask function only in those that aren't listed as
whole. So a wrong table shows in the values, as a wrong mask function does.
"""

import types
from typing import NamedTuple

import torch

SIZE = 128


class BlockSparseTensorsTorch(NamedTuple):
    """The package's own, with its fields in its order."""

    mask_block_cnt: torch.Tensor
    mask_block_idx: torch.Tensor
    full_block_cnt: torch.Tensor | None = None
    full_block_idx: torch.Tensor | None = None
    cu_total_m_blocks: torch.Tensor | None = None
    cu_block_idx_offsets: torch.Tensor | None = None
    block_size: tuple[int, int] | None = None
    dq_write_order: torch.Tensor | None = None
    dq_write_order_full: torch.Tensor | None = None
    spt: bool | None = None


def modules():
    """Return what mask functions and tables need of the package and its compiler, by module."""
    cutlass, cute = types.ModuleType("cutlass"), types.ModuleType("cutlass.cute")
    cutlass.cute, cutlass.Int32, cutlass.range_constexpr = cute, torch.int32, range
    cute.jit = lambda function: function
    cute.math = types.SimpleNamespace(tanh=lambda scores, fastmath: scores.tanh())
    utils, sparsity = (types.ModuleType(f"flash_attn.cute.{name}") for name in ("utils", "block_sparsity"))
    utils.scalar_to_ssa = lambda x, dtype: x.to(dtype)
    sparsity.BlockSparseTensorsTorch = BlockSparseTensorsTorch
    return {x.__name__: x for x in (cutlass, cute, utils, sparsity)}


def checked(mask_mod, bounds, sparse, q, k, others):
    """Hold a call with a table to what the package takes; return what the table's kernels get of it."""
    if sparse is None:
        assert mask_mod is bounds is None
        return None
    assert not any(others), "the package has no table for packed tensors, and ignores windows with one"
    assert q.shape[0] == 1 and q.dim() == 4 and q.shape[-1] == k.shape[-1] <= SIZE
    assert sparse.block_size == (SIZE, SIZE)
    for x in bounds:
        # It tells the dimension of stride 1 by the note; without it by the strides, if only one is 1.
        assert x.dtype == torch.int32 and x.stride(x.__leading_dim__) == 1 and x.shape[1] == q.shape[1]
    return (*sparse[:6], *sparse[7:9])


def visible(mask_mod, bounds, table, len_q, len_k, transposed=False):
    """Return which keys each query sees, and which pairs a kernel reads, both bool (S_q, S_k).

    A `transposed` table has for each block of keys the blocks of queries.
    """
    seen = torch.zeros(len_q, len_k, dtype=torch.bool)
    read = torch.zeros_like(seen)
    lengths = (len_k, len_q) if transposed else (len_q, len_k)
    blocks = [-(-length // SIZE) for length in lengths]
    for counts, numbers, whole in ((*table[:2], False), (*table[2:4], True)):
        assert counts.dtype == numbers.dtype == torch.int32
        assert counts.shape == (1, 1, blocks[0]) and numbers.shape == (1, 1, *blocks)
        for own in range(blocks[0]):
            for other in numbers[0, 0, own, : counts[0, 0, own]].tolist():
                rows, columns = (other, own) if transposed else (own, other)
                queries = torch.arange(rows * SIZE, min((rows + 1) * SIZE, len_q))
                keys = torch.arange(columns * SIZE, min((columns + 1) * SIZE, len_k))
                at = queries[:, None], keys
                assert len(queries) and len(keys) and not read[at].any(), "a block that is listed twice"
                read[at] = True
                # Places come as vectors of one, from which the function takes the query's for the bounds.
                given = queries[None, :, None], keys, None, bounds
                seen[at] = True if whole else mask_mod(0, 0, *given)
    return seen, read
