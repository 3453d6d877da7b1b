"""The calls that are measured: packed, dense and decoding ones, and how much there is to compute."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from math import exp, log
from typing import Any

from attnreg.tools.measure import Case

FORWARD, BOTH = "forward", "forward + backward"

# A forward is two matrix products, a backward five, as in the FlashAttention-2 paper.
COST = {FORWARD: 1.0, BOTH: 3.5}


def packed(
    lengths: Sequence[int], heads_q: int, heads_k: int, dim: int, causal: bool, dtype: str = "bfloat16"
) -> Case:
    """Return self-attention of packed sequences."""
    lens, heads = tuple(lengths), (heads_q, heads_k)
    longest = max(lens) if len(set(lens)) == 1 else f"≤{max(lens)}"
    name = f"packed {len(lens)}x{longest} {_model(heads, dim)}{' causal' if causal else ''}"
    return Case(
        name=name, lens_q=lens, lens_k=lens, varlen=True, heads=heads, dims=(dim, dim),
        window=(-1, 0 if causal else -1), dtype=dtype, one_cu_seqlens=True,
    )  # fmt: skip


def dense(batch: int, length: int, *rest: Any) -> Case:
    """Return self-attention of sequences of equal length. `rest` are the further arguments of `packed`."""
    case = packed((length,) * batch, *rest)
    return replace(case, name=case.name.replace("packed", "dense"), varlen=False)


def decode(
    batch: int,
    queries: int,
    keys: int,
    heads_q: int,
    heads_k: int,
    dim: int,
    dtype: str = "bfloat16",
    varlen: bool = False,
) -> Case:
    """Return a few queries over many keys, without a gradient."""
    heads = heads_q, heads_k
    return Case(
        name=f"decode {batch}x{queries}/{keys} {_model(heads, dim)}", lens_q=(queries,) * batch,
        lens_k=(keys,) * batch, heads=heads, dims=(dim, dim), dtype=dtype, varlen=varlen,
    )  # fmt: skip


def _model(heads: tuple[int, int], dim: int) -> str:
    return f"h{':'.join(map(str, dict.fromkeys(heads)))} d{dim}"


def trains(case: Case) -> bool:
    """Whether a program would need the gradient: all calls but those of decoding are self-attention."""
    return case.lens_q == case.lens_k


def flops(case: Case, step: str) -> float:
    """Return the floating-point operations of a step: 4 x dim for each pair of query and key that counts.

    Half the pairs count under a causal mask; a backward takes 2.5 times a forward. It is the convention of
    the FlashAttention-2 paper.
    """
    pairs = sum(q * k for q, k in zip(case.lens_q, case.lens_k, strict=True))
    return 4.0 * case.dims[0] * case.heads[0] * pairs * (0.5 if case.is_causal else 1.0) * COST[step]


def facts_of(case: Case) -> dict[str, Any]:
    """Return the call as plain data; where all sequences have the same length, it once."""
    lengths = {
        name: lens[0] if len(set(lens)) == 1 else list(lens)
        for name, lens in (("lengths_q", case.lens_q), ("lengths_k", case.lens_k))
    }
    return {
        "batch": len(case.lens_q), **lengths, "heads": list(case.heads), "dim": case.dims[0],
        "causal": case.is_causal, "varlen": case.varlen, "dtype": case.dtype, "backward": trains(case),
    }  # fmt: skip


def pull_request(device: str) -> list[Case]:
    """Return the setting of PyTorch's PR 164502, and on a CPU a small one of the kind.

    Lengths are random multiples of 64, the last of them the longest.
    """
    gpu = device == "cuda"
    batch, longest, heads, dtype = (8, 2048, 16, "bfloat16") if gpu else (4, 256, 4, "float32")
    draw = random.Random(0)
    lengths = [*(64 * draw.randint(1, longest // 64) for _ in range(batch - 1)), longest]
    return [packed(lengths, heads, heads, d, causal, dtype) for d in (64, 128) for causal in (False, True)]


def sdpa_grid(device: str) -> list[Case]:
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


# Lengths, the most tokens in a call, the most floating-point operations of a forward.
GPU, CPU = (180, 11_600, 48_000, 6e11), (12, 400, 1_200, 2e8)


def drawn(seed: int | str, number: int, device: str) -> Case:
    """Draw a shape at random; one seed and number are always the same shape."""
    rng = random.Random(f"{seed}/{number}")
    gpu = device == "cuda"
    least, longest, tokens, most = GPU if gpu else CPU
    dtype = "bfloat16" if gpu else "float32"

    def length() -> int:
        return round(exp(rng.uniform(log(least), log(longest))))

    group, dim = rng.choice((1, 4, 8)), rng.choice((64, 96, 128))
    heads = rng.choice((8, 16, 24, 32))
    kind, causal = rng.choices(("dense", "packed", "decode"), (4, 4, 2))[0], rng.random() < 0.75
    while True:
        batch = round(exp(rng.uniform(0.0, log(24))))
        rest = heads, heads // group, dim
        if kind == "decode":
            shape = decode(batch, rng.choice((1, 1, 1, 4)), length(), *rest, dtype)
        elif kind == "packed":
            shape = packed([length() for _ in range(batch)], *rest, causal, dtype)
        else:
            shape = dense(batch, length(), *rest, causal, dtype)
        if sum(shape.lens_k) <= tokens * (4 if kind == "decode" else 1) and flops(shape, FORWARD) <= most:
            return shape
