"""What attention is in float64, written out, for results to be held to before anybody times them."""

from __future__ import annotations

from itertools import accumulate, product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnreg.bench.inputs import far

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnreg.bench.inputs import Tensors
    from attnreg.bench.shapes import Shape

__all__ = ["TOLERANCE", "Truth"]

# Relative, of a whole tensor: right kernels are at 0.003 in bfloat16, a wrong mask at 0.1 and more.
TOLERANCE = {"bfloat16": 0.01, "float16": 0.002, "float32": 1e-4}


class Truth:
    """Output and gradients of tensors in the contract's layout.

    Args:
        shape: the call.
        tensors: query, key, value and the incoming gradient.
        everything: whether all of it is computed; else a key head of the longest sequence and one of
            the shortest, which is enough to tell a wrong mask or offset and takes milliseconds.
    """

    def __init__(self, shape: Shape, tensors: Tensors, everything: bool = False) -> None:
        self.shape = shape
        self._starts = [[0, *accumulate(lengths)] for lengths in (shape.lengths_q, shape.lengths_k)]
        lengths, heads = shape.lengths_q, shape.heads[1]
        places = [(lengths.index(max(lengths)), 0), (lengths.index(min(lengths)), heads - 1)]
        every = product(range(len(lengths)), range(heads))
        self._parts = {
            place: _exact(self._cut(tensors.plain(), place, "qkkq"), shape.causal)
            for place in (every if everything else dict.fromkeys(places))
        }

    def error(self, results: Sequence[Tensor]) -> float:
        """Return the largest relative error of output and gradients, or of the output alone."""
        expected: list[list[Tensor]] = [[] for _ in results]
        got: list[list[Tensor]] = [[] for _ in results]
        for place, exact in self._parts.items():
            parts = self._cut(results, place, "qqkk"[: len(results)])
            for number, (part, right) in enumerate(zip(parts, exact, strict=False)):
                got[number].append(part.double().flatten())
                expected[number].append(right.flatten())
        return far(map(torch.cat, got), map(torch.cat, expected))

    def _cut(self, tensors: Sequence[Tensor], place: tuple[int, int], sides: str) -> list[Tensor]:
        """Return what belongs to one key head of one sequence, (S, H, D)."""
        sequence, head = place
        ratio = self.shape.heads[0] // self.shape.heads[1]
        found = []
        for x, side in zip(tensors, sides, strict=True):
            heads = slice(head * ratio, (head + 1) * ratio) if side == "q" else slice(head, head + 1)
            starts = self._starts[side == "k"]
            rows: Any = slice(*starts[sequence : sequence + 2]) if self.shape.varlen else sequence
            found.append(x[rows][:, heads])
        return found


def _exact(tensors: Sequence[Tensor], causal: bool) -> list[Tensor]:
    """Return output, and the gradients of query, key and value, of a key head and its query heads."""
    q, k, v, grad = tensors
    key, value = k[:, 0].double(), v[:, 0].double()
    outs, grads_q = [], []
    grad_k, grad_v = torch.zeros_like(key), torch.zeros_like(value)
    scale = q.shape[-1] ** -0.5
    # One head at a time: the scores of a long sequence are a gigabyte each.
    for query, incoming in zip(q.double().unbind(1), grad.double().unbind(1), strict=True):
        scores = (query @ key.T).mul_(scale)
        if causal:
            rows, columns = scores.shape
            unseen = torch.ones(rows, columns, dtype=torch.bool, device=q.device).triu_(columns - rows + 1)
            scores.masked_fill_(unseen, -torch.inf)
        weights = scores.softmax(-1)
        out = weights @ value
        grad_v += weights.T @ incoming
        change = (incoming @ value.T).sub_((incoming * out).sum(-1, keepdim=True)).mul_(weights).mul_(scale)
        outs.append(out)
        grads_q.append(change @ key)
        grad_k += change.T @ query
    return [torch.stack(outs, 1), torch.stack(grads_q, 1), grad_k[:, None], grad_v[:, None]]
