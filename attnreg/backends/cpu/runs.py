"""The sequences of a call, as runs of rows and keys in packed tensors."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

from attnreg.backends.cpu.tiles import visible

if TYPE_CHECKING:
    from torch import Tensor

    from attnreg.contract.backend import Call

__all__ = ["Run", "runs_of"]


class Run(NamedTuple):
    """`count` neighbouring sequences of one length: `rows` query rows and `keys` keys each.

    Rows that see nothing and keys that nobody sees are left out; `window` is as in `Visible`.
    """

    row: int
    rows: int
    key: int
    keys: int
    window: tuple[int, int]
    count: int = 1  # type: ignore[assignment]  # not the tuple's method


def runs_of(q: Tensor, k: Tensor, call: Call) -> tuple[Run, ...]:
    """Return the runs of a call in the order of their rows; dense tensors count as packed."""
    offsets_q = _offsets(call.cu_seqlens_q, q.shape)
    offsets_k = _offsets(call.cu_seqlens_k, k.shape)
    used = None if call.seqused_k is None else tuple(call.seqused_k.tolist())
    return _runs(offsets_q, offsets_k, used, call.window)


def _offsets(cu_seqlens: Tensor | None, shape: tuple[int, ...]) -> tuple[int, ...]:
    if cu_seqlens is not None:
        return tuple(cu_seqlens.tolist())
    return tuple(index * shape[1] for index in range(shape[0] + 1))


# The backward asks again what its forward did, and so does the next layer.
@functools.lru_cache(maxsize=32)
def _runs(
    offsets_q: tuple[int, ...],
    offsets_k: tuple[int, ...],
    used: tuple[int, ...] | None,
    window: tuple[int, int],
) -> tuple[Run, ...]:
    found: list[Run] = []
    for index, (row, key) in enumerate(zip(offsets_q[:-1], offsets_k[:-1], strict=True)):
        rows = offsets_q[index + 1] - row
        keys = offsets_k[index + 1] - key if used is None else used[index]
        seen = visible(rows, keys, window)
        if seen is None:
            continue
        run = Run(row + seen.row, rows - seen.row, key + seen.key, keys - seen.key, seen.window)
        if found and _continues(found[-1], run):
            found[-1] = found[-1]._replace(count=found[-1].count + 1)
        else:
            found.append(run)
    return tuple(found)


def _continues(run: Run, following: Run) -> bool:
    """Return whether a sequence has the lengths of a run and lies directly behind it."""
    rows, keys = run.count * run.rows, run.count * run.keys
    return run._replace(row=run.row + rows, key=run.key + keys, count=1) == following
