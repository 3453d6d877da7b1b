"""The tokens of a batch (B, S) as packed sequences, and attention over these.

A `Packing` is made once for all layers of a forward, with a single read-back; under torch.compile without
any.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnreg.core.launching.offsets import facts_of
from attnreg.core.torchlib.frames import leave_module_uncompiled
from attnreg.core.torchlib.layout import stream_of
from attnreg.core.torchlib.modes import is_for_others
from attnreg.core.varlen.front import varlen_attn
from attnreg.errors import InvalidInputError

Window = tuple[int, int]


class Packing(NamedTuple):
    """The tokens that count, and the offsets of their sequences.

    Attributes:
        rows_q: the query's rows that count, sequence after sequence, as int64 indices into (B * S, H, D).
            None for all, in order.
        rows_k: the same for key and value.
        cu_seq_q: int32 (sequences + 1,), the begin of each sequence of the query, and the end of the last.
        cu_seq_k: the same for key and value.
        max_q: the longest sequence of the query, in tokens, or more.
        max_k: the same for the key.
        has_holes: whether padding lies between tokens of a sequence; None if unknown.
    """

    rows_q: Tensor | None
    rows_k: Tensor | None
    cu_seq_q: Tensor
    cu_seq_k: Tensor
    max_q: int
    max_k: int
    has_holes: bool | None = False

    def on(self, device: torch.device) -> Packing:
        """Return the packing on a layer's device, which may differ from the mask's."""
        return self._replace(
            rows_q=None if self.rows_q is None else self.rows_q.to(device),
            rows_k=None if self.rows_k is None else self.rows_k.to(device),
            cu_seq_q=self.cu_seq_q.to(device),
            cu_seq_k=self.cu_seq_k.to(device),
        )


def read(numbers: Tensor) -> Tensor:
    """Copy numbers, of any shape and dtype, to the CPU.

    Nothing else here waits for the device, so tests count the calls.
    """
    return numbers.cpu()


def is_readable() -> bool:
    """Whether numbers can be read back now.

    They can't in compiled code, in a CUDA graph, without memory, and in a recording for other numbers.
    """
    if torch.compiler.is_compiling() or is_captured() or is_for_others():
        return False
    return all(torch._C._get_dispatch_mode(key) is None for key in _WITHOUT_NUMBERS)


def check_all_tokens_count(packing: Packing, sizes: tuple[int, int, int]) -> None:
    """Raise an error if offsets that the program has passed leave tokens of its rows out.

    The layer would return 0 for these. On a GPU nothing waits for the offsets: a later layer or step raises.

    Args:
        packing: the passed offsets.
        sizes: batch, length of the query and length of the key.
    """
    batch, *lengths = sizes
    offsets = packing.cu_seq_q, packing.cu_seq_k
    if not is_readable():
        return
    for name, cu_seqlens, length in zip(("cu_seq_lens_q", "cu_seq_lens_k"), offsets, lengths, strict=True):
        tokens = batch * length
        if cu_seqlens.is_cuda:
            # Of the same offsets for queries and keys: then rows are left out, or none are.
            if facts_of(cu_seqlens, cu_seqlens, tokens, tokens, stream_of(cu_seqlens)).leaves_rows_out:
                raise InvalidInputError(
                    f"{name}: got offsets that leave tokens out, expected 0 to {tokens}, the number of tokens"
                )
            continue
        first, last = cu_seqlens[[0, -1]].tolist() if cu_seqlens.numel() else (None, None)
        if (first, last) != (0, tokens):
            raise InvalidInputError(
                f"{name}: got offsets from {first} to {last}, expected 0 to {tokens}, the number of tokens"
            )


# PROXY is make_fx's mode, whose graph runs on other tensors.
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


class UnpackedBatch(NamedTuple):
    """The padding and the documents of a batch, on the device.

    Attributes:
        sizes: the number of rows, and the length of each row's query and key.
        padding: whether each key counts, bool (B, S_k), and whether each query does, bool (B, S_q) or None
            for all. None without padding.
        starts: whether a document starts at each token that counts, bool (B, S); None if each row is a
            document. Only if queries and keys are the same tokens.
    """

    sizes: tuple[int, int, int]
    padding: tuple[Tensor, Tensor | None] | None
    starts: Tensor | None


def starts_of(numbers: Tensor) -> Tensor:
    """Return where numbers (B, S) change: bool (B, S), true for the first of each row, too."""
    return numbers.diff(dim=-1, prepend=numbers[:, :1] - 1) != 0


def starts_of_positions(
    positions: Tensor | None, sizes: tuple[int, int, int], keys: Tensor | None = None
) -> Tensor | None:
    """Return where documents start by a layer's positions, bool (B, S); None if these can't mean documents.

    A document starts at position 0, and where positions decrease. Steps ahead mean nothing: a text that skips
    positions is a single document, as for transformers with a cache. So is a row whose positions are all 0:
    Decision Transformer passes those, because it has embeddings of time instead.

    Args:
        positions: integers (1 or B, S), or None.
        sizes: the number of rows, and the length of each row's query and key.
        keys: bool (B, S), which tokens count; None for all.
    """
    batch, length_q, length_k = sizes
    if positions is None or length_q != length_k or length_q == 1 or positions.shape[-1] != length_q:
        return None
    if positions.ndim != 2 or positions.shape[0] not in (1, batch):
        return None
    positions = positions.expand(batch, -1)
    if keys is None:
        is_first = (positions == 0) & _has_another_than_0(positions)
        return (positions.diff(dim=-1, prepend=positions[:, :1] + 1) < 0) | is_first
    before = _last_counted(keys)
    goes_back = positions < positions.gather(-1, before.clamp(min=0))
    is_first = (positions == 0) & _has_another_than_0(torch.where(keys, positions, 0))
    return keys & ((before < 0) | is_first | goes_back)


def _has_another_than_0(positions: Tensor) -> Tensor:
    """Return whether a row of integers (B, S) has another than 0, bool (B, 1)."""
    return (positions != 0).any(-1, keepdim=True)


def by_positions(positions: Tensor | None, sizes: tuple[int, int, int]) -> Packing | None:
    """Return the packing of a batch without padding by a layer's positions; None as for `pack`.

    `positions` are integers (1 or B, S), or None. `sizes` are the number of rows, and the length of each
    row's query and key.
    """
    starts = starts_of_positions(positions, sizes) if is_readable() else None
    return pack([UnpackedBatch(sizes, None, starts)])[0]


def pack(batches: list[UnpackedBatch]) -> list[Packing | None]:
    """Return the packing of each batch, with a single read-back for all of them.

    A packing is None for a batch without padding whose rows are one document each. If numbers can't be read
    back, no batch may have `starts`.
    """
    if all(batch.padding is None and batch.starts is None for batch in batches):
        return [None] * len(batches)
    if not is_readable():
        # The number of rows that count is unknown here, so the other rows are put last, after the last
        # offset.
        return [None if batch.padding is None else _padded(batch, None) for batch in batches]
    numbers = [
        [] if batch.padding is None else [_facts(*batch.padding, batch.starts).flatten()] for batch in batches
    ]
    for batch, of_one in zip(batches, numbers, strict=True):
        of_one += [] if batch.starts is None else [batch.starts.flatten().int()]
    unread = [x for of_one in numbers for x in of_one]
    parts = iter(torch.split(read(torch.cat(unread)), [len(x) for x in unread]))
    return [
        _known(batch, [next(parts) for _ in of_one]) for batch, of_one in zip(batches, numbers, strict=True)
    ]


def _known(batch: UnpackedBatch, known: list[Tensor]) -> Packing | None:
    """Return the packing of a batch by the numbers that were read back: facts, starts, or both."""
    rows, length_q, length_k = batch.sizes
    if batch.padding is not None:
        facts = known[0].view(3, rows)
        if (facts[0] < length_q).any() or (facts[1] < length_k).any():
            return _padded(batch, facts, None if batch.starts is None else known[-1])
    return None if batch.starts is None else _documents(known[-1], rows, batch.starts.device)


def _facts(keys: Tensor, queries: Tensor | None, starts: Tensor | None) -> Tensor:
    """Return int32 (3, B): for each row the queries that count, the keys that count, and the padding inside.

    Padding inside is between two tokens of a document. Without a mask of queries all of them count, as 2**30.
    """
    places = torch.arange(keys.shape[1], device=keys.device).expand_as(keys)
    before = _last_counted(keys)
    inside = keys & (before >= 0) if starts is None else keys & ~starts
    gaps = torch.where(inside, places - before - 1, 0).sum(-1)
    counts_q = torch.full_like(gaps, 2**30) if queries is None else queries.sum(-1)
    return torch.stack([counts_q, keys.sum(-1), gaps]).int()


def _last_counted(keys: Tensor) -> Tensor:
    """Return, for each token, the place of the last token before it that counts, (B, S); -1 if none does."""
    # Not the other way round: export with a dynamic length refuses tensors that may have a length of 1.
    return torch.nn.functional.pad(last_true(keys), (1, 0), value=-1)[:, :-1]


def last_true(flags: Tensor) -> Tensor:
    """Return, for each place of bool (B, S), the last true place up to it, int64 (B, S); -1 if none is.

    Without `cummax`, which the ONNX of torch.onnx.export(dynamo=False) lacks.
    """
    places = torch.arange(flags.shape[1], device=flags.device).expand_as(flags)
    counts = flags.long().cumsum(-1)
    slots = torch.nn.functional.pad(torch.zeros_like(counts), (1, 0))
    # The place of each count; what isn't true writes to the first slot, which nobody reads.
    slots = slots.scatter(-1, torch.where(flags, counts, 0), places)
    return torch.where(counts == 0, -1, slots.gather(-1, counts))


def _padded(batch: UnpackedBatch, facts: Tensor | None, starts: Tensor | None = None) -> Packing:
    """Return the packing of the tokens that count; `facts` and `starts` are numbers read back, or None."""
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
            has_holes = None  # a window depends on each query's place among the keys
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


class LayerOptions(NamedTuple):
    """A layer's options, besides its tensors and its mask; sinks are (H,)."""

    dropout: float
    scale: float | None
    softcap: float
    sinks: Tensor | None


def attend(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, window: Window, options: LayerOptions
) -> Tensor:
    """Compute attention over the sequences of a packing.

    Args:
        query: (T_q, H, D), floating point.
        key: (T_k, H_k, D), of the same dtype.
        value: (T_k, H_k, D_v), of the same dtype.
        packing: the sequences; its rows have already been selected.
        window: (left, right), aligned bottom-right; -1 is no bound.
        options: the layer's dropout, scale, softcap and sinks.

    Returns:
        The output (T_q, H, D_v).

    Raises:
        InvalidInputError: the arguments contradict each other.
        UnsupportedInputError: no backend can run the call.
    """
    result: Any = varlen_attn(
        query, key, value, packing.cu_seq_q, packing.cu_seq_k, packing.max_q, packing.max_k,
        scale=options.scale, window_size=window, enable_gqa=True, softcap=options.softcap,
        sinks=options.sinks, dropout_p=options.dropout,
    )  # fmt: skip
    return result  # type: ignore[no-any-return]


leave_module_uncompiled(__name__)
