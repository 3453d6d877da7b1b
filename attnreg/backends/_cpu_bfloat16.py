"""The backward in bfloat16, by batched products of oneDNN.

They run several times faster than the flash kernel's, but round each result to bfloat16. So that
this costs no precision, nothing large is rounded: the LSE is subtracted from the scores inside the
product, by columns of the query (three, each the rest of the one before) that meet -1 in the key,
and `rowsum(out * grad_out)` likewise; what rounding the exponent loses comes from a second product
that subtracts the first. Rows and keys that are padding are 0, columns included: all that they
take or give is 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from attnreg.backends._cpu_blocks import batches, tile

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from attnreg.backends._cpu_blocks import Batch
    from attnreg.backends._cpu_runs import Run

__all__ = ["backward", "is_fast"]

# Scores computed at a time: as many as stay in the cache.
_SCORES = 2**21


class Sides(NamedTuple):
    """Query, key, grad_out and value with their columns."""

    q: Tensor
    k: Tensor
    grad_out: Tensor
    v: Tensor


def is_fast() -> bool:
    """Return whether this CPU multiplies bfloat16 in hardware."""
    known = torch.cpu.get_capabilities()
    return bool(known.get("avx512_bf16") or known.get("amx_bf16"))


def backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, runs: Iterable[Run]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of packed tensors (T, H, D), from an LSE (T, H)."""
    heads, groups, size = k.size(1), q.size(1) // k.size(1), q.size(2)
    delta = (grad_out.float() * out).sum(-1)
    wide = Sides(
        _widened(q, _split(lse / scale, 3)),
        _widened(k, -1.0, 3),
        _widened(grad_out, _split(delta, 2)),
        _widened(v, -1.0, 2),
    )
    found = batches(runs)
    ...
