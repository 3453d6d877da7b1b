"""The lengths and beginnings of packed sequences, as cuDNN wants them, derived on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from attnreg.backend import Call

__all__ = ["Offsets"]


class Offsets:
    """Lengths and beginnings of the sequences of one batch, padded to a planned batch.

    A sequence without keys counts as one without queries: cuDNN 9.19 would write NaN for it.

    Attributes:
        rows, keys: int32 (batch,), the lengths.
    """

    def __init__(self, call: Call, batch: int) -> None:
        cu_q, cu_k = call.cu_seqlens_q, call.cu_seqlens_k
        if cu_q is None or cu_k is None:
            raise AssertionError("a dense call has no offsets")
        starts_q = _padded(cu_q, batch)
        starts_k = starts_q if cu_k is cu_q else _padded(cu_k, batch)
        queries = starts_q.diff()
        self.keys = queries if starts_k is starts_q else starts_k.diff()
        if call.seqused_k is not None:
            self.keys = torch.nn.functional.pad(call.seqused_k, (0, batch - len(call.seqused_k)))
        self.rows = queries if self.keys is queries else queries * (self.keys > 0)
        self._starts = starts_q.long(), starts_k.long()
        self._scaled: dict[tuple[bool, int], Tensor] = {}

    def starts(self, of_keys: bool, stride: int) -> Tensor:
        """Return int64 (batch + 1,), where each sequence begins in a tensor with that token stride."""
        found = self._scaled.get((of_keys, stride))
        if found is None:
            found = self._scaled[of_keys, stride] = self._starts[of_keys] * stride
        return found


def _padded(offsets: Tensor, batch: int) -> Tensor:
    more = batch + 1 - len(offsets)
    return torch.cat((offsets, offsets[-1:].expand(more))) if more else offsets
