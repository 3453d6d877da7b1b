"""Where a result is wrong: the first element, how many, which rows and heads, and which rows see no key.

Only results that fail a check come here, so nothing here has to be fast.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch
from torch import Tensor

from attnreg.tools.measure.cases import Case

# So many ranges of numbers are shown one by one.
MOST_RANGES = 6

OF_KEYS = ("dk", "dv")
PAST_THE_END = "past the last offset"


def describe_faults(case: Case, name: str, got: Tensor, truth: Tensor, allowed: float, lse: Tensor) -> str:
    """Return where a result of a case differs from the truth by more than is allowed.

    Args:
        case: the call.
        name: the result's name, a field of `Results`.
        got, truth: the result and the right one, of the same shape; any dtype. `out` and `dq` are
            (B, S, H, D) or packed (T, H, D), `lse` is (B, H, S) or (H, T), `dk` and `dv` are like
            the key, also (pages, page size, H, D), `dsinks` is (H,), and `dbias` broadcasts to
            (B, H, S_q, S_k).
        allowed: the largest difference that passes.
        lse: the right LSE (B, H, S) or (H, T), which is -inf in rows that see no key.
    """
    if got.shape != truth.shape:
        return f"got shape {tuple(got.shape)}, expected {tuple(truth.shape)}"
    wide, right = got.detach().to(torch.float64), truth.to(torch.float64)
    wrong = ~((wide - right).abs() <= allowed) & (wide != right)
    if not bool(wrong.any()):
        return ""
    nans = int((wrong & wide.isnan()).sum())
    counted = f"{int(wrong.sum()):,} of {wrong.numel():,} elements are wrong"
    counted += f", {'all' if nans == int(wrong.sum()) else f'{nans:,}'} of them NaN" if nans else ""
    text = f"{_first(case, name, wrong, wide, right)}; {counted}"
    if name == "dsinks":
        return f"{text}; {_numbers('head', _indices(wrong), case.heads[0])}"
    if name == "dbias":
        return text
    by_row = wrong.transpose(-1, -2) if name == "lse" else wrong.any(-1)  # (B, S, H) or (T, H)
    heads = _numbers("head", _indices(by_row.flatten(0, -2).any(0)), by_row.shape[-1])
    rows = by_row.any(-1)
    parts = [text, _rows_text(case, name, rows), heads]
    if name not in OF_KEYS:
        unseen = (lse == -torch.inf).all(-2)  # (B, S) or (T,)
        parts.append(_unseen_text(case, rows, unseen))
    return "; ".join(filter(None, parts))


def first_difference(name: str, got: Tensor, before: Tensor) -> str:
    """Return the first element in which two tensors of one shape differ, and both values; empty if equal.

    The shape may be any. A NaN equals a NaN.
    """
    differs = (got != before) & ~(got.isnan() & before.isnan())
    if not bool(differs.any()):
        return ""
    index = tuple(differs.nonzero()[0].tolist())
    values = " and ".join(_shown(float(x[index])) for x in (before, got))
    return f"{int(differs.sum()):,} of {differs.numel():,} elements differ, first {name}{[*index]}: {values}"


def _first(case: Case, name: str, wrong: Tensor, got: Tensor, truth: Tensor) -> str:
    """Return the first wrong element, what its indices mean, and both values."""
    index = tuple(wrong.nonzero()[0].tolist())
    meaning = [f"{axis} {number}" for axis, number in zip(_axes(case, name, len(index)), index, strict=True)]
    if case.varlen and name != "dsinks" and not _paged(case, name):
        at = 1 if name == "lse" else 0
        meaning[at] = _in_sequence(case, name, index[at])
    values = f"got {_shown(float(got[index]))}, expected {_shown(float(truth[index]))}"
    return f"first {name}{[*index]} ({', '.join(meaning)}): {values}"


def _axes(case: Case, name: str, dims: int) -> tuple[str, ...]:
    """Return the names of a result's dimensions, of which there are `dims`."""
    if name == "dsinks":
        return ("head",)
    if name == "dbias":
        return ("sequence", "head", "row", "key")[-dims:]
    if _paged(case, name):
        return "page", "row of the page", "head", "dim"
    row = "key" if name in OF_KEYS else "row"
    axes = ("head", row) if name == "lse" else (row, "head", "dim")
    return axes if case.varlen else ("sequence", *axes)


