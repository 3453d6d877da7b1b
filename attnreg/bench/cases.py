"""The shapes that are measured, as data; for each kind of device its own."""

from __future__ import annotations

import random
from itertools import zip_longest

from attnreg.bench.shapes import Shape, decode, dense, packed, ragged

__all__ = ["held_out", "pull_request", "pull_request_lengths", "sdpa_grid"]

# Batch, length, heads of query and key, head dim, causal: sizes that no grid of `attnreg tune` has.
DENSE = (
    (3, 1536, 24, 24, 128, True),
    (1, 6000, 32, 8, 128, True),
    (11, 320, 12, 12, 64, False),
    (5, 1100, 20, 20, 64, True),
    (2, 3000, 40, 8, 128, True),
    (7, 777, 12, 12, 96, False),
    (24, 192, 16, 4, 64, True),
    (1, 12000, 24, 24, 128, True),
    (4, 2500, 24, 24, 64, False),
    (9, 640, 32, 32, 128, True),
    (1, 900, 10, 10, 64, True),
    (6, 1400, 32, 4, 128, True),
    (13, 450, 24, 24, 128, False),
    (2, 7000, 16, 16, 64, True),
    (3, 2200, 16, 8, 96, True),
    (1, 3500, 40, 40, 128, False),
    (40, 224, 8, 8, 128, False),
    (2, 5000, 32, 8, 64, True),
    (15, 1000, 12, 12, 64, True),
    (1, 10000, 20, 4, 128, False),
    (6, 300, 32, 8, 128, True),
    (1, 1800, 32, 8, 128, True),
    (3, 4500, 12, 12, 64, False),
    (10, 1700, 16, 2, 128, True),
)

# Batch, longest, heads of query and key, head dim, causal.
RAGGED = (
    (12, 1500, 16, 16, 128, True),
    (5, 5000, 32, 8, 128, True),
    (31, 600, 12, 12, 64, False),
    (8, 2300, 24, 24, 64, True),
    (3, 9000, 16, 16, 128, False),
    (17, 700, 20, 4, 96, True),
    (48, 400, 8, 8, 64, True),
    (7, 3200, 40, 8, 128, True),
    (20, 900, 24, 24, 128, False),
    (2, 12000, 32, 4, 128, True),
    (10, 1900, 16, 4, 64, False),
    (6, 1200, 12, 12, 64, True),
    (36, 1300, 16, 16, 128, True),
    (4, 350, 10, 10, 128, True),
    (14, 2800, 32, 8, 64, True),
    (9, 500, 32, 32, 96, False),
    (3, 6500, 24, 24, 64, True),
    (25, 1700, 16, 8, 128, True),
    (11, 3700, 20, 20, 128, False),
    (16, 800, 32, 8, 128, True),
)

# Batch, queries, keys, heads of query and key, head dim.
DECODE = (
    (3, 1, 6000, 32, 8, 128),
    (24, 1, 1500, 24, 24, 64),
    (1, 1, 24000, 40, 8, 128),
    (12, 4, 3000, 32, 8, 128),
    (7, 1, 5000, 16, 16, 128),
    (32, 1, 2500, 32, 4, 128),
    (2, 8, 12000, 24, 24, 128),
    (5, 1, 9000, 20, 4, 64),
    (20, 3, 1900, 16, 4, 64),
    (1, 1, 3500, 32, 32, 128),
    (10, 1, 14000, 32, 8, 128),
    (4, 6, 7000, 40, 8, 128),
    (28, 1, 4500, 12, 12, 96),
    (6, 5, 20000, 32, 4, 128),
)

# Six that a CPU computes in milliseconds.
SMALL = (
    dense(3, 150, 4, 4, 64, True, "float32"),
    ragged(5, 180, 4, 4, 64, True, "float32"),
    decode(3, 1, 700, 4, 2, 64, "float32"),
    dense(2, 220, 4, 2, 64, False, "float32"),
    ragged(7, 90, 4, 2, 32, False, "float32"),
    dense(5, 70, 6, 6, 32, True, "float32"),
)


def held_out(device: str) -> list[Shape]:
    """Return shapes that no table was tuned on; the first of them vary in everything already."""
    if device != "cuda":
        return list(SMALL)
    kinds = (
        [dense(*row) for row in DENSE],
        [ragged(*row) for row in RAGGED],
        [decode(*row) for row in DECODE],
    )
    return [shape for turn in zip_longest(*kinds) for shape in turn if shape is not None]


def pull_request_lengths(device: str, seed: int = 0) -> list[int]:
    """Return random multiples of 64, the last of them the longest: those of PyTorch's PR 164502."""
    batch, longest = (8, 2048) if device == "cuda" else (4, 256)
    draw = random.Random(seed)
    return [*(64 * draw.randint(1, longest // 64) for _ in range(batch - 1)), longest]


def pull_request(device: str) -> list[Shape]:
    """Return the setting of PyTorch's PR 164502, and on a CPU a small one of the kind."""
    gpu = device == "cuda"
    heads, dtype, lengths = 16 if gpu else 4, "bfloat16" if gpu else "float32", pull_request_lengths(device)
    return [packed(lengths, heads, heads, d, causal, dtype) for d in (64, 128) for causal in (False, True)]


def sdpa_grid(device: str) -> list[Shape]:
    """Return dense calls of as many tokens in all, as many short sequences or one long; heads x dim alike."""
    gpu = device == "cuda"
    tokens, width, dtype = (16384, 2048, "bfloat16") if gpu else (512, 256, "float32")
    lengths = (512, 1024, 2048, 4096, 8192, 16384) if gpu else (64, 128, 512)
    return [
        dense(tokens // length, length, width // dim, width // dim // ratio, dim, causal, dtype)
        for dim in (64, 128)
        for causal in (False, True)
        for ratio in ((1, 4) if gpu else (1, 2))
        for length in lengths
    ]
