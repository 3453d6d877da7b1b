"""all_gather and ring: keys and values are sent to the queries, in steps; results are merged by their LSE.

While a step is computed, the keys of the next step travel. all_gather cuts heads into groups: while a group
is computed, the keys of the next group travel. Between ranks gradients have the dtype in which kernels return
them. With all_gather the backward keeps the keys of the forward's calls; with the ring it receives them
again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnreg.core.adaptation.sinks import grad_of_sinks
from attnreg.core.contract.backend import Call
from attnreg.core.dispatch.scope import ScopedChoice
from attnreg.core.torchlib.layout import copy
from attnreg.core.torchlib.modes import differentiable_once
from attnreg.core.varlen.autograd import run_backward
from attnreg.core.varlen.plans import call_of, run
from attnreg.core.varlen.sinks import with_sinks
from attnreg.parallel.exchange import Pending
from attnreg.parallel.parts import Move, Part, Put, Run, StepPlan, taken
from attnreg.parallel.results import ALL, Sums, put_or_merge, wide


class KernelOptions(NamedTuple):
    """The options that all kernel calls of a distributed call share."""

    scale: float | None
    softcap: float
    choice: ScopedChoice | None
    needs_backward: bool
    before_backward: Callable[[], None]


@dataclass(frozen=True)
class Work:
    """A distributed call, without its tensors.

    Attributes:
        plan: the steps of this rank.
        group: the process group.
        options: the options of its kernel calls.
        groups: the number of groups of heads in steps that receive keys. The keys of all groups are sent at
            once, so later groups arrive while the first is computed.
    """

    plan: StepPlan
    group: Any
    options: KernelOptions
    groups: int = 1

    def heads(self, tensor: Tensor, move: Move | None) -> list[slice]:
        """Return the heads of each group in a step, for a tensor (rows, heads, ...)."""
        groups = 1 if move is None else self.groups
        count = tensor.shape[1] // groups
        return [slice(number * count, (number + 1) * count) for number in range(groups)]

    def call(self, query: Tensor, part: Part) -> Call:
        """Return the contract's call of a part with queries `query`, (T, H, D)."""
        lengths = part.cu_q, part.cu_k, part.max_q, part.max_k
        return call_of(query, lengths, self.options.scale, part.window, softcap=self.options.softcap)

    def calls(
        self, query: Tensor, key: Tensor, value: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, Call]]:
        """Yield the arguments of its kernels, with tensors of the right shapes that take no memory."""
        for move, part in ((step.move, part) for step in self.plan.steps for part in step.parts):
            rows_q, rows_k = (sum(end - begin for _, begin, end in x) for x in (part.queries, part.keys))
            share = 1 if move is None else self.groups
            rows = without_values(query, rows_q, share)
            others = without_values(key, rows_k, share), without_values(value, rows_k, share)
            yield rows, *others, self.call(rows, part)


