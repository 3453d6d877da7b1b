"""all_to_all over heads (Ulysses): each rank computes some heads for the tokens of all ranks.

The heads of a rank are cut into groups. A message carries a group's query, key and value to the rank that
computes the group; another carries the output back. The messages of all groups are sent at once, so
later groups arrive while the first is computed.
Where there are fewer key heads than ranks, each key head is sent to all ranks that use it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnreg.core.adaptation.sinks import grad_of_sinks
from attnreg.core.contract.backend import Call
from attnreg.core.torchlib.layout import copy
from attnreg.core.torchlib.modes import differentiable_once
from attnreg.core.varlen.autograd import run_backward
from attnreg.core.varlen.plans import call_of, run
from attnreg.core.varlen.sinks import with_sinks
from attnreg.parallel.exchange import Pending
from attnreg.parallel.layout import Layout
from attnreg.parallel.parts import Places, Run, on_device, taken
from attnreg.parallel.stepwise import KernelOptions, without_values

# The least bytes of a group's query, key and value on a rank: smaller messages cost more time than they hide.
ENOUGH, MOST_GROUPS = 64 * 2**20, 4

# Up to so many runs of rows are copied by one `torch.cat`; more are copied by an index.
MOST_RUNS = 64

Rows = Sequence[Run] | Tensor


def unsupported(heads: int, heads_k: int, ranks: int) -> str:
    """Return why heads can't be divided among ranks; empty if they can."""
    if heads % ranks:
        return f"query heads must be a multiple of the {ranks} ranks, got {heads}"
    if heads_k % ranks and ranks % heads_k:
        return f"key heads must be a multiple of the {ranks} ranks or divide them, got {heads_k}"
    return ""


