"""Rows of tensors between the ranks of a process group, by `torch.distributed`'s all-to-all.

All three methods move rows by this one collective. Where a rank sends to one other rank only, NCCL and gloo
send nothing to the others. Both run it beside what is computed until `wait` (NCCL not with
`TORCH_NCCL_BLOCKING_WAIT`, with which the host waits at once).

NCCL's is enqueued on a stream of high priority: an attention kernel takes all of a GPU, and an exchange
that becomes ready together with one would otherwise often begin when that has ended (two H200s, one document
of 65,536 tokens: all_to_all takes 53.9 ms in place of 55.4). What is waited for at once runs on the current
stream: another one costs the host 0.1 ms for each exchange.
"""

from __future__ import annotations

import functools
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Pending:
    """Rows on their way from other ranks; `alone` if nothing is computed before they are waited for."""

    def __init__(
        self, rows: Tensor, sends: list[int], receives: list[int], group: Any, alone: bool = False
    ) -> None:
        self._done: Any = None
        self._sent = rows.contiguous()  # has to exist until it has been sent
        self._received = rows.new_empty((sum(receives), *rows.shape[1:]))
        given = self._received, self._sent, receives, sends
        if alone:
            dist.all_to_all_single(*given, group=group)
            return
        if not (rows.is_cuda and "nccl" in dist.get_backend_config(group)):
            self._done = dist.all_to_all_single(*given, group=group, async_op=True)
            return
        self._stream = torch.cuda.current_stream(rows.device)
        stream = _stream(rows.device, group.group_name)
        stream.wait_stream(self._stream)
        # The current stream is the one that NCCL uses for a call that isn't asynchronous.
        with torch.cuda.stream(stream):
            dist.all_to_all_single(*given, group=group)
            self._done = stream.record_event()

    def wait(self) -> Tensor:
        """Return the rows, in the order of the ranks that they come from; nothing is held after it."""
        done, self._done = self._done, None
        if isinstance(done, torch.cuda.Event):
            torch.cuda.current_stream(self._received.device).wait_event(done)
        elif done is not None:
            done.wait()
        received = self._received
        del self._sent, self._received
        return received

    def __del__(self) -> None:
        # A call that has failed drops what is on its way, whose memory its stream would give the next call.
        if isinstance(self._done, torch.cuda.Event):
            with suppress(Exception):  # at the end of a process there may be no stream any more
                self._stream.wait_event(self._done)


# As NCCL's own, one for each group: ranks may use two groups in different orders.
@functools.cache
def _stream(device: torch.device, group: str) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