def without_values(like: Tensor, rows: int, divisor: int = 1) -> Tensor:
    """Return an expanded tensor (rows, heads / divisor, head dim) that takes no memory."""
    return like.new_empty(1).expand(rows, like.shape[1] // divisor, like.shape[2])


def _unpacked(rows: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Split packed rows into keys and values, with heads and head dims as in `key` and `value`."""
    heads, dim, dim_v = *key.shape[1:], value.shape[2]
    flat_k, flat_v = rows.split_with_sizes([heads * dim, heads * dim_v], 1)
    return flat_k.view(len(rows), heads, dim), flat_v.view(len(rows), heads, dim_v)


def _space(count: int, key: Tensor, value: Tensor) -> Tensor:
    """Allocate packed rows for `count` keys and values."""
    return key.new_empty((count, key.shape[1] * (key.shape[2] + value.shape[2])))


class Keys:
    """Keys and values by step; each step's are requested before the previous step is computed."""

    def __init__(self, key: Tensor, value: Tensor, work: Work) -> None:
        self._own, self._work = (key, value), work
        self._coming = self._ask(0)

    def _ask(self, number: int) -> list[Pending]:
        steps = self._work.plan.steps
        if number >= len(steps) or (move := steps[number].move) is None:
            return []
        return [self._ask_for(move, heads) for heads in self._work.heads(self._own[0], move)]

    def _ask_for(self, move: Move, heads: slice) -> Pending:
        key, value = (x[:, heads] for x in self._own)
        rows, at = _space(sum(move.sends), key, value), 0
        for _, begin, end in move.rows:
            for to, source in zip(
                _unpacked(rows[at : at + end - begin], key, value), (key, value), strict=True
            ):
                copy(to, source[begin:end])
            at += end - begin
        return Pending(rows, move.sends, move.receives, self._work.group)

    def of(self, number: int) -> Iterator[Tensor | None]:
        """Yield the packed rows of a step, for each group of heads; None if the step receives nothing."""
        coming: list[Pending | None] = [*self._coming] or [None]
        self._coming = []
        while coming:
            pending = coming.pop(0)
            received = None if pending is None else pending.wait()
            if not coming:
                self._coming = self._ask(number + 1)
            yield received


class Returning(NamedTuple):
    """Gradients on their way back to this rank, for some of its rows and heads."""

    runs: Sequence[Run]
    heads: slice
    pending: Pending


# The key and value of a part, by step, place in the step and first head.
Kept = dict[tuple[int, int, int], tuple[Tensor, Tensor]]


class StepwiseAttention(torch.autograd.Function):
    """Return output and LSE of a rank's queries."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, work: Work
    ) -> tuple[Tensor, Tensor]:
        """Return the output (T, H, D_v) and the LSE (H, T) of this rank's queries.

        The output has the query's dtype. The LSE is float32, or float64 for a float64 query.

        Args:
            ctx: autograd's context.
            query: this rank's rows, (T, H, D), floating point.
            key, value: this rank's rows, (T, H_k, D) and (T, H_k, D_v), in the query's dtype.
            sinks: (H,), floating point, or None.
            work: the distributed call.
        """
        out, lse, kept = _forward(query, key, value, work)
        if sinks is not None:
            out, lse = with_sinks(out, lse, sinks)
        ctx.save_for_backward(
            query, key, value, out, lse, sinks, *itertools.chain.from_iterable(kept.values())
        )
        ctx.work, ctx.kept = work, tuple(kept)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of query, key, value and sinks, in their shapes and dtypes; None for `work`.

        `grad_out` is (T, H, D_v), `grad_lse` (H, T), each None for none.
        """
        query, key, value, out, lse, sinks, *kept = ctx.saved_tensors
        of_sinks = None
        if ctx.needs_input_grad[3] and not (grad_out is None and grad_lse is None):
            of_sinks = grad_of_sinks(grad_out, (out, lse), sinks, grad_lse)
        if not ctx.work.options.needs_backward:
            return None, None, None, of_sinks, None
        ctx.work.options.before_backward()
        # A rank without a gradient takes part, too, because the other ranks wait for it.
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        kept_of = dict(zip(ctx.kept, zip(kept[::2], kept[1::2], strict=True), strict=True))
        grads = _backward(grad_out, grad_lse, (query, key, value), (out, lse), kept_of, ctx.work)
        return *grads, of_sinks, None


def _forward(query: Tensor, key: Tensor, value: Tensor, work: Work) -> tuple[Tensor, Tensor, Kept]:
    """Return output, LSE, and the keys and values that the backward doesn't gather once more."""
    plan, dtype_lse = work.plan, wide(query.dtype)
    dtype = dtype_lse if plan.is_long else query.dtype
    outs = Sums(query.new_empty((*query.shape[:2], value.shape[2])), dtype, plan.fills_all_rows)
    lses = Sums(query.new_empty(query.shape[:2]), dtype_lse, plan.fills_all_rows)
    keys, kept = Keys(key, value, work), Kept()
    for number, step in enumerate(plan.steps):
        groups = work.heads(query, step.move), work.heads(key, step.move), keys.of(number)
        for of_queries, of_keys, received in zip(*groups, strict=True):
            sources = _sources(key[:, of_keys], value[:, of_keys], number, received)
            for at, part in enumerate(step.parts):
                key_now, value_now = (taken(x, part.keys) for x in sources)
                if (number, at) in plan.kept:
                    kept[number, at, of_keys.start] = key_now, value_now
                inputs = taken({0: query[:, of_queries]}, part.queries), key_now, value_now
                call = work.call(inputs[0], part)
                choice, needs_backward = work.options.choice, work.options.needs_backward
                out, lse = run("forward", inputs, call, choice, needs_backward).results
                put_or_merge(outs, lses, part.outs, out, lse.mT.to(dtype_lse), of_queries)
    return outs.value.to(query.dtype), lses.value.mT.contiguous(), kept


def _sources(
    key: Tensor, value: Tensor, number: int, received: Tensor | None
) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Return the tensors of keys, and of values, that the runs of a step refer to, by source."""
    if received is None:
        return {0: key}, {0: value}
    others_k, others_v = _unpacked(received, key, value)
    return {0: key, number: others_k}, {0: value, number: others_v}


def _backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    inputs: tuple[Tensor, Tensor, Tensor],
    results: tuple[Tensor, Tensor],
    kept: Kept,
    work: Work,
) -> tuple[Tensor, Tensor, Tensor]:
    plan, (query, key, value) = work.plan, inputs
    long = wide(query.dtype)
    sums_q = Sums(query, long if plan.is_long else query.dtype, plan.fills_all_rows)
    own = [Sums(x, long if plan.is_long_k else x.dtype, 0 in plan.whole_k) for x in (key, value)]
    keys, returning = None if plan.keeps else Keys(key, value, work), list[Returning]()
    for number in plan.backward:
        move, parts = plan.steps[number].move, plan.steps[number].parts
        received_rows = itertools.repeat(None) if keys is None else keys.of(number)
        groups = zip(work.heads(query, move), work.heads(key, move), received_rows, strict=False)
        for of_queries, of_keys, received in groups:
            key_here, value_here, back, sums = key[:, of_keys], value[:, of_keys], None, {0: own}
            if move is not None:
                back = _space(sum(move.receives), key_here, value_here)
                if number not in plan.whole_k:
                    back.zero_()
                sums[number] = [Sums(x, x.dtype, value=x) for x in _unpacked(back, key_here, value_here)]
            sources = _sources(key_here, value_here, number, received)
            of_rows = [x[:, of_queries] for x in (query, grad_out, results[0])]
            lses = [None if x is None else x[of_queries] for x in (grad_lse, results[1])]
            for at, part in enumerate(parts):
                keys_now = kept.get((number, at, of_keys.start)) or tuple(
                    taken(x, part.keys) for x in sources
                )
                grads = _part_backward(work, part, of_rows, lses, keys_now)
                sums_q.put(part.grads_q, grads[0], of_queries)
                for source, of_source in sums.items():
                    puts = [put for put in part.grads_k if put.run.source == source]
                    for total, new in zip(of_source, grads[1:] if puts else (), strict=False):
                        total.put(puts, new, ALL if source else of_keys)
            if back is not None and move is not None:
                # Of one step at a time: the gradients of all steps would be as large as the whole batch.
                if len(returning) == work.groups:
                    _add(own, returning.pop(0), key, value)
                pending = Pending(back, move.receives, move.sends, work.group)
                returning.append(Returning(move.rows, of_keys, pending))
    for last in returning:
        _add(own, last, key, value)
    return sums_q.value.to(query.dtype), own[0].value.to(key.dtype), own[1].value.to(value.dtype)


def _part_backward(
    work: Work,
    part: Part,
    of_rows: Sequence[Tensor],
    lses: Sequence[Tensor | None],
    of_keys: tuple[Tensor, ...],
) -> tuple[Tensor, ...]:
    """Return a part's share of the gradients: right for all keys, because output and LSE are of all keys.

    `of_rows` are the query, the output's gradient and the output; `lses` are the LSE's gradient and the LSE.
    """
    rows, grad_out, out = (taken({0: x}, part.queries) for x in of_rows)
    grad_lse, lse = (None if x is None else taken({0: x.mT}, part.queries).mT.contiguous() for x in lses)
    tensors: Any = rows, *of_keys, out, lse
    return run_backward(grad_out, tensors, work.call(rows, part), work.options.choice, grad_lse)


def _add(sums: list[Sums], returning: Returning, key: Tensor, value: Tensor) -> None:
    """Wait for gradients that other ranks sent back, and add them to this rank's rows."""
    runs, heads, pending = returning
    came = _unpacked(pending.wait(), key[:, heads], value[:, heads])
    places = itertools.accumulate((run.end - run.begin for run in runs), initial=0)
    puts = [Put(run, at, is_first=False) for run, at in zip(runs, places, strict=False)]
    for total, new in zip(sums, came, strict=True):
        total.put(puts, new, heads)
