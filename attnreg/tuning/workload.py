"""The tensors of a call to measure, in as many copies as it takes to miss the cache."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from attnreg import measure
from attnreg.measure import Case, copies_beyond_the_cache

if TYPE_CHECKING:
    import torch

    from attnreg.contract.spec import AttentionSpec
    from attnreg.measure import Inputs

# Fields whose tensors can't be generated: their values are the program's.
GIVEN_BY_THE_PROGRAM = ("bias", "alibi", "seqused_k", "page_size", "num_splits")


def unmeasurable(spec: AttentionSpec) -> str:
    """Return why a call can't be measured, or an empty string."""
    options = [name for name in GIVEN_BY_THE_PROGRAM if getattr(spec, name) not in (False, None)]
    options += ["dropout"] if spec.dropout > 0.0 else []
    if options:
        return f"{' and '.join(options)} can't be measured: the default order decides"
    tokens = (spec.tokens_q, spec.tokens_k)
    empty = not all((spec.max_q, spec.max_k, *tokens, spec.heads_q, spec.head_dim, spec.head_dim_v))
    return "there is nothing to compute" if empty else ""


def copies(spec: AttentionSpec, device: torch.device) -> list[Inputs]:
    """Return the tensors of a call, so often that one round of them is twice the cache."""
    case = case_of(spec)
    return measure.copies(case, device, copies_beyond_the_cache(case, device))


def case_of(spec: AttentionSpec) -> Case:
    """Return the call as a `Case`, with lengths for its sequences."""
    (tokens_q, max_q), (tokens_k, max_k) = (spec.tokens_q, spec.max_q), (spec.tokens_k, spec.max_k)
    return Case(
        name=str(spec),
        lens_q=lengths(spec.batch, tokens_q, max_q) if spec.varlen else (max_q,) * spec.batch,
        lens_k=lengths(spec.batch, tokens_k, max_k) if spec.varlen else (max_k,) * spec.batch,
        varlen=spec.varlen,
        heads=(spec.heads_q, spec.heads_k),
        dims=(spec.head_dim, spec.head_dim_v),
        window=spec.window,
        dtype=spec.dtype,
        one_cu_seqlens=(tokens_q, max_q) == (tokens_k, max_k),
        deterministic=spec.deterministic,
    )


def lengths(batch: int, tokens: int, longest: int) -> tuple[int, ...]:
    """Return lengths of sequences: one is the longest, the others rise evenly and sum to the rest.

    A program's `max_q` may be above its longest sequence; no sequence is longer than all tokens.
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
    """Return small calls of the same kind, quick to compute in float64; the first that runs is enough."""
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
