"""What a boolean mask lets each query see, as packed calls: described on the device, decided on the host.

Per row of the batch some keys are seen by no query: padding. Of the others each query of a mask with
structure sees those from a first to a last. So `describe` returns the keys that are seen, each query's first
and last, and whether the mask rebuilt from these three is the mask itself: all in one tensor, read back once.
`structure_of` then needs the mask no more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnreg.masks.rows import APART, OVERLAPPING, REPEATED, Choice
from attnreg.masks.sequences import Sequences, sequences

Sizes = tuple[int, int, int]  # of the batch, the queries and the keys

# Elements of a mask that are looked at at a time: a few temporary tensors are as large.
MOST_ELEMENTS = 2**27


class Part(NamedTuple):
    """One packed call: sequences with the same window.

    Attributes:
        rows_q, rows_k: the queries and keys as indices into (B * S), one sequence after the other. None for
            all, in order: those of no sequence are then sequences of queries or of keys alone, which give 0.
        repeats: whether a key belongs to two sequences, and is there twice.
        cu_seq_q, cu_seq_k: int32 (sequences + 1,), where each sequence begins, and the end of the last.
        max_q, max_k: the longest sequence.
        window: (left, right), aligned bottom-right, as `varlen_attn` takes it.
    """

    rows_q: Tensor | None
    rows_k: Tensor | None
    repeats: bool
    cu_seq_q: Tensor
    cu_seq_k: Tensor
    max_q: int
    max_k: int
    window: tuple[int, int]


@dataclass(frozen=True, eq=False)
class Structure:
    """What a mask was recognised as.

    Attributes:
        seen: its kind, for messages: "padded keys, causal".
        parts: the packed calls that together are the call with the mask; a query in none sees no key.
        is_causal: whether all of it can be said by `is_causal` alone, and no mask; None if it can't.
        shares: which shares of the queries and of the keys count.
        refused: by kind of call, why such a call goes on with its mask all the same; empty if it doesn't.
    """

    seen: str
    parts: tuple[Part, ...]
    is_causal: bool | None
    shares: tuple[float, float]
    refused: dict[tuple[object, ...], str]

    def to(self, device: torch.device) -> Structure:
        """Return the same on another device; what two packed calls share is one tensor there, too."""
        moved: dict[int, Tensor] = {}

        def there(one: Any) -> Any:
            if not isinstance(one, Tensor):
                return one
            if id(one) not in moved:
                moved[id(one)] = one.to(device)
            return moved[id(one)]

        return replace(self, parts=tuple(Part(*map(there, part)) for part in self.parts))

    @cached_property
    def choices(self) -> tuple[Choice, Choice]:
        """Which queries and which keys each packed call takes."""
        overlap = REPEATED if any(part.repeats for part in self.parts) else OVERLAPPING
        queries = Choice.of([part.rows_q for part in self.parts], APART)
        return queries, Choice.of([part.rows_k for part in self.parts], overlap)


def describe(mask: Tensor) -> Tensor:
    """Return what there is to know of a mask (B, S_q, S_k) as int32 numbers on its device.

    First whether they say all of it, then (B, S_k) which keys are seen, then (B, S_q) each query's first and
    last key; the last is -1 for a query that sees none.
    """
    pieces = torch.split(mask, max(MOST_ELEMENTS // max(mask[0].numel(), 1), 1))
    whole, keys, first, last = zip(*map(_describe, pieces), strict=True)
    numbers = torch.stack(whole).all().view(1), *keys, *first, *last
    return torch.cat([x.flatten().int() for x in numbers])


def _describe(mask: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    length = mask.shape[-1]
    numbers, places = mask.to(torch.uint8), torch.arange(length, device=mask.device)
    keys, sees = mask.any(-2), mask.any(-1)
    first = numbers.argmax(-1)
    last = torch.where(sees, length - 1 - numbers.flip(-1).argmax(-1), -1)
    rebuilt = (places >= first[..., None]) & (places <= last[..., None]) & keys[:, None]
    return (rebuilt == mask).all(), keys, first, last


def structure_of(numbers: Tensor, of_mask: Sizes, sizes: Sizes, in_place: bool) -> Structure | str:
    """Return the structure that numbers of `describe` say of a call, or why it has none.

    `of_mask` are the mask's own sizes, of which some may be 1 where the call's `sizes` aren't. `in_place`
    leaves queries and keys where they are if it can, as sequences of their own if they don't count.
    """
    if not numbers[0]:
        return "some query sees keys with gaps between them"
    (batch, length_q, length_k), (_, queries, keys) = sizes, of_mask
    parts = torch.split(numbers[1:], [of_mask[0] * n for n in (keys, queries, queries)])
    seen, first, last = (x.view(of_mask[0], -1).long() for x in parts)
    if keys == 1 < length_k:
        last = torch.where(last < 0, -1, length_k - 1)
    seen = seen.bool().expand(batch, length_k)
    first, last = (x.expand(batch, length_q).flatten() for x in (first, last))
    rows = (last >= 0).nonzero().flatten()
    if not len(rows):
        return "no query sees a key"
    # Keys are counted over the whole batch from here on, without those that no query sees.
    places = seen.flatten().cumsum(0) - 1
    start = rows // length_q * length_k
    low, high = places[start + first[rows]], places[start + last[rows]]
    found = sequences(low, high)
    if isinstance(found, str):
        return found
    key_rows = seen.flatten().nonzero().flatten()
    if sum(int(one.counts.sum()) for one in found) > 2 * batch * length_k:
        return "its packed calls would need most keys more than twice"
    apart = low[1:] > high[:-1]
    documents = bool((apart & ((rows // length_q).diff() == 0)).any())
    made = _with_shared_keys([_part(one, rows, key_rows, sizes, in_place) for one in found])
    shares = len(rows) / len(first), len(key_rows) / (batch * length_k)
    is_causal = _is_causal(made, sizes) if shares == (1.0, 1.0) else None
    return Structure(_seen(made, shares, documents), made, is_causal, shares, {})


def _part(of: Sequences, rows: Tensor, key_rows: Tensor, sizes: Sizes, in_place: bool) -> Part:
    """Return the packed call of these."""
    batch, length_q, length_k = sizes
    ends = of.counts.cumsum(0)
    within = torch.arange(int(ends[-1])) - (ends - of.counts).repeat_interleave(of.counts)
    places = within + of.starts.repeat_interleave(of.counts)
    repeats = bool((places.diff() <= 0).any())  # no sequence begins before the one that comes first
    rows_q, rows_k = rows[of.of_rows], key_rows[places]
    totals = batch * length_q, batch * length_k
    if in_place and (offsets := _in_place((rows_q, of.lengths, totals[0]), (rows_k, of.counts, totals[1]))):
        of_all_q, of_all_k = offsets
        longest = int(of_all_q.diff().max()), int(of_all_k.diff().max())
        return Part(None, None, False, of_all_q.int(), of_all_k.int(), *longest, of.window)
    # One tensor where both are the same, as in self-attention without padding.
    cu_seq_q = cu_seq_k = _offsets(of.lengths).int()
    if not torch.equal(of.lengths, of.counts):
        cu_seq_k = _offsets(of.counts).int()
    return Part(
        _unless_all(rows_q, totals[0]), _unless_all(rows_k, totals[1]), repeats,
        cu_seq_q, cu_seq_k, int(of.lengths.max()), int(of.counts.max()), of.window,
    )  # fmt: skip


def _in_place(*sides: tuple[Tensor, Tensor, int]) -> tuple[Tensor, Tensor] | None:
    """Return offsets into all queries and into all keys, by which none is copied; None if order forbids it.

    Each side is the rows of its sequences, how many each has, and how many there are in all. What lies
    between two sequences becomes one of queries without keys and one of keys without queries.
    """
    found, none = [], torch.zeros(1, dtype=torch.long)
    for rows, counts, total in sides:
        ends = counts.cumsum(0)
        begin, last = rows[ends - counts], rows[ends - 1] + 1
        if (last - begin != counts).any() or (begin[1:] < last[:-1]).any():
            return None
        # As if one more sequence came after the end, with nothing in it.
        end = torch.tensor([total])
        found.append((torch.cat([none, last]), torch.cat([begin, end]), torch.cat([last, end])))
    (_, begin_q, last_q), (before_k, begin_k, last_k) = found
    of_q = torch.stack([begin_q, begin_q, last_q], -1).flatten()
    of_k = torch.stack([before_k, begin_k, last_k], -1).flatten()
    is_new = (of_q.diff(prepend=none) > 0) | (of_k.diff(prepend=none) > 0)
    return torch.cat([none, of_q[is_new]]), torch.cat([none, of_k[is_new]])


def _with_shared_keys(parts: list[Part]) -> tuple[Part, ...]:
    """Return packed calls of which those with the same keys have one tensor of them: they are copied once.

    So have the queries before the padding, under a causal mask, and those in it, which see all keys.
    """
    found: list[Part] = []
    for part in parts:
        rows = part.rows_k
        if rows is not None:
            known = (one.rows_k for one in found if one.rows_k is not None)
            rows = next((one for one in known if torch.equal(one, rows)), rows)
        found.append(part._replace(rows_k=rows))
    return tuple(found)


def _offsets(counts: Tensor) -> Tensor:
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0))


def _unless_all(rows: Tensor, count: int) -> Tensor | None:
    return None if len(rows) == count and torch.equal(rows, torch.arange(count)) else rows


def _seen(parts: tuple[Part, ...], shares: tuple[float, float], documents: bool) -> str:
    """Return the kind of a mask in words."""
    windows = {one.window for one in parts}
    has_window = any(left >= 0 or right > 0 for left, right in windows)
    words = {
        "padded queries": shares[0] < 1.0,
        "padded keys": shares[1] < 1.0,
        "causal": any(right == 0 for _, right in windows),
        "a window": has_window,
        "documents": documents,
    }
    return ", ".join(word for word, is_so in words.items() if is_so) or "nothing hidden"


def _is_causal(parts: tuple[Part, ...], sizes: Sizes) -> bool | None:
    """Return the `is_causal` of a call whose mask says the same or nothing; None if it says more."""
    (batch, length_q, length_k), one = sizes, parts[0]
    is_all = len(parts) == 1 and one.rows_q is None and one.rows_k is None
    if not is_all or len(one.cu_seq_q) != batch + 1 or (one.max_q, one.max_k) != (length_q, length_k):
        return None
    # The longest is as long as a row of the batch, of which there are as many as sequences.
    if one.window == (-1, -1):
        return False
    return True if one.window == (-1, 0) and length_q == length_k else None
