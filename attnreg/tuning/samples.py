"""A look at a call's own size: a few rows of what a kernel returned there, held to float64.

The accuracy rule is checked at a small size, where all of a result can be computed exactly. This finds
the kernel that goes astray only where sequences are long, batches wide, or offsets large.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from attnreg.contract.backend import Call
    from attnreg.contract.spec import Direction
    from attnreg.tuning.workload import Copy

__all__ = ["astray"]

# How far a row may be off, relative to itself, and to the terms that it is the sum of, of which little may
# be left. Half precision is at 0.003 of both; what is astray is off by the row itself.
FAR, OF_TERMS = 0.05, 0.02


def astray(
    direction: Direction, copy: Copy, results: Sequence[Tensor], forward: Sequence[Tensor] = ()
) -> str:
    """Return in what the results of a call are wrong; empty if nothing is.

    Args:
        direction: of the call.
        copy: its tensors.
        results: (out, lse), or (dq, dk, dv).
        forward: the (out, lse) that a backward was given.
    """
    names = ("out", "lse") if direction == "forward" else ("dq", "dk", "dv")
    for name, result in zip(names, results, strict=True):
        if name != "lse" and not bool(result.isfinite().all()):
            return f"{name} has values that aren't finite"
    packed = copy.call.cu_seqlens_q is not None
    sampled = [
        found
        for part in _parts(copy)
        for found in (
            _forward(part, copy, packed, results)
            if direction == "forward"
            else _backward(part, copy, packed, results, forward)
        )
    ]
    for number, name in enumerate(names):
        worst = max((row.off() for row in sampled[number :: len(names)]), default=0.0)
        if not worst <= 1.0:
            return f"{name} of a sampled row is {worst:.2g} times as far off as it may be"
    return ""


class Rows(NamedTuple):
    """Rows of a result, what they should be, and the root of their terms' squares; each (rows, dim)."""

    ours: Tensor
    exact: Tensor
    terms: Tensor

    def off(self) -> float:
        """Return how far the worst row is off, in units of what it may be."""
        ours, exact, terms = (
            x.double().norm(dim=-1) for x in (self.ours - self.exact, self.exact, self.terms)
        )
        return float((ours / (FAR * exact + OF_TERMS * terms).clamp(min=1e-30)).max())


class Part(NamedTuple):
    """One query head of one sequence: the sequence's number, where its rows and keys are, and its heads."""

    number: int
    queries: slice
    keys: slice
    head: int
    heads: slice
    head_k: int

    def of(self, x: Tensor, packed: bool, places: slice, head: int) -> Tensor:
        """Return the rows of one head, (rows, dim), in float64."""
        return (x[places, head] if packed else x[self.number, places, head]).double()


def _parts(copy: Copy) -> Iterator[Part]:
    """Yield the first and the last head of the first and the last sequence that have rows and keys."""
    q, k, _, _, call = copy
    if call.cu_seqlens_q is not None and call.cu_seqlens_k is not None:
        places = [
            [slice(*pair) for pair in pairwise(ends.tolist())]
            for ends in (call.cu_seqlens_q, call.cu_seqlens_k)
        ]
    else:
        places = [[slice(0, x.shape[1])] * len(x) for x in (q, k)]
    both = enumerate(zip(*places, strict=True))
    filled = [one for one in both if all(place.stop > place.start for place in one[1])]
    group = q.shape[-2] // k.shape[-2]
    for number, (queries, keys) in (filled[0], filled[-1]) if filled else ():
        for head in (0, q.shape[-2] - 1):
            shared = head // group
            yield Part(number, queries, keys, head, slice(shared * group, (shared + 1) * group), shared)


