"""Rows of NaN that torch's flash kernel for the CPU hides as 0.

The kernel skips NaN when it looks for the highest score of a row, unless the NaN fills a vector. A row whose
visible scores are all NaN then counts as a row without a key: output 0, LSE 0. In 16 bits the kernel's fast
`exp` turns the NaN of `inf - inf` into 0, so that a row with a score of +inf has output 0 and an LSE of +inf.
"""

from __future__ import annotations

import torch
from torch import Tensor


def show_nan(
    out: Tensor, lse: Tensor, query: Tensor, key: Tensor, is_causal: bool = False, mask: Tensor | None = None
) -> None:
    """Set output and LSE of rows to NaN, in place, where a visible score is NaN or +inf.

    Args:
        out, lse: the kernel's results, (B, H, S_q, D_v) and (B, H, S_q).
        query, key: (B, H, S_q, D) and (B, H_k, S_k, D).
        is_causal: whether row i sees keys 0 to i.
        mask: what is added to the scores, broadcasts to (B, H, S_q, S_k).
    """
    is_nan = ~(lse < torch.inf)
    is_zero = lse == 0.0
    if bool(is_zero.any()):
        is_nan |= _has_nan_alone(is_zero, query, key, is_causal, mask)
    if bool(is_nan.any()):
        out.masked_fill_(is_nan.unsqueeze(-1), torch.nan)
        lse.masked_fill_(is_nan, torch.nan)


def _has_nan_alone(
    is_zero: Tensor, query: Tensor, key: Tensor, is_causal: bool, mask: Tensor | None
) -> Tensor:
    """Return which of the rows with an LSE of 0, (B, H, S_q), see a score of NaN."""
    if mask is not None:
        is_zero = is_zero & ~(mask == -torch.inf).all(-1)
    has_nan = torch.zeros_like(is_zero)
    if not bool(is_zero.any()):
        return has_nan
    # Products of finite numbers aren't NaN. A sum that overflows only costs the search below.
    whole = [x.sum(dtype=torch.float64).isfinite() for x in (query[is_zero], key)]
    if all(map(bool, whole)) and (mask is None or not bool(mask.isnan().any())):
        return has_nan
    group = query.shape[1] // key.shape[1]
    for batch, head in is_zero.any(-1).nonzero().tolist():
        rows = is_zero[batch, head].nonzero().squeeze(-1)
        # In float64, in which no product of finite numbers overflows.
        scores = query[batch, head, rows].double() @ key[batch, head // group].double().mT
        if mask is not None:
            scores += mask.expand(*query.shape[:3], key.shape[2])[batch, head, rows]
        hidden = scores == -torch.inf
        if is_causal:
            hidden |= torch.arange(key.shape[2]) > rows[:, None]
        has_nan[batch, head, rows] = scores.masked_fill(hidden, 0.0).isnan().any(-1)
    return has_nan
