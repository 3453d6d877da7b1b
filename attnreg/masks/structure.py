"""A boolean mask as packed calls: its keys are described on the device, its structure is decided on the host.

In each row of the batch no query sees the padding. In a mask with structure each query sees all other keys
from a first to a last. So `describe` returns the keys that are seen, each query's first and last key, and
whether the mask rebuilt from these three equals the mask: all in one tensor, read back once. `structure_of`
needs only this tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnreg.masks.rows import APART, OVERLAPPING, REPEATED, RowChoice
from attnreg.masks.sequences import Sequences, sequences

Sizes = tuple[int, int, int]  # of the batch, the queries and the keys

# Elements of a mask described at a time: a temporary tensor has as many bytes.
MOST_ELEMENTS = 2**28

# Bytes of an int64, and how many words are added up: a byte can hold as many true keys.
WORD, WORDS = 8, 128


class MaskPart(NamedTuple):
    """One packed call: sequences with the same window.

    Attributes:
        rows_q, rows_k: the queries and keys, sequence after sequence, as int64 indices into (B * S). None for
            all, in order. Then rows of no sequence form sequences of queries or keys alone. Their result is
            0.
        repeats: whether a key belongs to two sequences, and so is copied twice.
        cu_seq_q, cu_seq_k: int32 (sequences + 1,), the begin of each sequence, and the end of the last.
        max_q, max_k: the longest sequence, in tokens.
        window: (left, right), aligned bottom-right, as for `varlen_attn`.
    """

    rows_q: Tensor | None
    rows_k: Tensor | None
    repeats: bool
    cu_seq_q: Tensor
    cu_seq_k: Tensor
    max_q: int
    max_k: int
    window: tuple[int, int]


@dataclass(eq=False)
class Structure:
    """A recognised mask.

    Attributes:
        seen: its kind, for messages: "padded keys, causal".
        parts: the packed calls that together equal the call with the mask; a query in none sees no key.
        is_causal: the `is_causal` that alone equals the mask; None if neither value does.
        shares: the shares of the queries and of the keys that count.
        refused: by kind of call, why it keeps its mask; empty if packed calls run instead.
        is_used: whether a call has run without the mask.
        running: the calls that run without the mask now, as objects of their own.
    """

    seen: str
    parts: tuple[MaskPart, ...]
    is_causal: bool | None
    shares: tuple[float, float]
    refused: dict[tuple[object, ...], str]
    is_used: bool = False
    running: set[object] = field(default_factory=set)

    def to(self, device: torch.device) -> Structure:
        """Return the same on another device; packed calls that share a tensor share it there, too."""
        moved: dict[int, Tensor] = {}

        def move(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if id(value) not in moved:
                moved[id(value)] = value.to(device)
            return moved[id(value)]

        return replace(self, parts=tuple(MaskPart(*map(move, part)) for part in self.parts))

    @cached_property
    def choices(self) -> tuple[RowChoice, RowChoice]:
        """The queries, and the keys, that each packed call reads."""
        overlap = REPEATED if any(part.repeats for part in self.parts) else OVERLAPPING
        queries = RowChoice.of([part.rows_q for part in self.parts], APART)
        return queries, RowChoice.of([part.rows_k for part in self.parts], overlap)


def describe(mask: Tensor) -> Tensor:
    """Describe a mask, bool (B, S_q, S_k), as a flat int32 tensor on its device.

    The parts, in order:
    - 1 number: whether the other parts describe the whole mask.
    - (B, S_k): whether some query sees the key.
    - (B, S_q): each query's first key.
    - (B, S_q): each query's last key; -1 for a query that sees none.
    """
    _, queries, keys = mask.shape
    chunks = torch.split(mask, max(MOST_ELEMENTS // max(queries * keys, 1), 1))
    is_seen, first, last, counts = (torch.cat(part) for part in zip(*map(_describe, chunks), strict=True))
    # A query sees keys that some query sees, from its first to its last. If it sees as many as there are
    # between these two, it sees all of them.
    before = torch.nn.functional.pad(is_seen.cumsum(-1), (1, 0))
    between = before.gather(-1, last.long() + 1) - before.gather(-1, first.long())
    whole = (between == counts).all().view(1)
    return torch.cat([x.flatten().int() for x in (whole, is_seen, first, last)])


def _describe(mask: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return which keys are seen, (B, S_k); each query's first key, its last and their count, (B, S_q)."""
    rows = max(MOST_ELEMENTS // max(len(mask) * mask.shape[-1], 1), 1)
    is_seen, *of_queries = zip(*map(_describe_rows, torch.split(mask, rows, dim=1)), strict=True)
    first, last, counts = (torch.cat(part, 1) for part in of_queries)
    return torch.stack(is_seen).any(0), first, last, counts


def _describe_rows(mask: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `_describe`. It adds up words of eight keys: on an H200 that took a third of the time of keys."""
    batch, queries, keys = mask.shape
    words = -(-keys // WORD)
    groups = -(-words // WORDS)
    if groups > 1:
        words = groups * WORDS
    # To torch each byte of a mask but 0 is true; here a true byte is 1.
    padded = mask.new_zeros(batch, queries, words * WORD)
    torch.ne(mask.view(torch.uint8), 0, out=padded[..., :keys])
    numbers, packed = padded.view(torch.uint8), padded.view(torch.int64)
    # The bytes of a sum of words are eight counts.
    count = packed.view(batch, queries, groups, -1).sum(-1).view(torch.uint8).sum(-1, dtype=torch.int32)
    last_word = words - 1 - packed.ne(0).view(torch.uint8).flip(-1).argmax(-1, True)
    behind = packed.gather(-1, last_word).view(torch.uint8).flip(-1).argmax(-1)  # keys behind the last
    last = torch.where(count > 0, last_word[..., 0] * WORD + (WORD - 1) - behind, -1)
    return numbers.amax(1)[:, :keys].bool(), numbers.argmax(-1), last, count


def structure_of(numbers: Tensor, of_mask: Sizes, sizes: Sizes, in_place: bool) -> Structure | str:
    """Return the structure of a mask, or why it has none.

    Args:
        numbers: the result of `describe`, int32, on the CPU.
        of_mask: the mask's own (B, S_q, S_k); a size may be 1 where the call's isn't.
        sizes: the call's (B, S_q, S_k).
        in_place: whether to leave queries and keys in their places if possible. Rows that don't count then
            become sequences of their own.
    """
    if not numbers[0]:
        return "some query sees keys with gaps between them"
    (batch, length_q, length_k), (_, queries, keys) = sizes, of_mask
    parts = torch.split(numbers[1:].long(), [of_mask[0] * n for n in (keys, queries, queries)])
    keys_seen, first, last = (x.view(of_mask[0], -1) for x in parts)
    if keys == 1 < length_k:
        last = torch.where(last < 0, -1, length_k - 1)
    keys_seen = keys_seen.bool().expand(batch, length_k)
    first, last = (x.expand(batch, length_q).flatten() for x in (first, last))
    rows = (last >= 0).nonzero().flatten()
    if not len(rows):
        return "no query sees a key"
    if len(rows) < len(first):
        first, last = first[rows], last[rows]
    # From here on keys are numbered over the whole batch, without keys that no query sees.
    places = keys_seen.flatten().cumsum(0) - 1
    row_of_batch = rows // length_q
    start = row_of_batch * length_k
    low, high = places[start + first], places[start + last]
    groups = sequences(low, high)
    if isinstance(groups, str):
        return groups
    key_rows = keys_seen.flatten().nonzero().flatten()
    if sum(int(group.counts.sum()) for group in groups) > 2 * batch * length_k:
        return "its packed calls would need most keys more than twice"
    apart = low[1:] > high[:-1]
    documents = bool((apart & (row_of_batch.diff() == 0)).any())
    made = _with_shared_keys([_part(group, rows, key_rows, sizes, in_place) for group in groups])
    shares = len(rows) / (batch * length_q), len(key_rows) / (batch * length_k)
    is_causal = _is_causal(made, sizes) if shares == (1.0, 1.0) else None
    return Structure(_seen(made, shares, documents), made, is_causal, shares, {})


def _part(of: Sequences, rows: Tensor, key_rows: Tensor, sizes: Sizes, in_place: bool) -> MaskPart:
    """Return the packed call of sequences with the same window."""
    batch, length_q, length_k = sizes
    ends = of.counts.cumsum(0)
    within = torch.arange(int(ends[-1])) - (ends - of.counts).repeat_interleave(of.counts)
    places = within + of.starts.repeat_interleave(of.counts)
    repeats = bool((places.diff() <= 0).any())  # sequences are in order of their first keys
    rows_q, rows_k = rows[of.of_rows], key_rows[places]
    totals = batch * length_q, batch * length_k
    if in_place and (offsets := _in_place((rows_q, of.lengths, totals[0]), (rows_k, of.counts, totals[1]))):
        of_all_q, of_all_k = offsets
        longest = int(of_all_q.diff().max()), int(of_all_k.diff().max())
        return MaskPart(None, None, False, of_all_q.int(), of_all_k.int(), *longest, of.window)
    # A single tensor if both are equal, as in self-attention without padding.
    cu_seq_q = cu_seq_k = _offsets(of.lengths).int()
    if not torch.equal(of.lengths, of.counts):
        cu_seq_k = _offsets(of.counts).int()
    return MaskPart(
        _unless_all(rows_q, totals[0]), _unless_all(rows_k, totals[1]), repeats,
        cu_seq_q, cu_seq_k, int(of.lengths.max()), int(of.counts.max()), of.window,
    )  # fmt: skip


def _in_place(*sides: tuple[Tensor, Tensor, int]) -> tuple[Tensor, Tensor] | None:
    """Return offsets into all queries and into all keys, so that nothing is copied; None if order forbids it.

    Each side is the rows of its sequences, the number of each sequence's rows, and the number of all rows.
    Rows between two sequences become a sequence of queries without keys, and a sequence of keys without
    queries.
    """
    offsets, none = [], torch.zeros(1, dtype=torch.long)
    for rows, counts, total in sides:
        ends = counts.cumsum(0)
        begin, last = rows[ends - counts], rows[ends - 1] + 1
        if (last - begin != counts).any() or (begin[1:] < last[:-1]).any():
            return None
        # As if one more sequence, an empty one, followed at the end.
        end = torch.tensor([total])
        offsets.append((torch.cat([none, last]), torch.cat([begin, end]), torch.cat([last, end])))
    (_, begin_q, last_q), (before_k, begin_k, last_k) = offsets
    of_q = torch.stack([begin_q, begin_q, last_q], -1).flatten()
    of_k = torch.stack([before_k, begin_k, last_k], -1).flatten()
    is_new = (of_q.diff(prepend=none) > 0) | (of_k.diff(prepend=none) > 0)
    return torch.cat([none, of_q[is_new]]), torch.cat([none, of_k[is_new]])


def _with_shared_keys(parts: list[MaskPart]) -> tuple[MaskPart, ...]:
    """Make packed calls with equal keys share a tensor of indices, so that the keys are copied once.

    Under a causal mask with padding two calls have equal keys: queries before the padding, and queries in it,
    which see all keys.
    """
    shared: list[MaskPart] = []
    for part in parts:
        rows = part.rows_k
        if rows is not None:
            known = (other.rows_k for other in shared if other.rows_k is not None)
            rows = next((other for other in known if torch.equal(other, rows)), rows)
        shared.append(part._replace(rows_k=rows))
    return tuple(shared)


def _offsets(counts: Tensor) -> Tensor:
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0))


def _unless_all(rows: Tensor, count: int) -> Tensor | None:
    return None if len(rows) == count and torch.equal(rows, torch.arange(count)) else rows


def _seen(parts: tuple[MaskPart, ...], shares: tuple[float, float], documents: bool) -> str:
    """Return the kind of a mask, for messages."""
    windows = {part.window for part in parts}
    has_window = any(left >= 0 or right > 0 for left, right in windows)
    words = {
        "padded queries": shares[0] < 1.0,
        "padded keys": shares[1] < 1.0,
        "causal": any(right == 0 for _, right in windows),
        "a window": has_window,
        "documents": documents,
    }
    return ", ".join(word for word, is_so in words.items() if is_so) or "nothing hidden"


def _is_causal(parts: tuple[MaskPart, ...], sizes: Sizes) -> bool | None:
    """Return the `is_causal` that alone equals the mask; None if neither value does."""
    (batch, length_q, length_k), part = sizes, parts[0]
    is_all = len(parts) == 1 and part.rows_q is None and part.rows_k is None
    if not is_all or len(part.cu_seq_q) != batch + 1 or (part.max_q, part.max_k) != (length_q, length_k):
        return None
    # There is a sequence for each row of the batch, and the longest is as long as a row.
    if part.window == (-1, -1):
        return False
    return True if part.window == (-1, 0) and length_q == length_k else None