def _some(length: int, device: torch.device) -> Tensor:
    return torch.tensor((0, length // 2, length - 1), device=device)


def _scores(q: Tensor, k: Tensor, rows: Tensor, keys: Tensor, shift: int, call: Call) -> Tensor:
    """Return the scaled scores of some rows and keys, -inf where a row doesn't see a key."""
    apart = keys - rows[:, None] - shift
    left, right = call.window
    seen = ((apart >= -left) | (left < 0)) & ((apart <= right) | (right < 0))
    return (q[rows] @ k[keys].mT * call.scale).masked_fill(~seen, -torch.inf)


def _forward(part: Part, copy: Copy, packed: bool, results: Sequence[Tensor]) -> Iterator[Rows]:
    q = part.of(copy.q, packed, part.queries, part.head)
    k, v = (part.of(x, packed, part.keys, part.head_k) for x in (copy.k, copy.v))
    rows, keys = _some(len(q), q.device), torch.arange(len(k), device=q.device)
    scores = _scores(q, k, rows, keys, len(k) - len(q), copy.call)
    lse = scores.logsumexp(-1)
    blind = lse == -torch.inf
    weights = (scores - torch.where(blind, 0.0, lse)[:, None]).exp()
    out = part.of(results[0], packed, part.queries, part.head)
    yield Rows(out[rows], weights @ v, (weights**2 @ v**2).sqrt())
    # The LSE of a row without a key is infinite on both sides, or wrong.
    ours = _lse(part, packed, results[1])[rows]
    ours, lse = torch.where(blind & (ours == -torch.inf), 0.0, ours), torch.where(blind, 0.0, lse)
    yield Rows(ours[:, None], lse[:, None], torch.ones_like(lse)[:, None])


def _lse(part: Part, packed: bool, lse: Tensor, head: int | None = None) -> Tensor:
    head = part.head if head is None else head
    return (lse[head, part.queries] if packed else lse[part.number, head]).double()


def _backward(
    part: Part, copy: Copy, packed: bool, results: Sequence[Tensor], forward: Sequence[Tensor]
) -> Iterator[Rows]:
    k, v = (part.of(x, packed, part.keys, part.head_k) for x in (copy.k, copy.v))
    length = part.queries.stop - part.queries.start
    rows, keys = _some(length, k.device), _some(len(k), k.device)
    every_row = torch.arange(length, device=k.device)
    every_key = torch.arange(len(k), device=k.device)
    shift, call = len(k) - length, copy.call
    grad_k, grad_v = torch.zeros_like(k[keys]), torch.zeros_like(v[keys])
    terms_k, terms_v = torch.zeros_like(grad_k), torch.zeros_like(grad_v)
    for head in range(part.heads.start, part.heads.stop):
        q, grad, out = (part.of(x, packed, part.queries, head) for x in (copy.q, copy.grad_out, forward[0]))
        lse, inner = _lse(part, packed, forward[1], head)[:, None], (out * grad).sum(-1, keepdim=True)
        lse = lse.masked_fill(lse == -torch.inf, 0.0)  # a row without a key has no weights anyway
        if head == part.head:
            weights = (_scores(q, k, rows, every_key, shift, call) - lse[rows]).exp()
            product = grad[rows] @ v.mT
            exact = (weights * (product - inner[rows])) @ k * call.scale
            sizes = weights * (product.abs() + inner[rows].abs()) * call.scale
            yield Rows(part.of(results[0], packed, part.queries, head)[rows], exact, (sizes**2 @ k**2).sqrt())
        weights = (_scores(q, k, every_row, keys, shift, call) - lse).exp()
        product = grad @ v[keys].mT
        sizes = weights * (product.abs() + inner.abs()) * call.scale
        grad_v += weights.mT @ grad
        grad_k += (weights * (product - inner)).mT @ q * call.scale
        terms_v += (weights**2).mT @ grad**2
        terms_k += (sizes**2).mT @ q**2
    yield Rows(part.of(results[1], packed, part.keys, part.head_k)[keys], grad_k, terms_k.sqrt())
    yield Rows(part.of(results[2], packed, part.keys, part.head_k)[keys], grad_v, terms_v.sqrt())
