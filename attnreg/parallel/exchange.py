"""Rows of tensors between the ranks of a process group, by `torch.distributed`'s all-to-all.

All three methods move rows by this one collective. Where a rank sends to one other rank only, NCCL and gloo
send nothing to the others. NCCL runs it beside what is computed until `wait`.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor


class Pending:
    """Rows on their way from other ranks."""

    def __init__(self, rows: Tensor, sends: list[int], receives: list[int], group: Any) -> None:
        self._sent = rows.contiguous()  # has to exist until it has been sent
        self._received = rows.new_empty((sum(receives), *rows.shape[1:]))
        self._work: Any = dist.all_to_all_single(
            self._received, self._sent, receives, sends, group=group, async_op=True
        )

    def wait(self) -> Tensor:
        """Return the rows, in the order of the ranks that they come from; nothing is held after it."""
        self._work.wait()
        received = self._received
        del self._work, self._sent, self._received
        return received
