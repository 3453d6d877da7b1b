"""How the tokens of a batch (B, S) lie as sequences one after the other, and attention over these.

A `Packing` is made once for all layers of a forward, with one read-back; under torch.compile with none.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnreg.core.torchlib.modes import is_for_others
from attnreg.core.varlen.front import varlen_attn

Window = tuple[int, int]


class Packing(NamedTuple):
    """Which tokens attention is about, and where each sequence begins.

    Attributes:
        rows_q: the query's rows that count, as indices into its (B * S, H, D), one sequence after the other;
            None for all, in order.
        rows_k: the same for key and value.
        cu_seq_q: int32 (sequences + 1,), where each sequence of the query begins, and the end of the last.
        cu_seq_k: the same for key and value.
        max_q: the longest sequence of the query, in tokens, or more.
        max_k: the same for the key.
        has_holes: whether padding lies between tokens of one sequence; None where that isn't known.
    """

    rows_q: Tensor | None
    rows_k: Tensor | None
    cu_seq_q: Tensor
    cu_seq_k: Tensor
    max_q: int
    max_k: int
    has_holes: bool | None = False

    def on(self, device: torch.device) -> Packing:
        """Return the packing for layers on another device than the mask's."""
        return self._replace(
            rows_q=None if self.rows_q is None else self.rows_q.to(device),
            rows_k=None if self.rows_k is None else self.rows_k.to(device),
            cu_seq_q=self.cu_seq_q.to(device),
            cu_seq_k=self.cu_seq_k.to(device),
        )


def read(numbers: Tensor) -> Tensor:
    """Read numbers back from the device. Nothing else here waits for it, so tests count the calls."""
    return numbers.cpu()


def is_readable() -> bool:
    """Whether numbers can be read back now.

    Not in compiled code, a CUDA graph, tensors without memory, or what is recorded for other numbers.
    """
    if torch.compiler.is_compiling() or is_captured() or is_for_others():
        return False
    return all(torch._C._get_dispatch_mode(key) is None for key in _WITHOUT_NUMBERS)


# That of make_fx as well, whose graph is run on other tensors.
_WITHOUT_NUMBERS = (torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY)


def is_captured() -> bool:
    """Whether a CUDA graph is being captured; false in compiled code."""
    if torch.compiler.is_compiling() or not torch.cuda.is_available():
        return False
    return torch.cuda.is_current_stream_capturing()


def of_equal_lengths(batch: int, length_q: int, length_k: int, device: torch.device) -> Packing:
    """Return the packing of a batch without padding."""
    cu_seq_q = _of_all(batch, length_q, device)
    cu_seq_k = cu_seq_q if length_k == length_q else _of_all(batch, length_k, device)
    return Packing(None, None, cu_seq_q, cu_seq_k, length_q, length_k)


class Batch(NamedTuple):
    """What is known of a batch's tokens on the device.

    Attributes:
        sizes: the number of rows, and the length of each row's query and key.
        padding: which keys count, (B, S_k), and which queries, (B, S_q) or None for all; None if nothing is
            padded.
        starts: at which tokens that count a document starts, (B, S), or None: then each row is one document.
            Only where the queries are the keys' tokens.
    """

    sizes: tuple[int, int, int]
    padding: tuple[Tensor, Tensor | None] | None
    starts: Tensor | None


def starts_of(numbers: Tensor) -> Tensor:
    """Return where numbers (B, S) change, the first of each row included."""
    return _with_first(numbers, numbers.diff(dim=-1) != 0)


def _with_first(numbers: Tensor, others: Tensor) -> Tensor:
    return torch.cat([torch.ones_like(numbers[:, :1], dtype=torch.bool), others], -1)


def starts_of_positions(
    positions: Tensor | None, sizes: tuple[int, int, int], keys: Tensor | None = None
) -> Tensor | None:
    """Return where documents start by a layer's positions; None if these can't mean documents.

    It is at 0, and where positions go back. Steps ahead mean nothing: a text that skips positions is one
    document, also for transformers where a cache is given. `keys`, (B, S), says which tokens count, None all.
    """
    batch, length_q, length_k = sizes
    if positions is None or length_q != length_k or length_q == 1 or positions.shape[-1] != length_q:
        return None
    if positions.ndim != 2 or positions.shape[0] not in (1, batch):
        return None
    positions = positions.expand(batch, -1)
    if keys is None:
        return _with_first(positions, positions.diff(dim=-1) < 0) | (positions == 0)
    before = _last_counted(keys)
    goes_back = positions < positions.gather(-1, before.clamp(min=0))
    return keys & ((before < 0) | (positions == 0) | goes_back)


def by_positions(positions: Tensor | None, sizes: tuple[int, int, int]) -> Packing | None:
    """Return how a batch without padding lies in sequences by a layer's positions; None as of `pack`."""
    starts = starts_of_positions(positions, sizes) if is_readable() else None
    return pack([Batch(sizes, None, starts)])[0]


