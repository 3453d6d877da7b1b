"""Sequences of queries and keys with the same window, from the first and the last key of each query."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Each is a packed call: with more of them, starting kernels takes longer than the mask.
MOST_WINDOWS = 8

IRREGULAR = "the keys of one query don't follow from those of the query before"


class Sequences(NamedTuple):
    """Sequences of one window: which of the rows are theirs, and of each its queries and its keys."""

    window: tuple[int, int]
    of_rows: Tensor
    lengths: Tensor
    starts: Tensor
    counts: Tensor


def sequences(low: Tensor, high: Tensor) -> list[Sequences] | str:
    """Return sequences in which query t of n sees what the window leaves of m keys, or why not.

    `low` and `high` are the first and the last key of each query. Both rise within a document.
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
    if (low != expected)[is_causal].any():
        return IRREGULAR
    lengths = first.nonzero().flatten().diff(append=torch.tensor([len(low)]))
    counts = high[starts + lengths - 1] - low[starts] + 1
    causal = is_causal[starts]
    if causal.any():  # the only query of a sequence sees all of its keys with either
        causal |= (lengths == 1) & (counts <= (left + 1 if left >= 0 else counts))
    found = []
    for window, these in (((left, 0), causal), ((-1, -1), ~causal)):
        if these.any():
            of_these = lengths[these], low[starts][these], counts[these]
            found.append(Sequences(window, these[number], *of_these))
    return found


def _two_sided(low: Tensor, high: Tensor, joined: Tensor) -> list[Sequences] | str:
    """Return the documents of windows that reach to both sides, or why not.

    Aligned bottom-right, the window of a document without its last keys lies further to the right.
    """
    first = torch.cat([torch.ones(1, dtype=torch.bool), ~joined])
    starts, number = first.nonzero().flatten(), first.cumsum(0) - 1
    lengths = starts.diff(append=torch.tensor([len(low)]))
    ends = starts + lengths - 1
    begin, end = low[starts], high[ends]
    counts = end - begin + 1
    # Of the key that the window is about: that of the last query is the document's last.
    shift = end - lengths + 1
    left = torch.where(low[ends] > begin, end - low[ends], -1)
    right = torch.where(high[starts] < end, high[starts] - shift, -1)
    both = torch.stack([left, right], -1)
    windows = sorted({tuple(one) for one in both.tolist()}, reverse=True)  # the last, of -1, fit others, too
    if len(windows) > MOST_WINDOWS:
        return f"it would take {len(windows)} packed calls, each with another window: at most {MOST_WINDOWS}"
    center = shift[number] + torch.arange(len(low)) - starts[number]
    unassigned, found = torch.ones(len(starts), dtype=torch.bool), []
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
        found.append(
            Sequences((reach_left, reach_right), of_rows, lengths[these], begin[these], counts[these])
        )
    return found
