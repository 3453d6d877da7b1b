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

from attnreg.backends._cpu_blocks import Places, batches, portions, tiles

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from attnreg.backends._cpu_blocks import Batch, Span, Tile
    from attnreg.backends._cpu_runs import Run

__all__ = ["backward", "is_fast"]

# Scores computed at a time: as many as stay in the cache.
_SCORES = 2**21
# Rows of which a temporary in float32 is made at a time.
_ROWS = 1024


class Problem(NamedTuple):
    """Some sequences and what to write: tensors (sequences * key heads, rows or keys, ...)."""

    q: Tensor
    grad_out: Tensor
    grad_q: Tensor
    k: Tensor
    v: Tensor
    grad_k: Tensor
    grad_v: Tensor

    def part(self, rows: slice, keys: slice) -> Problem:
        """Return the problem of some rows and keys, which writes where this one does."""
        return Problem(*(x[:, rows] for x in self[:3]), *(x[:, keys] for x in self[3:]))


def is_fast() -> bool:
    """Return whether this CPU multiplies bfloat16 in hardware."""
    known = torch.cpu.get_capabilities()
    return bool(known.get("avx512_bf16") or known.get("amx_bf16"))


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    runs: Iterable[Run],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of packed tensors (T, H, D), from an LSE (T, H)."""
    heads = k.size(1)
    by_head = [x.unflatten(1, (heads, -1)) for x in (q, grad_out, _split(lse / scale, 3), _split(_delta(grad_out, out), 2), k, v)]
    q5, g5, lse_columns, delta_columns, k5, v5 = by_head
    grads = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q5, k5, v5)]
    for batch in batches(runs):
        found = tiles(batch)
        area = found[0].rows * found[0].keys * q5.size(2)
        work = q.new_empty(2, max(area, min(_SCORES, len(batch.row_spans) * heads * area)))
        whole = batch.rows * batch.keys * q5.size(2) * heads
        for some in portions(len(batch.row_spans), max(1, _SCORES // whole)):
            rows, keys = Places.of(batch.row_spans[some], batch.rows), Places.of(batch.key_spans[some], batch.keys)
            problem = _problem(
                _widened(q5, lse_columns, rows), _widened(g5, delta_columns, rows),
                _widened(k5, 3, keys), _widened(v5, 2, keys), q.size(2)
            )
            _solve(problem, found, q5.size(2), scale, work)
            for total, grad, places in zip(grads, (problem.grad_q, problem.grad_k, problem.grad_v), (rows, keys, keys), strict=True):
                shaped = grad.view(places.count, heads, -1, total.size(2), grad.size(2))
                places.put(total, shaped.transpose(1, 2))
    return tuple(g.flatten(1, 2) for g in grads)


def _problem(q, g, k, v, size):
    q, g, k, v = (x.flatten(2, 3).flatten(0, 1) for x in (q, g, k, v))
    gq, gk, gv = (x.new_empty(*x.shape[:2], size) for x in (q, k, v))
    return Problem(q, g, gq, k, v, gk, gv)


def _widened(x: Tensor, columns: Tensor | int, places: Places) -> Tensor:
    """Return rows of (T, heads, groups, D) as (count, heads, size, groups, D + columns)."""
    taken = places.take(x)
    width = columns if isinstance(columns, int) else columns.size(3)
    n, size, heads, groups, d = taken.shape
    wide = x.new_empty(n, heads, size, groups, d + width)
    by_row = wide.transpose(1, 2)
    by_row[..., :d] = taken
    by_row[..., d:] = -1.0 if isinstance(columns, int) else places.take(columns)
    if places.padding is not None:
        wide.masked_fill_(places.padding[:, None, :, None, None], 0.0)
    return wide


def _solve(problem: Problem, found: Sequence[Tile], groups: int, scale: float, work: Tensor) -> None:
    first = found[0]
    most = max(1, _SCORES // (first.rows * groups * first.keys))
    for entries in portions(problem.q.size(0), most):
        some = Problem(*(x[entries] for x in problem))
        if len(found) == 1:
            _product(some, groups, first, scale, work)
        else:
            _sum_tiles(some, groups, found, scale, work)


def _sum_tiles(problem: Problem, groups: int, found: Sequence[Tile], scale: float, work: Tensor) -> None:
    """Solve a problem tile by tile, each into the tensors of the result, which are summed apart."""
    sums = problem._replace(**{name: torch.zeros_like(getattr(problem, name), dtype=torch.float32) for name in ("grad_q", "grad_k", "grad_v")})
    for tile in found:
        at = slice(tile.row * groups, (tile.row + tile.rows) * groups), slice(tile.key, tile.key + tile.keys)
        done, total = problem.part(*at), sums.part(*at)
        _product(done, groups, tile, scale, work)
        total.grad_q.add_(done.grad_q)
        total.grad_k.add_(done.grad_k)
        total.grad_v.add_(done.grad_v)
    problem.grad_q.copy_(sums.grad_q)
    problem.grad_k.copy_(sums.grad_k)
    problem.grad_v.copy_(sums.grad_v)


def _product(problem: Problem, groups: int, tile: Tile, scale: float, work: Tensor) -> None:
    q, grad_out, grad_q, k, v, grad_k, grad_v = problem
    size, shape = grad_q.size(2), (q.size(0), q.size(1), k.size(1))
    p, other = (x[: q.size(0) * q.size(1) * k.size(1)].view(shape) for x in work)
    by_key, keys = p.transpose(1, 2), k.transpose(1, 2)
    torch.baddbmm(p, q, keys, beta=0, alpha=scale, out=p)
    torch.baddbmm(p, q, keys, beta=-1, alpha=scale, out=other)
    p.exp_().addcmul_(p, other)
    if tile.band is not None:
        seen = p if groups == 1 else p.unflatten(1, (-1, groups)).transpose(1, 2)
        if tile.band[1] < tile.keys:
            seen.tril_(tile.band[1])
        if tile.band[0] > -tile.rows:
            seen.triu_(tile.band[0])
    torch.bmm(by_key, grad_out[..., :size], out=grad_v)
    torch.bmm(grad_out, v.transpose(1, 2), out=other)
    p.mul_(other)
    torch.baddbmm(grad_q, p, k[..., :size], beta=0, alpha=scale, out=grad_q)
    torch.baddbmm(grad_k, by_key, q[..., :size], beta=0, alpha=scale, out=grad_k)


def _split(x: Tensor, terms: int) -> Tensor:
    """Return bfloat16 numbers that add up to `x`, each the rounded rest of those before."""
    found: list[Tensor] = []
    x = x.contiguous()
    for _ in range(terms):
        found.append(x.bfloat16())
        x = x - found[-1].float()
    return torch.stack(found, dim=-1)


def _delta(grad_out: Tensor, out: Tensor) -> Tensor:
    pairs = zip(grad_out.split(_ROWS), out.split(_ROWS), strict=True)
    return torch.cat([(a.float() * b.float()).sum(-1) for a, b in pairs])
