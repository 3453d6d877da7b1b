"""Sequences of queries and keys with the same window, from the first and the last key of each query."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Each window is a packed call: with more windows, starting kernels takes longer than using the mask.
MOST_WINDOWS = 8

IRREGULAR = "the keys of one query don't follow from those of the query before"


class Sequences(NamedTuple):
    """Sequences with the same window.

    Attributes:
        window: (left, right), aligned bottom-right; -1 is no bound.
        of_rows: bool (queries,), whether a query is in one of the sequences.
        lengths: int64 (sequences,), the number of queries of each.
        starts: int64 (sequences,), the first key of each.
        counts: int64 (sequences,), the number of keys of each.
    """

    window: tuple[int, int]
    of_rows: Tensor
    lengths: Tensor
    starts: Tensor
    counts: Tensor


def sequences(low: Tensor, high: Tensor) -> list[Sequences] | str:
    """Return sequences that reproduce each query's keys, grouped by window, or why there are none.

    Query t of a sequence sees the sequence's keys within the window.

    Args:
        low: int64 of shape (queries,), the first key of each query. It rises within a document.
        high: int64 of shape (queries,), the last key of each query. It rises within a document.
    """
    by_low, by_high = low.diff(), high.diff()
    joined = low[1:] <= high[:-1]
    if (joined & (by_low == 1) & (by_high == 0)).any():
        return _two_sided(low, high, joined)
    same = (by_low == 0) & (by_high == 0)
    grows = joined & (by_high == 1) & ((by_low == 0) | (by_low == 1))
    none = torch.zeros(1, dtype=torch.bool)
    is_causal = torch.cat([none, grows]) | torch.cat([grows, none])
    first = ~torch.cat([none, grows | (same & ~is_causal[1:] & ~is_causal[:-1])])
    starts, number = first.nonzero().flatten(), first.cumsum(0) - 1
    slides = grows & (by_low == 1)
    left = int((high - low)[is_causal].max()) if slides.any() else -1
    expected = low[starts][number]
    if left >= 0:
        expected = torch.maximum(expected, high - left)
    if ((low != expected) & is_causal).any():
        return IRREGULAR
    lengths = starts.diff(append=torch.tensor([len(low)]))
    counts = high[starts + lengths - 1] - low[starts] + 1
    causal = is_causal[starts]
    if causal.any():  # a sequence's only query sees all of its keys with either window
        causal |= (lengths == 1) & (counts <= (left + 1 if left >= 0 else counts))
    groups = []
    for window, these in (((left, 0), causal), ((-1, -1), ~causal)):
        if these.any():
            of_these = lengths[these], low[starts][these], counts[these]
            groups.append(Sequences(window, these[number], *of_these))
    return groups


def _two_sided(low: Tensor, high: Tensor, joined: Tensor) -> list[Sequences] | str:
    """Return the documents of windows that reach to both sides, or why they don't fit.

    Windows are aligned bottom-right, so if a document lacks its last keys, its window lies further right.
    """
    first = torch.cat([torch.ones(1, dtype=torch.bool), ~joined])
    starts, number = first.nonzero().flatten(), first.cumsum(0) - 1
    lengths = starts.diff(append=torch.tensor([len(low)]))
    ends = starts + lengths - 1
    begin, end = low[starts], high[ends]
    counts = end - begin + 1
    # From a query's place to its window's centre: the centre of the last query is the document's last key.
    shift = end - lengths + 1
    left = torch.where(low[ends] > begin, end - low[ends], -1)
    right = torch.where(high[starts] < end, high[starts] - shift, -1)
    both = torch.stack([left, right], -1)
    windows = sorted(
        {tuple(bounds) for bounds in both.tolist()}, reverse=True
    )  # -1 last: no bound fits more documents
    if len(windows) > MOST_WINDOWS:
        return f"it would take {len(windows)} packed calls, each with another window: at most {MOST_WINDOWS}"
    center = shift[number] + torch.arange(len(low)) - starts[number]
    unassigned, groups = torch.ones(len(starts), dtype=torch.bool), []
    for reach_left, reach_right in windows:
        fits = (left == reach_left) | ((left < 0) & (counts <= reach_left + 1))
        fits &= (right == reach_right) | ((right < 0) & (lengths <= reach_right + 1))
        these = fits & unassigned
        unassigned &= ~these
        if not these.any():
            continue
        of_rows = these[number]
        sees = begin[number], end[number]
        if reach_left >= 0:
            sees = torch.maximum(sees[0], center - reach_left), sees[1]
        if reach_right >= 0:
            sees = sees[0], torch.minimum(sees[1], center + reach_right)
        if ((low != sees[0]) | (high != sees[1]))[of_rows].any():
            return IRREGULAR
        groups.append(
            Sequences((reach_left, reach_right), of_rows, lengths[these], begin[these], counts[these])
        )
    return groups