def _paged(case: Case, name: str) -> bool:
    return name in OF_KEYS and case.page_size is not None


def _offsets(case: Case, name: str) -> list[int]:
    """Return where the sequences of a packed result start, and where the last one ends."""
    return [*accumulate(case.lens_k if name in OF_KEYS else case.lens_q, initial=0)]


def _in_sequence(case: Case, name: str, row: int) -> str:
    """Return the sequence of a packed row, and the row's number there."""
    of = "key" if name in OF_KEYS else "row"
    for sequence, (start, end) in enumerate(pairwise(_offsets(case, name))):
        if row < end:
            return f"{of} {row - start} of sequence {sequence}"
    return f"{of} {row}, {PAST_THE_END}"


def _rows_text(case: Case, name: str, rows: Tensor) -> str:
    """Return which rows are wrong, (B, S) or packed (T,), and in which sequences."""
    if _paged(case, name):
        return _numbers("page", _indices(rows.any(-1)), rows.shape[0])
    of = "key" if name in OF_KEYS else "row"
    if not case.varlen:
        sequences = _numbers("sequence", _indices(rows.any(-1)), rows.shape[0])
        return f"{_numbers(of, _indices(rows.any(0)), rows.shape[1])}; {sequences}"
    wrong, offsets = _indices(rows), _offsets(case, name)
    among = [n for n, (start, end) in enumerate(pairwise(offsets)) if bool(rows[start:end].any())]
    parts = [_numbers(of, wrong, len(rows))]
    if among:
        parts.append(_numbers("sequence", among, len(offsets) - 1))
    if wrong[-1] >= offsets[-1]:
        parts.append(f"{'some' if among else 'all'} of these {of}s are {PAST_THE_END}")
    return "; ".join(parts)


def _unseen_text(case: Case, wrong: Tensor, unseen: Tensor) -> str:
    """Return which rows see no key, and whether the wrong rows are among them; all (B, S) or (T,)."""
    unseen = unseen.clone()
    if case.varlen:
        unseen[sum(case.lens_q) :] = False  # rows of no sequence
    if not bool(unseen.any()):
        return "every row of a sequence sees a key"
    if case.varlen:
        where = _numbers("row", _indices(unseen), len(unseen))
    else:
        where = _numbers("row", _indices(unseen.any(0)), unseen.shape[1])
        where += f" in {_numbers('sequence', _indices(unseen.any(-1)), unseen.shape[0])}"
    inside, outside = bool((wrong & unseen).any()), bool((wrong & ~unseen).any())
    which = "all wrong rows are" if not outside else "some wrong rows are" if inside else "no wrong row is"
    return f"no key is seen by {where} ({which} among them)"


def _indices(mask: Tensor) -> list[int]:
    """Return where a mask (N,) is true."""
    return [int(index) for index in mask.nonzero()[:, 0]]


def _numbers(noun: str, numbers: list[int], count: int) -> str:
    """Return "head 1 of 4", "rows 0-2, 5 of 65", "30 rows between 0 and 60 of 65" or "all 4 heads"."""
    if len(numbers) == count > 1:
        return f"all {count} {noun}s"
    ranges = _ranges(numbers)
    if not ranges:
        return f"{len(numbers)} {noun}s between {numbers[0]} and {numbers[-1]} of {count}"
    return f"{noun}{'s' if len(numbers) != 1 else ''} {ranges} of {count}"


def _ranges(numbers: list[int]) -> str:
    """Return numbers in rising order as ranges, such as "0-2, 5"; empty if there are many ranges."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    if len(ranges) > MOST_RANGES:
        return ""
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)


def _shown(number: float) -> str:
    return "NaN" if number != number else f"{number:.6g}"
