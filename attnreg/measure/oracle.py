"""Attention as it is written in textbooks: whole matrices, autograd, nothing clever.

In float64 it is the truth; in the inputs' own dtype it is what a user would get without any
kernel, and so the yardstick for how wrong a kernel may be.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import torch

from attnreg.measure.inputs import key_rows, query_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from attnreg.measure.cases import Case
    from attnreg.measure.inputs import Inputs

__all__ = ["Results", "attention"]


class Results(NamedTuple):
    """What forward and backward return, in the contract's shapes."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


@torch.enable_grad()  # a caller may have turned it off for the kernels
def attention(case: Case, given: Inputs, dtype: torch.dtype) -> Results:
    """Return the results of a case, computed in one dtype throughout."""
    q, k, v = (_rows(x).detach().to(dtype).requires_grad_() for x in (given.q, given.k, given.v))
    out = q.new_zeros(*q.shape[:-1], v.shape[-1], requires_grad=True)
    lse = q.new_full(q.shape[:-1], -torch.inf)
    for batch, rows_q, rows_k in _same_lengths(case, given):
        part = _whole_matrix(q[rows_q], k[rows_k], v[rows_k], given, batch)
        out = out.index_put((rows_q,), part[0])
        lse = lse.index_put((rows_q,), part[1].detach())
    grad = torch.where(_in_a_sequence(case, out), _rows(given.grad_out).to(dtype), 0.0)
    grads = torch.autograd.grad(out, (q, k, v), grad, materialize_grads=True)
    dq, dk, dv = (g.view(x.shape) for g, x in zip(grads, (given.q, given.k, given.v), strict=True))
    per_head = lse.view(given.q.shape[:-1]).transpose(-1, -2)
    return Results(out.detach().view(given.grad_out.shape), per_head, dq, dk, dv)


def _whole_matrix(q: Tensor, k: Tensor, v: Tensor, given: Inputs, batch: Tensor) -> tuple[Tensor, Tensor]:
    """Return output (b, S_q, H, D_v) and LSE (b, S_q, H) of sequences of equal lengths."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, *(x.repeat_interleave(group, dim=2) for x in (k, v))))
    scores = q @ k.mT * given.call.scale
    visible, added = _mask(scores, given, batch)
    scores = scores + added.to(scores.dtype)
    blind = ~visible.any(-1, keepdim=True)
    # A blind row keeps its scores through the softmax and loses its weights after: no NaN arises.
    weights = scores.masked_fill(~visible & ~blind, -torch.inf).softmax(-1).masked_fill(~visible, 0.0)
    lse = scores.masked_fill(~visible, -torch.inf).logsumexp(-1)
    return (weights @ v).transpose(1, 2), lse.transpose(1, 2)


def _mask(scores: Tensor, given: Inputs, batch: Tensor) -> tuple[Tensor, Tensor]:
    """Return which scores count and what is added to them."""
    (left, right), (len_q, len_k) = given.call.window, scores.shape[-2:]
    i = torch.arange(len_q, device=scores.device)[:, None] + len_k - len_q
    j = torch.arange(len_k, device=scores.device)
    visible = torch.ones_like(scores, dtype=torch.bool)
    added = torch.zeros_like(scores)
    if left >= 0:
        visible = visible & (j >= i - left)
    if right >= 0:
        visible = visible & (j <= i + right)
    if given.call.alibi_slopes is not None:
        added = added - given.call.alibi_slopes[:, None, None].to(added.dtype) * (i - j).abs()
    if given.call.attn_bias is not None:
        bias = given.call.attn_bias.expand(len(batch), *scores.shape[1:])[batch]
        visible = visible & (bias if bias.dtype == torch.bool else bias > -torch.inf)
        added = added if bias.dtype == torch.bool else added + bias.masked_fill(bias == -torch.inf, 0.0)
    return visible, added


def _same_lengths(case: Case, given: Inputs) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield sequences of equal lengths: their numbers and their rows of queries and of keys."""
    alike = defaultdict(list)
    for number, lens in enumerate(zip(case.lens_q, case.lens_seen, strict=True)):
        if all(lens):
            alike[lens].append(number)
    rows_q, rows_k = query_rows(case), key_rows(case, given.call.block_table)
    for numbers in alike.values():
        found = (
            torch.tensor(numbers),
            *(torch.stack([rows[n] for n in numbers]) for rows in (rows_q, rows_k)),
        )
        yield found[0].to(given.q.device), found[1].to(given.q.device), found[2].to(given.q.device)


def _in_a_sequence(case: Case, rows: Tensor) -> Tensor:
    return (torch.arange(rows.shape[0], device=rows.device) < sum(case.lens_q))[:, None, None]


def _rows(x: Tensor) -> Tensor:
    return x if x.dim() == 3 else x.flatten(0, 1)
