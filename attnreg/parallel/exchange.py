"""Rows of tensors between the ranks of a process group, by `torch.distributed`'s all-to-all.

All three ways move rows by this one collective. Where a rank sends to one other rank only, NCCL and gloo send
nothing to the others. NCCL runs it beside what is computed until `wait`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Where rows do not follow each other torch copies an element per thread: the larger ones, the faster.
LARGEST = torch.complex128


class Pending:
    """Rows on their way from other ranks."""

    def __init__(self, rows: Tensor, sends: list[int], receives: list[int], group: Any) -> None:
        self._sent = rows.contiguous()  # has to exist until it has been sent
        self._received = rows.new_empty((sum(receives), *rows.shape[1:]))
        self._work: Any = dist.all_to_all_single(
            self._received, self._sent, receives, sends, group=group, async_op=True
        )

    def wait(self) -> Tensor:
        """Return the rows, in the order of the ranks that they come from."""
        self._work.wait()
        return self._received


def copy(to: Tensor, source: Tensor) -> None:
    """Copy `source`, of the same shape and dtype, sixteen bytes at a time where both can be seen so."""
    if _is_of_sixteen_bytes(to) and _is_of_sixteen_bytes(source):
        to, source = to.view(LARGEST), source.view(LARGEST)
    to.copy_(source)


def _is_of_sixteen_bytes(x: Tensor) -> bool:
    if x.stride(-1) != 1 or x.data_ptr() % LARGEST.itemsize:
        return False
    places = (x.storage_offset(), x.shape[-1], *x.stride()[:-1])
    return all(place * x.element_size() % LARGEST.itemsize == 0 for place in places)
