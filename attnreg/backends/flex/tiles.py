"""The tiles of flex's kernels, from the largest to what every GPU can hold.

Torch chooses tiles for head dims up to 256, and for some GPUs chooses larger ones than their shared memory
holds. Above 256 its choice doesn't fit any GPU's. So a list of tiles is tried until a kernel compiles.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from attnreg.backends.flex.kinds import ProgramKind

# Head dims up to which torch chooses first.
MOST_BY_TORCH = 256

# What Triton and Inductor say of tiles that a GPU can't hold.
TOO_LARGE = re.compile(r"out of resource|OutOfResources|No valid triton configs", re.IGNORECASE)

Tiles = Mapping[str, int]


def of_forward(queries: int, keys: int, stages: int, warps: int) -> Tiles:
    """Return tiles of a forward: a block of queries, which stays in registers, by a block of keys."""
    return {
        "fwd_BLOCK_M": queries,
        "fwd_BLOCK_N": keys,
        "fwd_num_stages": stages,
        "fwd_num_warps": warps,
    }


def of_backward(rows: int, columns: int, stages: int, warps: int) -> Tiles:
    """Return tiles: the side `columns` stays in registers, while the kernel walks over the side `rows`."""
    of_keys = {"bwd_BLOCK_M1": rows, "bwd_BLOCK_N1": columns}
    of_queries = {"bwd_BLOCK_M2": columns, "bwd_BLOCK_N2": rows}
    return {**of_keys, **of_queries, "bwd_num_stages": stages, "bwd_num_warps": warps}


# By direction, and whether elements have 16 bits. The first of 16 bits spill the fewest registers of those
# that were compiled for Hopper with a head dim of 512; shared memory 192 and 96 KB, then 48 KB.
LARGE: dict[tuple[str, bool], tuple[Tiles, ...]] = {
    ("forward", True): (of_forward(64, 32, 2, 8), of_forward(64, 32, 1, 8), of_forward(16, 16, 1, 4)),
    ("forward", False): (of_forward(32, 16, 1, 4), of_forward(16, 16, 1, 4)),
    ("backward", True): (of_backward(32, 32, 1, 8), of_backward(16, 16, 1, 4)),
    ("backward", False): (of_backward(16, 16, 1, 4),),
}


def tiles_for(kind: ProgramKind) -> tuple[Tiles, ...]:
    """Return the tiles to try for a kind, in this order; an empty mapping leaves them to torch."""
    layouts = dict(kind.layouts)
    dims = [layouts[name].sizes[-1] for name in ("query", "value")]
    own = LARGE[kind.direction, layouts["query"].dtype.itemsize == 2]
    by_torch = max(dim for dim in dims if isinstance(dim, int)) <= MOST_BY_TORCH
    return ({}, *own) if by_torch else own
