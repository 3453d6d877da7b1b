"""The tiles of flex's kernels, from the fastest to what every GPU can hold.

Torch chooses tiles for head dims up to 256, and for some GPUs chooses larger ones than their shared memory
holds. Above 256 its choice doesn't fit any GPU's. So a list of tiles is tried until a kernel compiles.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from attnreg.backends.flex.graphs import TENSOR_CORES, float32_product
from attnreg.backends.flex.kinds import ProgramKind

# Head dims up to which torch chooses first.
MOST_BY_TORCH = 256

# Head dims up to which float32 on tensor cores has tiles of its own.
MOST_OWN = 128

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


# Of float32 on tensor cores. With a head dim of 128 a backward took 14 ms by these, and 22 ms by torch's; a
# forward 3.6 and 4.5 (H200, 8,200 tokens, 16 query heads; `benchmarks/flex.py --parts tiles`).
FLOAT32: dict[str, Tiles] = {"forward": of_forward(128, 32, 2, 8), "backward": of_backward(32, 32, 1, 4)}


def tiles_for(kind: ProgramKind) -> tuple[Tiles, ...]:
    """Return the tiles to try for a kind, in this order; an empty mapping leaves them to torch."""
    has_16_bits = dict(kind.layouts)["query"].dtype.itemsize == 2
    own, head_dim = LARGE[kind.direction, has_16_bits], kind.head_dim
    is_own = head_dim <= MOST_OWN and float32_product(kind.device, head_dim) == TENSOR_CORES
    if not has_16_bits and is_own:
        own = FLOAT32[kind.direction], {}, *own
    elif head_dim <= MOST_BY_TORCH:
        own = {}, *own
    return own
