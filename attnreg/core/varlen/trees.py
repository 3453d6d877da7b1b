"""`tree_ranges`: the `key_ranges` of sequences that branch."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from attnreg.core.torchlib.frames import leave_module_uncompiled
from attnreg.errors import InvalidInputError, short_repr

__all__ = ["tree_ranges"]


def tree_ranges(
    parents: Sequence[int] | Tensor,
    lengths: Sequence[int] | Tensor | None = None,
    *,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return the `key_ranges` of a tree of segments, for `attnreg.varlen_attn`.

    A token sees its own segment up to itself, and its ancestors' segments whole. So it needs no `is_causal`.
    Segments are concatenated in a packed sequence, a parent before its children. For several trees use
    several roots, or separate sequences, whose ranges are concatenated.

    Args:
        parents: for each of N segments the number of its parent; -1 for a root. Integers, or a tensor (N,).
        lengths: the tokens of each segment; unless given, each segment is a token. As `parents`.
        device: the device of the result. By default the device of a tensor `parents`, else the CPU.

    Returns:
        The ranges, int32 (T, R, 2): T tokens, and the most ranges R that a token needs. Segments that follow
        each other share a range, so R is at most the depth of the tree.

    Raises:
        InvalidInputError: a number is no integer, a parent doesn't come before its child, or there are not as
            many lengths as parents.
    """
    if device is None:
        device = parents.device if isinstance(parents, Tensor) else "cpu"
    of_segments = _integers("parents", parents)
    counts = [1] * len(of_segments) if lengths is None else _integers("lengths", lengths)
    _check(of_segments, counts)
    whole: list[tuple[tuple[int, int], ...]] = []  # what a child of each segment sees of its ancestors
    start = 0
    for parent, count in zip(of_segments, counts, strict=True):
        before = whole[parent] if parent >= 0 else ()
        if before and before[-1][1] == start:
            before, first = before[:-1], before[-1][0]
        else:
            first = start
        start += count
        whole.append((*before, (first, start)))
    width = max([1, *(len(ranges_of) for ranges_of in whole)])
    empty = ((0, 0),)
    table = torch.tensor([[*ranges, *empty * (width - len(ranges))] for ranges in whole], dtype=torch.int32)
    of_each = torch.tensor(counts, dtype=torch.int64)
    # With the size a compiled program keeps one graph.
    rows = torch.repeat_interleave(torch.arange(len(counts)), of_each, output_size=start)
    ranges = table.view(-1, width, 2)[rows]
    # The last range of each segment is its own, which ends behind the token.
    own = torch.tensor([len(ranges_of) - 1 for ranges_of in whole], dtype=torch.int64)[rows]
    tokens = torch.arange(len(rows))
    ranges[tokens, own, 1] = tokens.to(torch.int32) + 1
    return ranges.to(device)


def _integers(name: str, numbers: Sequence[int] | Tensor) -> list[int]:
    if isinstance(numbers, Tensor):
        if numbers.dim() != 1 or numbers.is_floating_point():
            got = f"shape {tuple(numbers.shape)}, {numbers.dtype}"
            raise InvalidInputError(f"{name}: got {got}, expected one dimension of integers")
        return numbers.tolist()
    try:
        return [operator.index(number) for number in numbers]
    except TypeError:
        raise InvalidInputError(f"{name}: got {short_repr(numbers)}, expected integers") from None


def _check(parents: list[int], lengths: list[int]) -> None:
    if len(lengths) != len(parents):
        raise InvalidInputError(
            f"lengths: got {len(lengths)} of them, expected one for each parent, {len(parents)}"
        )
    for number, (parent, length) in enumerate(zip(parents, lengths, strict=True)):
        if not -1 <= parent < number:
            before = (
                f"-1 or a segment before it, 0 to {number - 1}" if number else "-1: it has none before it"
            )
            raise InvalidInputError(f"parents[{number}]: got {parent}, expected {before}")
        if length < 0:
            raise InvalidInputError(f"lengths[{number}]: got {length}, expected 0 or more")


leave_module_uncompiled(__name__)
