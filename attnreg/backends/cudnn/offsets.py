"""The lengths and beginnings of packed sequences, as cuDNN wants them, derived on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnreg.backends.cudnn.problem import Slot, Start

if TYPE_CHECKING:
    from torch import Tensor

    from attnreg.backends.cudnn.graph import Graph

__all__ = ["Offsets"]


class Offsets:
    """Lengths and beginnings of the sequences of one batch, padded to a planned batch.

    A sequence without keys counts as one without queries: cuDNN 9.19 would write NaN for it.

    Args:
        cu_seqlens_q, cu_seqlens_k: the offsets, int32 (B + 1,).
        used: how many keys of each sequence count, int32 (B,); None for all.
        batch: how many sequences are planned for.
    """

    def __init__(self, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, used: Tensor | None, batch: int) -> None:
        starts_q = _padded(cu_seqlens_q, batch)
        starts_k = starts_q if cu_seqlens_k is cu_seqlens_q else _padded(cu_seqlens_k, batch)
        queries = starts_q.diff()
        keys = queries if starts_k is starts_q else starts_k.diff()
        if used is not None:
            keys = torch.nn.functional.pad(used, (0, batch - len(used)))
        rows = queries if keys is queries else queries * (keys > 0)
        self._lengths: dict[Slot | Start, Tensor] = {Slot.ROWS: rows, Slot.KEYS: keys}
        self._starts = starts_q.long(), starts_k.long()
        self._operands: dict[int, list[Tensor]] = {}

    def operands(self, plan: Graph) -> list[Tensor]:
        """Return a plan's vectors: int32 (batch,) lengths, int64 (batch + 1,) beginnings in each tensor."""
        found = self._operands.get(plan.kind)
        if found is None:
            found = self._operands[plan.kind] = [self._operand(one) for one in plan.vectors]
        return found

    def _operand(self, wanted: Slot | Start) -> Tensor:
        found = self._lengths.get(wanted)
        if found is None and isinstance(wanted, Start):
            found = self._lengths[wanted] = self._starts[wanted.of_keys] * wanted.stride
        if found is None:
            raise AssertionError(f"{wanted!r} isn't derived from offsets")
        return found


def _padded(offsets: Tensor, batch: int) -> Tensor:
    more = batch + 1 - len(offsets)
    return torch.cat((offsets, offsets[-1:].expand(more))) if more else offsets
