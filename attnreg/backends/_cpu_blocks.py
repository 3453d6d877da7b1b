"""Packed sequences as batches of few different shapes.

oneDNN compiles a product anew, for close to a millisecond, whenever a shape is new, and a ragged
batch has new lengths each time. So sequences are padded with zeros to a few sizes, and those of
one size become a batch; an index finds the packed rows of a batch, and later takes them back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from attnreg.backends._cpu_runs import Run

__all__ = ["Batch", "batches", "tile"]

# The longest side of one product, in rows or keys.
_LONGEST = 512

Band = tuple[int, int]


class Batch(NamedTuple):
    """Sequences of one padded size and one band; starts and lengths are int64 (count, 1)."""

    rows: int
    keys: int
    band: Band | None
    row: Tensor
    real_rows: Tensor
    key: Tensor
    real_keys: Tensor

    @property
    def count(self) -> int:
        """The number of sequences."""
        return self.row.size(0)

    def row_index(self, total: int) -> Tensor:
        """Return which packed row each row is, (count, rows); padding is row `total`."""
        return _index(self.row, self.real_rows, self.rows, total)

    def key_index(self, total: int) -> Tensor:
        """Return which packed row each key is, (count, keys); padding is row `total`."""
        return _index(self.key, self.real_keys, self.keys, total)


def batches(runs: Iterable[Run]) -> list[Batch]:
    """Return the batches that hold all sequences of some runs."""
    alike: dict[tuple[int, int, Band | None], list[tuple[int, int, int, int]]] = {}
    for run in runs:
        shape = (_padded(run.rows), _padded(run.keys), _band(run))
        members = alike.setdefault(shape, [])
        for index in range(run.count):
            members.append((run.row + index * run.rows, run.rows, run.key + index * run.keys, run.keys))
    return [
        Batch(*shape, *torch.tensor(members, device="cpu").unsqueeze(-1).unbind(1))
        for shape, members in alike.items()
    ]


def tile(padded: int) -> int:
    """Return how long the equal tiles of a padded length are."""
    return padded // -(-padded // _LONGEST)


def _padded(length: int) -> int:
    step = 16 if length <= 128 else 32
    tiles = -(-length // _LONGEST)
    return -(-length // (tiles * step)) * tiles * step


def _band(run: Run) -> Band | None:
    left, right = run.window
    shift = run.keys - run.rows
    if left < 0 and right < 0:
        return None
    far = 2**31
    return (shift - left if left >= 0 else -far, shift + right if right >= 0 else far)


def _index(start: Tensor, real: Tensor, size: int, total: int) -> Tensor:
    step = torch.arange(size, device="cpu")
    return torch.where(step < real, start + step, total)
