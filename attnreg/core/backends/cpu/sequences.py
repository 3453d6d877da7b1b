"""The sequences of a call, checked against its tensors: what torch's kernel works through.

The compiled kernel looks them up itself (`kernel/call.h`), by the same rules.

Rows that see no key and keys that no row sees are left out. Both are at the beginning of a sequence, as
masks are aligned bottom-right.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from attnreg.core.contract.backend import Call
from attnreg.errors import InvalidInputError

Window = tuple[int, int]


class Sequence(NamedTuple):
    """One sequence: `rows` query rows and `keys` keys.

    `row` and `key` are the first of them: in entry `batch` of a dense tensor, else in the packed one. `left`
    and `right` are the window; a bound that hides nothing is -1.
    """

    batch: int
    row: int
    rows: int
    key: int
    keys: int
    left: int
    right: int


class UniformBatch(NamedTuple):
    """`count` neighbouring sequences of equal length, which torch's kernel takes in one call.

    `row` and `key` are the first of all, in packed tensors; `rows` and `keys` are the length of one.
    """

    row: int
    rows: int
    key: int
    keys: int
    window: Window
    count: int = 1  # type: ignore[assignment]  # not the tuple's method


@dataclass(frozen=True, eq=False)
class Sequences:
    """The sequences of a call, in the order of their rows; compared by identity.

    Attributes:
        each: those that have something to compute.
        tokens: how many rows and keys one entry of a dense tensor has; 0 for packed ones.
    """

    each: tuple[Sequence, ...]
    tokens: tuple[int, int]

    @functools.cached_property
    def uniform_batches(self) -> tuple[UniformBatch, ...]:
        """Return neighbours of equal length as batches."""
        found: list[UniformBatch] = []
        for batch, row, rows, key, keys, left, right in self.each:
            first = batch * self.tokens[0] + row, rows, batch * self.tokens[1] + key, keys
            one = UniformBatch(*first, (left, right))
            if found and _continues(found[-1], one):
                found[-1] = UniformBatch(*found[-1][:-1], found[-1].count + 1)
            else:
                found.append(one)
        return tuple(found)


def visible(len_q: int, len_k: int, window: Window) -> tuple[int, int, Window] | None:
    """Return the first row that sees a key, the first key that is seen, and a window for what is left.

    A bound that hides nothing is -1. None if nothing is visible.
    """
    left, right = window
    row = max(0, len_q - len_k - right) if right >= 0 else 0
    if row >= len_q or len_k == 0:
        return None
    key = max(0, row + len_k - len_q - left) if left >= 0 else 0
    hides_left, hides_right = 0 <= left < len_k - key - 1, 0 <= right < len_q - row - 1
    return row, key, (left if hides_left else -1, right if hides_right else -1)


def sequences_of(q: Tensor, k: Tensor, call: Call) -> Sequences:
    """Return the sequences of a call; raises `InvalidInputError` if offsets or counts don't fit."""
    used = None if call.seqused_k is None else tuple(call.seqused_k.tolist())
    of_q, of_k = _lengths(call.cu_seqlens_q, q), _lengths(call.cu_seqlens_k, k)
    if call.block_table is not None:
        count, pages = call.block_table.shape
        of_k = _Lengths(None, pages * k.size(1), count)
    return _sequences(of_q, of_k, used, call.window)


class _Lengths(NamedTuple):
    """Where sequences begin and end: by offsets, or a number of equally long ones.

    `tokens` are those of a packed tensor, or of one entry of a dense one.
    """

    offsets: tuple[int, ...] | None
    tokens: int
    sequences: int

    def of(self, index: int) -> tuple[int, int]:
        """Return the first token of a sequence, in its batch entry, and how many there are."""
        if self.offsets is None:
            return 0, self.tokens
        begin, end = self.offsets[index], self.offsets[index + 1]
        if not 0 <= begin <= end <= self.tokens:
            raise InvalidInputError(
                f"offsets: got {begin} to {end} at index {index}, expected a range of {self.tokens} tokens"
            )
        return begin, end - begin


def _lengths(cu_seqlens: Tensor | None, x: Tensor) -> _Lengths:
    if cu_seqlens is None:
        return _Lengths(None, x.size(1), x.size(0))
    offsets = tuple(cu_seqlens.tolist())
    return _Lengths(offsets, x.size(0), len(offsets) - 1)


# Cached: a backward has the sequences of its forward, and a layer those of the one before. Checked, although
# fronts do so, too: a backward may be called directly, with anything, and kernels read any address.
@functools.lru_cache(maxsize=32)
def _sequences(of_q: _Lengths, of_k: _Lengths, used: tuple[int, ...] | None, window: Window) -> Sequences:
    counts = of_q.sequences if used is None else len(used)
    if not of_q.sequences == of_k.sequences == counts:
        raise InvalidInputError(
            f"sequences: got {of_q.sequences} of the query, {of_k.sequences} of the key "
            f"and {counts} counts of keys, expected equal numbers"
        )
    is_dense = of_q.offsets is None
    each = []
    for index in range(of_q.sequences):
        (row, rows), (key, keys) = of_q.of(index), of_k.of(index)
        if used is not None:
            if not 0 <= used[index] <= keys:
                raise InvalidInputError(
                    f"seqused_k: got {used[index]} at index {index}, expected 0 to {keys}, the number of keys"
                )
            keys = used[index]
        if seen := visible(rows, keys, window):
            hidden_rows, hidden_keys, bounds = seen
            first = index if is_dense else 0, row + hidden_rows, rows - hidden_rows
            each.append(Sequence(*first, key + hidden_keys, keys - hidden_keys, *bounds))
    return Sequences(tuple(each), (of_q.tokens, of_k.tokens) if is_dense else (0, 0))


def _continues(batch: UniformBatch, following: UniformBatch) -> bool:
    """Return whether a sequence has the lengths of a batch and follows it directly."""
    row, rows, key, keys, window, count = batch
    return following == (row + count * rows, rows, key + count * keys, keys, window, 1)
