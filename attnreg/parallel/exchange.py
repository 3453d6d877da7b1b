"""Rows of tensors between the ranks of a process group, by `torch.distributed`'s all-to-all.

All three methods move rows by this collective. Where a rank sends to a single rank, NCCL and gloo send
nothing to further ranks. Both run the exchange beside computation until `wait`. (With
`TORCH_NCCL_BLOCKING_WAIT` NCCL doesn't: the host waits at once.)

With NCCL an exchange is enqueued on a stream of high priority. An attention kernel occupies all of a GPU. On
a usual stream an exchange that becomes ready together with a kernel would often begin after the kernel. (Two
H200s, one document of 65,536 tokens: all_to_all takes 53.9 ms in place of 55.4.)

An exchange that is waited for at once runs on the current stream, because a further stream costs the host 0.1
ms for each exchange.
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
        arguments = self._received, self._sent, receives, sends
        if alone:
            dist.all_to_all_single(*arguments, group=group)
            return
        if not (rows.is_cuda and "nccl" in dist.get_backend_config(group)):
            self._done = dist.all_to_all_single(*arguments, group=group, async_op=True)
            return
        self._stream = torch.cuda.current_stream(rows.device)
        stream = _stream(rows.device, group.group_name)
        stream.wait_stream(self._stream)
        # NCCL runs a call that isn't asynchronous on the current stream.
        with torch.cuda.stream(stream):
            dist.all_to_all_single(*arguments, group=group)
            self._done = stream.record_event()

    def wait(self) -> Tensor:
        """Return the rows in the order of their source ranks; afterwards this object holds no tensor."""
        done, self._done = self._done, None
        if isinstance(done, torch.cuda.Event):
            torch.cuda.current_stream(self._received.device).wait_event(done)
        elif done is not None:
            done.wait()
        received = self._received
        del self._sent, self._received
        return received

    def __del__(self) -> None:
        # A failed call drops rows on their way. Without this wait, their memory would be reused while NCCL
        # writes it.
        if isinstance(self._done, torch.cuda.Event):
            with suppress(Exception):  # at the end of a process there may be no stream any more
                self._stream.wait_event(self._done)


# One stream for each group, as NCCL itself has: ranks may use two groups in different orders.
@functools.cache
def _stream(device: torch.device, group: str) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
