"""The tensors of a call to measure, in as many copies as it takes to miss the cache."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch

from attnreg.contract.backend import Call
from attnreg.measure import Case

if TYPE_CHECKING:
    from torch import Tensor

    from attnreg.contract.spec import AttentionSpec

__all__ = ["Copy", "copies", "lengths", "small_cases", "unmeasurable"]

# A processor's last cache; a GPU tells the size of its own.
CPU_CACHE = 32 * 2**20
MOST_COPIES = 16

# What tensors can't be made for, as they would have to say what a program's own say.
GIVEN_BY_THE_PROGRAM = ("bias", "alibi", "seqused_k", "page_size", "num_splits")


class Copy(NamedTuple):
    """The tensors of one call."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    call: Call


def unmeasurable(spec: AttentionSpec) -> str:
    """Return why a call can't be measured, or an empty string."""
    asked = [name for name in GIVEN_BY_THE_PROGRAM if getattr(spec, name) not in (False, None)]
    asked += ["dropout"] if spec.dropout > 0.0 else []
    if asked:
        return f"{' and '.join(asked)} can't be measured: the default order decides"
    tokens = (spec.tokens_q, spec.tokens_k)
    empty = not all((spec.max_q, spec.max_k, *tokens, spec.heads_q, spec.head_dim, spec.head_dim_v))
    return "there is nothing to compute" if empty else ""


def copies(spec: AttentionSpec, device: torch.device) -> list[Copy]:
    """Return the tensors of a call, so often that one round of them is twice the cache."""
    call = _call(spec, device)
    first = _copy(spec, device, call, 0)
    size = sum(x.numel() * x.element_size() for x in first[:4])
    wanted = min(-(-2 * _cache(device) // size), MOST_COPIES)
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        wanted = min(wanted, max(free // (8 * size), 1))
    # All with the same offsets, as those of a model's layers are: backends keep what they derive from them.
    return [first, *(_copy(spec, device, call, number) for number in range(1, int(wanted)))]


def _cache(device: torch.device) -> int:
    if device.type != "cuda":
        return CPU_CACHE
    return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)) or 2 * CPU_CACHE


def _copy(spec: AttentionSpec, device: torch.device, call: Call, seed: int) -> Copy:
    generator = torch.Generator(device).manual_seed(seed)

    def values(tokens: int, length: int, heads: int, dim: int) -> Tensor:
        rows = (tokens,) if spec.varlen else (spec.batch, length)
        shape, dtype = (*rows, heads, dim), getattr(torch, spec.dtype)
        return torch.randn(shape, generator=generator, dtype=dtype, device=device)

    return Copy(
        values(spec.tokens_q, spec.max_q, spec.heads_q, spec.head_dim),
        values(spec.tokens_k, spec.max_k, spec.heads_k, spec.head_dim),
        values(spec.tokens_k, spec.max_k, spec.heads_k, spec.head_dim_v),
        values(spec.tokens_q, spec.max_q, spec.heads_q, spec.head_dim_v),
        call,
    )


def _call(spec: AttentionSpec, device: torch.device) -> Call:
    def offsets(tokens: int, longest: int) -> Tensor | None:
        ends = tuple(accumulate(lengths(spec.batch, tokens, longest), initial=0))
        return torch.tensor(ends, dtype=torch.int32, device=device) if spec.varlen else None

    cu_seqlens_q = offsets(spec.tokens_q, spec.max_q)
    # One tensor for both where they are the same, as in self-attention: backends look at that.
    same = (spec.tokens_q, spec.max_q) == (spec.tokens_k, spec.max_k)
    return Call(
        scale=spec.head_dim**-0.5,
        max_q=spec.max_q,
        max_k=spec.max_k,
        window=spec.window,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_q if same else offsets(spec.tokens_k, spec.max_k),
        deterministic=spec.deterministic,
    )


def lengths(batch: int, tokens: int, longest: int) -> tuple[int, ...]:
    """Return lengths of sequences: one is the longest, the others rise evenly and fill the rest.

    A program may give a longest length that is above that of its sequences; none is more than all tokens.
    """
    longest = min(longest, tokens)
    tokens = min(tokens, batch * longest)
    others, rest = batch - 1, tokens - longest
    if others <= 0 or not longest:
        return (longest,) * batch
    mean = rest / others
    reach = min(mean, longest - mean)
    ramp = [mean + reach * (2 * (i + 0.5) / others - 1) for i in range(others)]
    ends = [round(end) for end in accumulate(ramp)]
    found = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    return (longest, *(min(max(length, 0), longest) for length in found))


def small_cases(spec: AttentionSpec) -> tuple[Case, ...]:
    """Return calls of the same kind that are quick to compute in float64; the first that runs is enough."""
    return tuple(_case(spec, most) for most in (192, 384))


def _case(spec: AttentionSpec, most: int) -> Case:
    n_q, n_k = min(spec.max_q, most), min(spec.max_k, most)
    if spec.max_q < spec.max_k and n_q == n_k:
        n_q = max(n_q * 2 // 3, 1)
    ratio = spec.heads_q // spec.heads_k
    parts = (1, 2, 3) if spec.varlen else (1, 1)
    return Case(
        name=f"{spec.dtype} {n_q} x {n_k}",
        lens_q=tuple(-(-n_q // part) for part in parts),
        lens_k=tuple(-(-n_k // part) for part in parts),
        varlen=spec.varlen,
        heads=(2 * ratio, 2),
        dims=(spec.head_dim, spec.head_dim_v),
        window=tuple(min(bound, most // 2) for bound in spec.window),  # type: ignore[arg-type]
        dtype=spec.dtype,
    )
