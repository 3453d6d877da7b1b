"""Which keys a run of queries sees, and the packed calls that compute it.

A query at row i of the whole batch sees the keys of its document from `i - left` to `i + right`. A kernel
aligns a window with the ends of its queries and keys, bottom-right. So if the call's keys end `shift` rows
after its queries, the kernel's window is (left + shift, right - shift).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from attnreg.parallel.layout import Piece

# Rows of the whole batch, from the first number to before the second.
Range = tuple[int, int]


def row_count(ranges: Iterable[Range]) -> int:
    """Return the number of rows in ranges that don't overlap."""
    return sum(end - begin for begin, end in ranges)


class Span(NamedTuple):
    """A run of queries with the keys that it sees, as rows of the whole batch.

    Attributes:
        begin, end: the queries.
        keys: the ranges of keys, in the order of the call.
        left, right: the window that the kernel computes.
        piece: the number of the queries' piece among the pieces of their rank.
    """

    begin: int
    end: int
    keys: tuple[Range, ...]
    left: int
    right: int
    piece: int

    @property
    def key_count(self) -> int:
        """The number of keys."""
        return row_count(self.keys)

    @property
    def _free(self) -> tuple[bool, bool]:
        """For the left and the right bound: whether it excludes nothing."""
        return _unbounded(self.left, self.key_count), _unbounded(self.right, self.end - self.begin)

    def is_full(self) -> bool:
        """Whether each query sees each key."""
        return all(self._free)

    def fits(self, window: tuple[int, int]) -> bool:
        """Whether a kernel with this window computes the span."""
        free_left, free_right = self._free
        left = window[0] == self.left or (free_left and _unbounded(window[0], self.key_count))
        right = window[1] == self.right or (free_right and _unbounded(window[1], self.end - self.begin))
        return left and right


def _unbounded(bound: int, count: int) -> bool:
    return bound < 0 or bound >= count - 1


def seen(number: int, piece: Piece, keys: Range, left: int, right: int) -> Span | None:
    """Return what the queries of a piece see of some keys of their document; None if they see none."""
    first, last = keys
    begin = piece.begin if right < 0 else max(piece.begin, first - right)
    end = piece.end if left < 0 else min(piece.end, last + left)
    if begin >= end:
        return None
    first = first if left < 0 else max(first, begin - left)
    last = last if right < 0 else min(last, end + right)
    if first >= last:
        return None
    shift = last - end
    bounds = left if left < 0 else left + shift, right if right < 0 else right - shift
    return Span(begin, end, ((first, last),), *bounds, number)


def seen_of_several(number: int, piece: Piece, keys: Iterable[Range], left: int, right: int) -> list[Span]:
    """Return the spans of a piece's queries with several ranges of keys, as few as possible.

    Ranges that all queries see whole can precede another range in one call, because a kernel aligns the
    window with the end of the keys.
    """
    spans = [span for key_range in keys if (span := seen(number, piece, key_range, left, right)) is not None]
    whole = [span for span in spans if span.is_full() and (span.begin, span.end) == (piece.begin, piece.end)]
    others = [span for span in spans if span not in whole]
    before = tuple(key_range for span in whole for key_range in span.keys)
    if not before:
        return others
    for place, span in enumerate(others):
        if span.left < 0 and (span.begin, span.end) == (piece.begin, piece.end):
            others[place] = span._replace(keys=before + span.keys)
            return others
    return [Span(piece.begin, piece.end, before, -1, -1, number), *others]


def grouped(spans: Sequence[Span]) -> list[tuple[tuple[int, int], list[Span]]]:
    """Group spans into packed calls, by window; no query is in a call twice."""
    windows = Counter((span.left, span.right) for span in spans if not span.is_full())
    groups: list[tuple[tuple[int, int], list[Span], set[int]]] = [
        (window, [], set()) for window, _ in windows.most_common()
    ]
    for span in spans:
        for window, members, pieces in groups:
            if span.piece not in pieces and span.fits(window):
                members.append(span)
                pieces.add(span.piece)
                break
        else:
            window = (-1, -1) if span.is_full() else (span.left, span.right)
            groups.append((window, [span], {span.piece}))
    return [(window, members) for window, members, _ in groups if members]


def united(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Sort ranges, and merge ranges that touch or overlap."""
    merged: list[Range] = []
    for begin, end in sorted(ranges):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return tuple(merged)