def pack(batches: list[Batch]) -> list[Packing | None]:
    """Return how each of the batches lies in sequences, with one read-back for all of them.

    It is None for a batch that has no padding and one document in each row. Where nothing can be read back no
    batch has `starts`.
    """
    if all(one.padding is None and one.starts is None for one in batches):
        return [None] * len(batches)
    if not is_readable():
        # How many rows count isn't known here: those that don't come last, behind the last offset.
        return [None if one.padding is None else _padded(one, None) for one in batches]
    numbers = [[] if one.padding is None else [_facts(*one.padding, one.starts).flatten()] for one in batches]
    for one, of_one in zip(batches, numbers, strict=True):
        of_one += [] if one.starts is None else [one.starts.flatten().int()]
    unread = [x for of_one in numbers for x in of_one]
    parts = iter(torch.split(read(torch.cat(unread)), [len(x) for x in unread]))
    return [_known(one, [next(parts) for _ in of_one]) for one, of_one in zip(batches, numbers, strict=True)]


def _known(batch: Batch, known: list[Tensor]) -> Packing | None:
    """Return the packing of a batch by the numbers that were read back of it."""
    rows, length_q, length_k = batch.sizes
    if batch.padding is not None:
        facts = known[0].view(3, rows)
        if (facts[0] < length_q).any() or (facts[1] < length_k).any():
            return _padded(batch, facts, None if batch.starts is None else known[-1])
    return None if batch.starts is None else _documents(known[-1], rows, batch.starts.device)


def _facts(keys: Tensor, queries: Tensor | None, starts: Tensor | None) -> Tensor:
    """Return (3, B): how many queries and how many keys of each row count, and how much padding is inside.

    Padding between two documents isn't inside of one. Queries without a mask of their own all count, however
    many there are.
    """
    places = torch.arange(keys.shape[1], device=keys.device).expand_as(keys)
    before = _last_counted(keys)
    inside = keys & (before >= 0) if starts is None else keys & ~starts
    gaps = torch.where(inside, places - before - 1, 0).sum(-1)
    counts_q = torch.full_like(gaps, 2**30) if queries is None else queries.sum(-1)
    return torch.stack([counts_q, keys.sum(-1), gaps]).int()


def _last_counted(keys: Tensor) -> Tensor:
    """Return where the last token before each token is that counts, (B, S); -1 where there is none."""
    places = torch.arange(keys.shape[1], device=keys.device)
    latest = torch.where(keys, places, -1).cummax(-1).values
    return torch.nn.functional.pad(latest[:, :-1], (1, 0), value=-1)


def _padded(batch: Batch, facts: Tensor | None, starts: Tensor | None = None) -> Packing:
    """Return the packing of the tokens that count; `facts` and `starts` are what was read back, if any."""
    (keys, queries), length_q = batch.padding, batch.sizes[1]  # type: ignore[misc]
    total_q = total_k = has_holes = None
    longest_q, longest_k = length_q, keys.shape[1]
    if facts is not None:
        total_q, total_k = facts[:2].long().sum(-1).tolist()
        longest_q = length_q if queries is None else int(facts[0].max())
        longest_k, has_holes = int(facts[1].max()), bool(facts[2].any())
    rows_k, cu_seq_k = _rows(keys, total_k), _offsets(keys)
    count = 0 if starts is None else int(starts.sum())
    if batch.starts is not None and facts is not None and count > int((facts[1] > 0).sum()):
        begins = torch.nonzero_static(batch.starts.flatten().index_select(0, rows_k), size=count).flatten()
        cu_seq_k = torch.nn.functional.pad(begins.int(), (0, 1), value=total_k)
    if queries is keys:
        rows_q, cu_seq_q = rows_k, cu_seq_k
    elif queries is not None:
        rows_q, cu_seq_q = _rows(queries, total_q), _offsets(queries)
    else:
        rows_q, cu_seq_q = None, _of_all(keys.shape[0], length_q, keys.device)
        if length_q > 1:
            has_holes = None  # a window would have to know at which of the keys each query is
    return Packing(rows_q, rows_k, cu_seq_q, cu_seq_k, longest_q, longest_k, has_holes)


def _documents(starts: Tensor, batch: int, device: torch.device) -> Packing | None:
    places = starts.nonzero().flatten()
    if len(places) == batch:
        return None
    offsets = torch.nn.functional.pad(places, (0, 1), value=len(starts))
    cu_seq, longest = offsets.to(device, torch.int32), int(offsets.diff().max())
    return Packing(None, None, cu_seq, cu_seq, longest, longest)


def _rows(counted: Tensor, total: int | None) -> Tensor:
    flat = counted.flatten()
    if total is None:
        return flat.logical_not().to(torch.int8).argsort(stable=True)
    return torch.nonzero_static(flat, size=total).flatten()


def _offsets(counted: Tensor) -> Tensor:
    return torch.nn.functional.pad(counted.sum(-1).cumsum(0, dtype=torch.int32), (1, 0))


def _of_all(batch: int, length: int, device: torch.device) -> Tensor:
    return torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=device)


class Options(NamedTuple):
    """What a layer's call says besides its tensors and its mask."""

    dropout: float
    scale: float | None
    softcap: float
    sinks: Tensor | None


def attend(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, window: Window, options: Options
) -> Tensor:
    """Compute attention over the sequences of a packing: (T, H, D)."""
    result: Any = varlen_attn(
        query, key, value, packing.cu_seq_q, packing.cu_seq_k, packing.max_q, packing.max_k,
        scale=options.scale, window_size=window, enable_gqa=True, softcap=options.softcap,
        sinks=options.sinks, dropout_p=options.dropout,
    )  # fmt: skip
    return result  # type: ignore[no-any-return]
