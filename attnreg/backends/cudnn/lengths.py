"""The lengths and ragged offsets that plans read, derived from `cu_seqlens` on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnreg.backends.cudnn.problem import RaggedOffset, Slot
from attnreg.contract.offsets import derived_from

if TYPE_CHECKING:
    from torch import Tensor

    from attnreg.backends.cudnn.graph import Plan


def lengths_of(
    batch: int, stream: int, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, seqused_k: Tensor | None = None
) -> Lengths:
    """Return the lengths of a packed batch, derived once for as long as the offsets exist unchanged."""
    given = [cu_seqlens_q, cu_seqlens_k] if seqused_k is None else [cu_seqlens_q, cu_seqlens_k, seqused_k]
    return derived_from(
        given, stream, ("cuDNN", batch), lambda: Lengths(batch, cu_seqlens_q, cu_seqlens_k, seqused_k)
    )


class Lengths:
    """The lengths and ragged offsets of one batch, padded with empty sequences to what a plan is for.

    Args:
        batch: how many sequences the plan is for.
        cu_seqlens_q, cu_seqlens_k: int32 (B + 1,).
        seqused_k: how many keys of each sequence count, int32 (B,); None for all.
    """

    def __init__(
        self, batch: int, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, seqused_k: Tensor | None
    ) -> None:
        starts_q = _padded(cu_seqlens_q, batch)
        starts_k = starts_q if cu_seqlens_k is cu_seqlens_q else _padded(cu_seqlens_k, batch)
        queries = starts_q.diff()
        keys = queries if starts_k is starts_q else starts_k.diff()
        if seqused_k is not None:
            keys = torch.nn.functional.pad(seqused_k, (0, batch - len(seqused_k)))
        # cuDNN 9.19 writes NaN for a sequence without keys; one without queries it leaves alone.
        queries = queries if keys is queries else queries * (keys > 0)
        self._inputs: dict[Slot | RaggedOffset, Tensor] = {Slot.SEQ_LEN_Q: queries, Slot.SEQ_LEN_K: keys}
        self._starts = starts_q.long(), starts_k.long()
        self._of_plans: dict[int, list[Tensor]] = {}

    def inputs_of(self, plan: Plan) -> list[Tensor]:
        """Return what a plan reads: lengths, int32 (batch,), and ragged offsets, int64 (batch + 1,)."""
        found = self._of_plans.get(plan.lengths_key)
        if found is None:
            for wanted in plan.lengths:
                if isinstance(wanted, RaggedOffset) and wanted not in self._inputs:
                    self._inputs[wanted] = self._starts[wanted.of_keys] * wanted.token_stride
            found = self._of_plans[plan.lengths_key] = [self._inputs[wanted] for wanted in plan.lengths]
        return found


def _padded(cu_seqlens: Tensor, batch: int) -> Tensor:
    missing = batch + 1 - len(cu_seqlens)
    return torch.cat((cu_seqlens, cu_seqlens[-1:].expand(missing))) if missing else cu_seqlens