def group_count(heads: int, heads_k: int, bytes_of_rank: int) -> int:
    """Return into how many groups the heads that a rank computes are cut."""
    wanted = min(MOST_GROUPS, bytes_of_rank // ENOUGH)
    return max((n for n in range(1, wanted + 1) if heads % n == heads_k % n == 0), default=1)


class WholeBatch(NamedTuple):
    """The whole batch on a device, as each rank computes it.

    Attributes:
        in_order: for each row of the batch its place among the received rows, which lie rank after rank.
        by_rank: the reverse: for each row sent back, rank after rank, its place in the batch.
        cu_seq: int32 (documents + 1,), offsets for `varlen_attn`.
        longest: the longest document, in tokens.
        rows: the number of rows of each rank.
        rank: this process's rank.
    """

    in_order: Rows
    by_rank: Rows
    cu_seq: Tensor
    longest: int
    rows: tuple[int, ...]
    rank: int

    @classmethod
    def of(cls, layout: Layout, rank: int, device: torch.device) -> WholeBatch:
        """Return the whole batch of a layout, with its tensors on a device."""
        held = [(begin, end) for pieces in layout.pieces for _, begin, end in pieces]
        whole = [(0, layout.tokens)]
        in_order, by_rank = Places({0: held}).runs(whole), Places({0: whole}).runs(held)
        cu_seq = torch.tensor(layout.cu_seq)
        longest = int(cu_seq.diff().max()) if len(cu_seq) > 1 else 0
        rows = _rows_on(in_order, device), _rows_on(by_rank, device)
        return cls(*rows, on_device(cu_seq.int(), device), longest, layout.rows, rank)


def _rows_on(runs: list[Run], device: torch.device) -> Rows:
    """Return runs; more than `MOST_RUNS` as an index on the device."""
    if len(runs) <= MOST_RUNS:
        return runs
    return on_device(torch.cat([torch.arange(begin, end) for _, begin, end in runs]), device)


def _in_order(rows: Tensor, order: Rows) -> Tensor:
    """Return rows in another order; without a copy if it is the same."""
    return rows[order] if isinstance(order, Tensor) else taken({0: rows}, order)


class WorkByHeads(NamedTuple):
    """A distributed call, without its tensors."""

    batch: WholeBatch
    window: tuple[int, int]
    group: Any
    options: KernelOptions
    with_lse: bool

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self.batch.rows)

    @property
    def here(self) -> int:
        """How many tokens this rank has."""
        return self.batch.rows[self.batch.rank]

    def call(self, query: Tensor) -> Call:
        """Return the contract's call of a group of heads with queries `query`, (T, heads, head dim)."""
        batch, options = self.batch, self.options
        lengths = batch.cu_seq, batch.cu_seq, batch.longest, batch.longest
        return call_of(query, lengths, options.scale, self.window, softcap=options.softcap)

    def calls(
        self, query: Tensor, key: Tensor, value: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, Call]]:
        """Yield the arguments of its kernels, with tensors of the right shapes that take no memory."""
        rows = sum(self.batch.rows)
        shares = (query, self.ranks), *((x, min(self.ranks, x.shape[1])) for x in (key, value))
        query, key, value = (without_values(x, rows, share) for x, share in shares)
        yield query, key, value, self.call(query)

    def send(self, tensors: Sequence[Tensor], groups: int, number: int) -> Pending:
        """Send a group's heads of this rank's tokens, (T, H, D), to the ranks that compute them."""
        parts = [self._of_group(x, groups, number) for x in tensors]
        rows = parts[0].new_empty((self.ranks, self.here, sum(x.shape[2] * x.shape[3] for x in parts)))
        for place, part in zip(_heads(rows, [x.shape[2:] for x in parts]), parts, strict=True):
            copy(place, part.transpose(0, 1))
        sends = [self.here] * self.ranks
        return Pending(rows.flatten(0, 1), sends, list(self.batch.rows), self.group, groups == 1)

    def came(self, pending: Pending, sizes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Wait for `send`; return tensors of all tokens in order, by `sizes`: heads and head dim of each."""
        return _heads(_in_order(pending.wait(), self.batch.in_order), sizes)

    def send_back(self, tensors: Sequence[Tensor], groups: int) -> Pending:
        """Send every rank the results of a group for its tokens.

        `tensors` are (tokens of all ranks, heads, D) each, in one dtype.
        """
        flat = [x.flatten(1) for x in tensors]
        rows = _in_order(flat[0] if len(flat) == 1 else torch.cat(flat, 1), self.batch.by_rank)
        receives = [self.here] * self.ranks
        return Pending(rows, list(self.batch.rows), receives, self.group, groups == 1)

    def put_back(self, pending: Pending, tensors: Sequence[Tensor], groups: int, number: int) -> None:
        """Wait for `send_back`; write the results to a group's heads of this rank's tensors, (T, H, D)."""
        places = [self._of_group(x, groups, number) for x in tensors]
        rows = pending.wait().view(self.ranks, self.here, sum(x.shape[2] * x.shape[3] for x in places))
        for place, part in zip(places, _heads(rows, [x.shape[2:] for x in places]), strict=True):
            copy(place, part.transpose(0, 1))

    def _of_group(self, x: Tensor, groups: int, number: int) -> Tensor:
        """Return (T, ranks, heads of a group, head dim), without a copy."""
        heads = x.shape[1] // (self.ranks * groups)
        return x.view(self.here, self.ranks, groups, heads, x.shape[2])[:, :, number]


def _heads(rows: Tensor, sizes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Split rows that hold the heads of several tensors into these tensors, without a copy."""
    parts = rows.split_with_sizes([heads * dim for heads, dim in sizes], -1)
    return [part.view(*rows.shape[:-1], *size) for part, size in zip(parts, sizes, strict=True)]


class AttentionByHeads(torch.autograd.Function):
    """Return output, and LSE if wanted, of this rank's rows and all heads."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, work: WorkByHeads
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output (T, H, D_v), and the LSE (H, T) if the call returns it or has sinks, else None.

        The output has the query's dtype. The LSE is float32, or float64 for a float64 query.

        Args:
            ctx: autograd's context.
            query: this rank's rows, (T, H, D), floating point.
            key, value: this rank's rows, (T, H_k, D) and (T, H_k, D_v), in the query's dtype.
            sinks: (H,), floating point, or None.
            work: the distributed call.
        """
        inputs, ranks = _repeated(query, key, value, work.ranks), work.ranks
        most = max(work.batch.rows) * sum(x.shape[1] * x.shape[2] for x in inputs) * query.element_size()
        heads = [x.shape[1] // ranks for x in inputs]
        groups = group_count(heads[0], heads[1], most)
        sizes = [(x.shape[1] // (ranks * groups), x.shape[2]) for x in inputs]
        out = query.new_empty((*query.shape[:2], value.shape[2]))
        wide = torch.promote_types(query.dtype, torch.float32)
        sends_lse = work.with_lse or sinks is not None
        lse = query.new_empty((*query.shape[:2], 1), dtype=wide) if sends_lse else None
        coming, returning, kept = [work.send(inputs, groups, n) for n in range(groups)], [], []
        for number, pending in enumerate(coming):
            tensors: Any = tuple(work.came(pending, sizes))
            call, options = work.call(tensors[0]), work.options
            part, part_lse = run("forward", tensors, call, options.choice, options.needs_backward).results
            if sinks is not None:
                # The sinks of the heads that this rank computes. All ranks have equal sinks, as they have
                # equal weights.
                of_group = sinks.view(ranks, groups, -1)[work.batch.rank, number]
                part, part_lse = with_sinks(part, part_lse, of_group)
            if work.options.needs_backward:
                kept += [*tensors, part, part_lse]
            back_lse = None if lse is None else work.send_back([part_lse.mT[..., None].to(wide)], groups)
            returning.append((work.send_back([part], groups), back_lse))
        for number, (back, back_lse) in enumerate(returning):
            work.put_back(back, [out], groups, number)
            if lse is not None and back_lse is not None:
                work.put_back(back_lse, [lse], groups, number)
        lse = None if lse is None else lse[..., 0].mT.contiguous()
        of_sinks = () if sinks is None else (out, lse, sinks)
        ctx.save_for_backward(*kept, *of_sinks)
        ctx.work, ctx.shapes, ctx.groups = work, (query.shape, key.shape, value.shape), groups
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of query, key, value and sinks, in their shapes and dtypes; None for `work`.

        `grad_out` is (T, H, D_v), `grad_lse` (H, T), each None for none.
        """
        work, shapes, saved, groups = ctx.work, ctx.shapes, ctx.saved_tensors, ctx.groups
        of_sinks = None
        if ctx.needs_input_grad[3] and not (grad_out is None and grad_lse is None):
            of_sinks = grad_of_sinks(grad_out, saved[-3:-1], saved[-1], grad_lse)
        if not work.options.needs_backward:
            return None, None, None, of_sinks, None
        work.options.before_backward()
        # A rank without a gradient takes part, too, because the other ranks wait for it.
        shape_out = *shapes[0][:2], shapes[2][2]
        grad_out = saved[0].new_zeros(shape_out) if grad_out is None else grad_out.contiguous()
        of_group = shapes[0][1] // (work.ranks * groups)
        coming = [work.send([grad_out], groups, n) for n in range(groups)]
        coming_lse = None
        if work.with_lse:
            if grad_lse is None:
                grad_lse = saved[4].new_zeros((shapes[0][1], shapes[0][0]))
            of_rows = grad_lse.mT.contiguous()[..., None]
            coming_lse = [work.send([of_rows], groups, n) for n in range(groups)]
        returning = []
        for number, pending in enumerate(coming):
            (part,) = work.came(pending, [(of_group, shapes[2][2])])
            part_lse = None
            if coming_lse is not None:
                (part_lse,) = work.came(coming_lse[number], [(of_group, 1)])
                part_lse = part_lse[..., 0].mT.contiguous()
            kept = saved[5 * number : 5 * number + 5]
            grads = run_backward(part, kept, work.call(kept[0]), work.options.choice, part_lse)
            returning.append(work.send_back(grads, groups))
            del part, grads
        mine = [
            saved[0].new_empty((tokens, _multiple(heads, work.ranks), dim)) for tokens, heads, dim in shapes
        ]
        for number, pending in enumerate(returning):
            work.put_back(pending, mine, groups, number)
        return *(_summed(x, shape) for x, shape in zip(mine, shapes, strict=True)), of_sinks, None


def _multiple(heads: int, ranks: int) -> int:
    """Return how many heads are sent, each counted once for every rank that uses it."""
    return heads if heads % ranks == 0 else ranks


def _repeated(query: Tensor, key: Tensor, value: Tensor, ranks: int) -> list[Tensor]:
    """Return query, key and value, with each key head repeated once for every rank that uses it."""
    times = _multiple(key.shape[1], ranks) // key.shape[1]
    return [x.contiguous() for x in (query, *(_times(x, times) for x in (key, value)))]


def _times(x: Tensor, count: int) -> Tensor:
    return x if count == 1 else x.repeat_interleave(count, 1)


def _summed(grad: Tensor, shape: torch.Size) -> Tensor:
    """Return the gradient of a tensor whose heads were repeated: the sum over the repetitions."""
    tokens, heads, dim = shape
    return grad if grad.shape == shape else grad.view(tokens, heads, grad.shape[1] // heads, dim).sum(2)
