"""Random packed batches with rows of no sequence, and which rows see a key, ends one row at a time."""

import itertools
import random
from typing import NamedTuple

import torch

WINDOWS = ((-1, -1), (-1, 0), (0, 0), (2, -1), (-1, 2), (1, 3), (0, 5), (3, 0))


class Batch(NamedTuple):
    """Offsets of a batch, how many rows there are, and a window."""

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    tokens_q: int
    tokens_k: int
    window: tuple[int, int]


def drawn(seed, device="cpu", batch=None, longest=6):
    """Draw a batch, with empty sequences, rows behind the last, rows before the first and apart offsets."""
    draw = random.Random(seed)
    count = draw.randrange(6) if batch is None else batch

    def offsets(lengths):
        begin, apart = draw.choice((0, 0, 0, 2)), draw.choice((1, 1, 3))
        ends = torch.tensor([begin, *lengths]).cumsum(0).int()
        return torch.stack([ends] * apart, dim=1).to(device)[:, 0]

    def lengths():
        return [draw.choice((0, draw.randint(1, longest), draw.randint(1, longest))) for _ in range(count)]

    queries = offsets(lengths())
    keys = queries if draw.random() < 0.3 else offsets(lengths())
    ends = [int(x[-1]) + draw.choice((0, 0, 1, 5)) for x in (queries, keys)]
    return Batch(queries, keys, *ends, draw.choice(WINDOWS))


def sequence_of(row, offsets):
    """Return the number of the sequence that a row belongs to, or None."""
    ends = itertools.pairwise(offsets)
    return next((number for number, (begin, end) in enumerate(ends) if begin <= row < end), None)


def sees_a_key(row, packed):
    """Return whether a query row sees a key."""
    queries, keys = packed.cu_seqlens_q.tolist(), packed.cu_seqlens_k.tolist()
    number = sequence_of(row, queries)
    if number is None:
        return False
    length_q, length_k = (x[number + 1] - x[number] for x in (queries, keys))
    place, (left, right) = row - queries[number] + length_k - length_q, packed.window
    return any(
        (left < 0 or place - left <= key) and (right < 0 or key <= place + right) for key in range(length_k)
    )


def has_partners(row, offsets, others):
    """Return whether a row belongs to a sequence that has rows of the other kind, too."""
    number, others = sequence_of(row, offsets.tolist()), others.tolist()
    return number is not None and others[number + 1] > others[number]
