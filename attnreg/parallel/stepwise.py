"""all_gather and ring: keys and values come to the queries, in steps, and results are merged by their LSE.

While one step is computed the next one's keys are on their way. A backward receives them once more, as
nothing that came from other ranks is saved, and sends their gradients back. Partial results meet in float32
(float64 for float64 inputs); between ranks gradients travel in the dtype in which kernels give them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnreg.contract.backend import Call
from attnreg.dispatch.scope import ScopedChoice
from attnreg.parallel.exchange import Pending
from attnreg.parallel.steps import Part, Prepared, Rows
from attnreg.varlen.autograd import run_backward, run_forward
from attnreg.varlen.plans import call_of


class Options(NamedTuple):
    """What all calls of a distributed call have in common."""

    scale: float | None
    softcap: float
    choice: ScopedChoice | None


@dataclass(frozen=True)
class Work:
    """A distributed call, without its tensors."""

    steps: list[Prepared]
    group: Any
    options: Options

    def call(self, query: Tensor, part: Part) -> Call:
        """Return the contract's call of a part, whose queries `query` are."""
        lengths = part.cu_q, part.cu_k, part.max_q, part.max_k
        scale, softcap, _ = self.options
        return call_of(query, lengths, scale, part.window, softcap=softcap)

    def merges(self, rows: int) -> bool:
        """Whether a row's result comes from several parts."""
        return sum(_count(part.queries) for step in self.steps for part in step.parts) > rows


def _count(rows: Rows) -> int:
    return rows.stop - rows.start if isinstance(rows, slice) else len(rows)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _taken(tensor: Tensor, rows: Rows) -> Tensor:
    if isinstance(rows, slice):
        return tensor if rows == slice(0, len(tensor)) else tensor[rows]
    return tensor.index_select(0, rows)


def _add(total: Tensor, rows: Rows, new: Tensor) -> None:
    """Add rows, of which some may be the same one, to those of `total`."""
    if isinstance(rows, slice):
        total[rows] += new
    else:
        total.index_add_(0, rows, new.to(total.dtype))


def _packed(key: Tensor, value: Tensor) -> Tensor:
    return torch.cat((key.flatten(1), value.flatten(1)), 1)


def _unpacked(rows: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the key and value of packed rows; `key` and `value` give their shapes."""
    heads, dim, dim_v = *key.shape[1:], value.shape[2]
    flat_k, flat_v = torch.split(rows, [heads * dim, heads * dim_v], 1)
    return flat_k.view(len(rows), heads, dim), flat_v.view(len(rows), heads, dim_v)


class Keys:
    """Keys and values as step follows step; the next step's are asked for before one is computed."""

    def __init__(self, key: Tensor, value: Tensor, work: Work) -> None:
        self._own, self._work = (key, value), work
        self._coming = self._ask(0)

    def _ask(self, number: int) -> Pending | None:
        steps = self._work.steps
        if number >= len(steps) or (move := steps[number].move) is None:
            return None
        rows = _packed(*(_taken(x, move.rows) for x in self._own))
        return Pending(rows, move.sends, move.receives, self._work.group)

    def of(self, number: int) -> tuple[Tensor, Tensor]:
        """Return those of a step: this rank's own, if it uses them, then those received."""
        coming, own = self._coming, self._work.steps[number].own
        received = None if coming is None else _unpacked(coming.wait(), *self._own)
        self._coming = self._ask(number + 1)
        if received is None:
            return self._own
        if not own:
            return received
        return torch.cat((self._own[0], received[0])), torch.cat((self._own[1], received[1]))


class StepwiseAttention(torch.autograd.Function):
    """Output and LSE of a rank's queries."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, work: Work) -> tuple[Tensor, Tensor]:
        out, lse = _forward(query, key, value, work, ctx.needs_input_grad[0] or any(ctx.needs_input_grad))
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.work = work
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        # A rank without any gradient takes part all the same: the others wait for it.
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        return *_backward(grad_out, grad_lse, (query, key, value), out, lse, ctx.work), None


def _forward(
    query: Tensor, key: Tensor, value: Tensor, work: Work, needs_backward: bool
) -> tuple[Tensor, Tensor]:
    rows, heads, _ = query.shape
    merges, wide = work.merges(rows), _wide(query.dtype)
    out = query.new_zeros((rows, heads, value.shape[2]), dtype=wide if merges else query.dtype)
    lse = query.new_full((rows, heads), -torch.inf, dtype=wide)
    keys = Keys(key, value, work)
    for number, step in enumerate(work.steps):
        key_now, value_now = keys.of(number)
        for part in step.parts:
            inputs = (
                _taken(query, part.queries), _taken(key_now, part.keys), _taken(value_now, part.keys),
            )  # fmt: skip
            call = work.call(inputs[0], part)
            part_out, part_lse, *_ = run_forward(inputs, call, work.options.choice, needs_backward)
            part_lse = part_lse.mT.to(wide)
            if merges:
                before = _taken(lse, part.queries)
                part_lse = torch.logaddexp(before, part_lse_of := part_lse)
                share, kept = (part_lse_of - part_lse).exp_(), (before - part_lse).exp_()
                part_out = _taken(out, part.queries) * kept[..., None] + part_out * share[..., None]
            out[part.queries], lse[part.queries] = part_out, part_lse
    return out.to(query.dtype), lse.mT.contiguous()


def _backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    inputs: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    lse: Tensor,
    work: Work,
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = inputs
    wide = _wide(query.dtype)
    grad_q, grad_k, grad_v = (torch.zeros_like(x, dtype=wide) for x in inputs)
    lse, grad_lse = lse.mT, None if grad_lse is None else grad_lse.mT
    keys, returning = Keys(key, value, work), []
    for number, step in enumerate(work.steps):
        key_now, value_now = keys.of(number)
        step_k, step_v = (torch.zeros_like(x, dtype=wide) for x in (key_now, value_now))
        for part in step.parts:
            # With the LSE and the output of all keys a kernel gives the gradients that these keys have.
            call = work.call(query, part)._replace(cu_seqlens_q=None, cu_seqlens_k=None)
            rows_q, rows_k = part.queries, part.keys
            tensors = [
                _taken(query, rows_q), _taken(key_now, rows_k), _taken(value_now, rows_k),
                _taken(out, rows_q), _taken(lse, rows_q).mT.contiguous(),
            ]  # fmt: skip
            part_lse = None if grad_lse is None else _taken(grad_lse, rows_q).mT.contiguous()
            offsets = part.cu_q, part.cu_k, None, None, None
            grads = run_backward(
                _taken(grad_out, rows_q), tensors, call, work.options.choice, None, part_lse, *offsets
            )
            for total, rows, new in zip(
                (grad_q, step_k, step_v), (rows_q, rows_k, rows_k), grads, strict=True
            ):
                _add(total, rows, new)
        own = len(key) if step.own else 0
        if step.own:
            grad_k += step_k[:own]
            grad_v += step_v[:own]
        if (move := step.move) is not None:
            back = _packed(step_k[own:], step_v[own:]).to(key.dtype)
            returning.append((move.rows, Pending(back, move.receives, move.sends, work.group)))
    for rows, pending in returning:
        for total, new in zip((grad_k, grad_v), _unpacked(pending.wait(), key, value), strict=True):
            _add(total, rows, new)
    return grad_q.to(query.dtype), grad_k.to(key.dtype), grad_v.to(value.dtype)
