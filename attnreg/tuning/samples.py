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

    from attnreg.backend import Call
    from attnreg.discovery import Direction
    from attnreg.tuning.workload import Copy

    Pair = tuple[Tensor, Tensor]

__all__ = ["astray"]

# Relative, of all sampled rows together. Half precision is at 0.003; what is astray is at 0.1 and more.
FAR = 0.05


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
        ours, exact = (
            torch.cat([pair[side].flatten() for pair in sampled[number :: len(names)]]) for side in (0, 1)
        )
        error = float((ours - exact).norm() / exact.norm().clamp(min=1e-30))
        if not error <= FAR:
            return f"{name} of sampled rows has a relative error of {error:.2g}"
    return ""


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


def _weights(q: Tensor, k: Tensor, rows: Tensor, keys: Tensor, shift: int, call: Call) -> Tensor:
    """Return the scaled scores of some rows and keys, -inf where a row doesn't see a key."""
    apart = keys - rows[:, None] - shift
    left, right = call.window
    seen = ((apart >= -left) | (left < 0)) & ((apart <= right) | (right < 0))
    return (q[rows] @ k[keys].mT * call.scale).masked_fill(~seen, -torch.inf)


def _forward(part: Part, copy: Copy, packed: bool, results: Sequence[Tensor]) -> Iterator[Pair]:
    q = part.of(copy.q, packed, part.queries, part.head)
    k, v = (part.of(x, packed, part.keys, part.head_k) for x in (copy.k, copy.v))
    rows, keys = _some(len(q), q.device), torch.arange(len(k), device=q.device)
    scores = _weights(q, k, rows, keys, len(k) - len(q), copy.call)
    lse = scores.logsumexp(-1)
    blind = lse == -torch.inf
    exact = torch.where(blind[:, None], 0.0, (scores - torch.where(blind, 0.0, lse)[:, None]).exp() @ v)
    out = part.of(results[0], packed, part.queries, part.head)
    yield out[rows], exact
    # The LSE of a row without a key is infinite on both sides, or wrong.
    ours = _lse(part, packed, results[1])[rows]
    yield torch.where(blind & (ours == -torch.inf), 0.0, ours), torch.where(blind, 0.0, lse)


def _lse(part: Part, packed: bool, lse: Tensor, head: int | None = None) -> Tensor:
    head = part.head if head is None else head
    return (lse[head, part.queries] if packed else lse[part.number, head]).double()


def _backward(
    part: Part, copy: Copy, packed: bool, results: Sequence[Tensor], forward: Sequence[Tensor]
) -> Iterator[Pair]:
    k, v = (part.of(x, packed, part.keys, part.head_k) for x in (copy.k, copy.v))
    length = part.queries.stop - part.queries.start
    rows, keys = _some(length, k.device), _some(len(k), k.device)
    every_row = torch.arange(length, device=k.device)
    every_key = torch.arange(len(k), device=k.device)
    shift, call = len(k) - length, copy.call
    grad_k, grad_v = torch.zeros_like(k[keys]), torch.zeros_like(v[keys])
    for head in range(part.heads.start, part.heads.stop):
        q, grad, out = (part.of(x, packed, part.queries, head) for x in (copy.q, copy.grad_out, forward[0]))
        lse, inner = _lse(part, packed, forward[1], head)[:, None], (out * grad).sum(-1, keepdim=True)
        lse = lse.masked_fill(lse == -torch.inf, 0.0)  # a row without a key has no weights anyway
        if head == part.head:
            weights = (_weights(q, k, rows, every_key, shift, call) - lse[rows]).exp()
            scores = weights * (grad[rows] @ v.mT - inner[rows])
            yield part.of(results[0], packed, part.queries, head)[rows], scores @ k * call.scale
        weights = (_weights(q, k, every_row, keys, shift, call) - lse).exp()
        grad_v += weights.mT @ grad
        grad_k += (weights * (grad @ v[keys].mT - inner)).mT @ q * call.scale
    yield part.of(results[1], packed, part.keys, part.head_k)[keys], grad_k
    yield part.of(results[2], packed, part.keys, part.head_k)[keys], grad_v
