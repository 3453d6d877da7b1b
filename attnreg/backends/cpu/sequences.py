"""The sequences of a call, checked against its tensors, for torch's kernel.

The compiled kernel finds them itself (`kernel/call.h`), by the same rules.

Rows that see no key and keys that no row sees are left out. Both are at the beginning of a sequence, because
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


class VisibleSequence(NamedTuple):
    """The visible part of a sequence: `rows` query rows and `keys` keys.

    `row` and `key` are the first row and key: in entry `batch` of a dense tensor, else in the packed tensor.
    `left` and `right` are the window; a bound that hides nothing is -1.
    """

    batch: int
    row: int
    rows: int
    key: int
    keys: int
    left: int
    right: int


class UniformBatch(NamedTuple):
    """`count` neighbouring sequences of equal length, which torch's kernel runs in one call.

    `row` and `key` are the first row and key of the batch, in packed tensors; `rows` and `keys` are the
    lengths of each sequence.
    """

    row: int
    rows: int
    key: int
    keys: int
    window: Window
    count: int = 1  # type: ignore[assignment]  # not the tuple's method


@dataclass(frozen=True, eq=False)
class CallSequences:
    """The sequences of a call, in the order of their rows; compared by identity.

    Attributes:
        each: the sequences with visible scores.
        tokens: the numbers of rows and keys of an entry of a dense tensor. Both are 0 for packed tensors.
    """

    each: tuple[VisibleSequence, ...]
    tokens: tuple[int, int]

    @functools.cached_property
    def uniform_batches(self) -> tuple[UniformBatch, ...]:
        """Return neighbours of equal length as batches."""
        batches: list[UniformBatch] = []
        for batch, row, rows, key, keys, left, right in self.each:
            first = batch * self.tokens[0] + row, rows, batch * self.tokens[1] + key, keys
            following = UniformBatch(*first, (left, right))
            if batches and _continues(batches[-1], following):
                batches[-1] = UniformBatch(*batches[-1][:-1], batches[-1].count + 1)
            else:
                batches.append(following)
        return tuple(batches)


def visible(len_q: int, len_k: int, window: Window) -> tuple[int, int, Window] | None:
    """Return the first row that sees a key, the first visible key, and the window of the visible part.

    A bound that hides nothing is -1. None if nothing is visible.
    """
    left, right = window
    row = max(0, len_q - len_k - right) if right >= 0 else 0
    if row >= len_q or len_k == 0:
        return None
    key = max(0, row + len_k - len_q - left) if left >= 0 else 0
    hides_left, hides_right = 0 <= left < len_k - key - 1, 0 <= right < len_q - row - 1
    return row, key, (left if hides_left else -1, right if hides_right else -1)


def sequences_of(q: Tensor, k: Tensor, call: Call) -> CallSequences:
    """Return the sequences of a call; raises `InvalidInputError` if offsets or counts don't fit.

    `q` and `k` are (B, S, H, D), or packed (T, H, D).
    """
    used = None if call.seqused_k is None else tuple(call.seqused_k.tolist())
    of_q, of_k = _lengths(call.cu_seqlens_q, q), _lengths(call.cu_seqlens_k, k)
    if call.block_table is not None:
        count, pages = call.block_table.shape
        of_k = _Lengths(None, pages * k.size(1), count)
    return _sequences(of_q, of_k, used, call.window)


class _Lengths(NamedTuple):
    """The begins and ends of sequences: by offsets, or as a number of equally long sequences.

    `tokens` is the number of tokens of a packed tensor, or of an entry of a dense tensor.
    """

    offsets: tuple[int, ...] | None
    tokens: int
    sequences: int

    def of(self, index: int) -> tuple[int, int]:
        """Return the first token of a sequence, in its batch entry, and the number of its tokens."""
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


# Cached, because a backward has the sequences of its forward, and a layer the sequences of the previous
# layer. Fronts check offsets, too. But a backward may be called directly, with any offsets, and kernels read
# any address.
@functools.lru_cache(maxsize=32)
def _sequences(of_q: _Lengths, of_k: _Lengths, used: tuple[int, ...] | None, window: Window) -> CallSequences:
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
        if part := visible(rows, keys, window):
            hidden_rows, hidden_keys, bounds = part
            first = index if is_dense else 0, row + hidden_rows, rows - hidden_rows
            each.append(VisibleSequence(*first, key + hidden_keys, keys - hidden_keys, *bounds))
    return CallSequences(tuple(each), (of_q.tokens, of_k.tokens) if is_dense else (0, 0))


def _continues(batch: UniformBatch, following: UniformBatch) -> bool:
    """Return whether a sequence has the lengths of a batch and follows it directly."""
    row, rows, key, keys, window, count = batch
    return following == (row + count * rows, rows, key + count * keys, keys, window, 1)
