"""all_to_all over heads (Ulysses): each rank computes some heads for the tokens of all ranks.

Query, key and value travel in one message there, the output in one back. Where there are fewer key heads than
ranks, each is sent to all ranks that use it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnreg.parallel.exchange import AllToAll
from attnreg.parallel.layout import Layout
from attnreg.parallel.steps import Rows, on_device, rows_on
from attnreg.parallel.stepwise import Options
from attnreg.varlen.autograd import attend
from attnreg.varlen.front import with_sinks
from attnreg.varlen.plans import call_of


def unsupported(heads: int, heads_k: int, ranks: int) -> str:
    """Return why heads can't be dealt out to ranks; empty if they can."""
    if heads % ranks:
        return f"query heads must be a multiple of the {ranks} ranks, got {heads}"
    if heads_k % ranks and ranks % heads_k:
        return f"key heads must be a multiple of the {ranks} ranks or divide them, got {heads_k}"
    return ""


class WholeBatch(NamedTuple):
    """The whole batch on a device, as each rank computes it.

    Attributes:
        in_order: which of the rows, as they come rank after rank, is the batch's first, second, ...
        by_rank: the reverse: the batch's rows as they go back, rank after rank.
        cu_seq, longest: as of `varlen_attn`.
        rows: how many rows each rank has.
        rank: which rank this one is.
    """

    in_order: Rows
    by_rank: Rows
    cu_seq: Tensor
    longest: int
    rows: tuple[int, ...]
    rank: int

    @classmethod
    def of(cls, layout: Layout, rank: int, device: torch.device) -> WholeBatch:
        """Work out what a layout means on a device."""
        by_rank = torch.cat([layout.index(number) for number in range(layout.ranks)])
        places = torch.empty_like(by_rank)
        places[by_rank] = torch.arange(len(by_rank))
        cu_seq = torch.tensor(layout.cu_seq)
        longest = int(cu_seq.diff().max()) if len(cu_seq) > 1 else 0
        rows = rows_on(places, device), rows_on(by_rank, device)
        return cls(*rows, on_device(cu_seq.int(), device), longest, layout.rows, rank)


def attend_by_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch: WholeBatch,
    window: tuple[int, int],
    group: Any,
    options: Options,
    sinks: Tensor | None,
    with_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return output and, if wanted, LSE of this rank's rows and all heads."""
    ranks, here = len(batch.rows), batch.rows[batch.rank]
    if key.shape[1] % ranks:
        key, value = (x.repeat_interleave(ranks // x.shape[1], 1) for x in (key, value))
    per_rank = [_by_rank(x, ranks) for x in (query, key, value)]
    packed = torch.cat(per_rank, 2).flatten(0, 1)
    rows = _moved(packed, [here] * ranks, list(batch.rows), group)[batch.in_order]
    parts = torch.split(rows, [x.shape[2] for x in per_rank], 1)
    sizes = (x.shape[1:] for x in (query, key, value))
    query, key, value = (
        part.view(len(rows), heads // ranks, dim) for part, (heads, dim) in zip(parts, sizes, strict=True)
    )
    lengths = batch.cu_seq, batch.cu_seq, batch.longest, batch.longest
    call = call_of(query, lengths, options.scale, window, softcap=options.softcap)
    out, lse = attend(query, key, value, call, options.choice)
    if sinks is not None:
        heads = query.shape[1]
        out, lse = with_sinks(out, lse, sinks[batch.rank * heads : (batch.rank + 1) * heads])
    out = _back(out, batch, group)
    return out, _back(lse.mT[..., None], batch, group)[..., 0].mT.contiguous() if with_lse else None


def _by_rank(x: Tensor, ranks: int) -> Tensor:
    """Return (ranks, T, elements of the heads that each gets), which is no copy."""
    heads, dim = x.shape[1:]
    return x.reshape(len(x), ranks, heads // ranks * dim).transpose(0, 1)


def _back(rows: Tensor, batch: WholeBatch, group: Any) -> Tensor:
    """Send the rows of each rank back to it, and return this rank's with all heads, (T, H, D)."""
    ranks, here = len(batch.rows), batch.rows[batch.rank]
    heads, dim = rows.shape[1:]
    moved = _moved(rows.flatten(1)[batch.by_rank], list(batch.rows), [here] * ranks, group)
    return moved.view(ranks, here, heads, dim).transpose(0, 1).flatten(1, 2)


def _moved(rows: Tensor, sends: list[int], receives: list[int], group: Any) -> Tensor:
    return AllToAll.apply(rows, sends, receives, group)  # type: ignore[no-untyped-call,no-any-return]
