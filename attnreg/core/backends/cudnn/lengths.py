"""What execution plans read of the offsets of a packed batch: lengths and ragged offsets.

One small kernel writes all of it for a new batch, for both directions and all layers of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from attnreg.core.backends.cudnn.graph import ExecutionPlan
from attnreg.core.backends.cudnn.problem import RaggedOffset, Slot
from attnreg.core.contract.offsets import derived_from
from attnreg.core.torchlib.device_code import DeviceKernel
from attnreg.core.torchlib.layout import uninitialized

# How many ragged offsets the kernel writes at most, besides those of a token stride of 1. A model whose
# queries are views of one projection needs up to six.
MOST = 12

# Its threads in a block.
_BLOCK = 256

WRITE = DeviceKernel("attnreg_cudnn_lengths", Path(__file__).with_name("lengths.cu"))


class OffsetsRead:
    """The ragged offsets that execution plans read, the newest `MOST` of them.

    A new batch gets all of these at once: which plans will run on it isn't known when the first does.

    Attributes:
        now: the ragged offsets, and what the kernel takes of them: how many there are, for which of them a
            bit says that they are of the keys, and the token strides.
    """

    def __init__(self) -> None:
        self.now: tuple[tuple[RaggedOffset, ...], tuple[int, ...]] = (), (0, 0, *[0] * MOST)

    def add(self, plan: ExecutionPlan) -> None:
        """Take those of an execution plan that has just been built."""
        read = [
            offset for offset in plan.lengths if isinstance(offset, RaggedOffset) and offset.token_stride != 1
        ]
        known = tuple(dict.fromkeys((*self.now[0], *read)))[-MOST:]
        of_keys = sum(1 << number for number, offset in enumerate(known) if offset.of_keys)
        strides = [offset.token_stride for offset in known]
        self.now = known, (len(known), of_keys, *strides, *[0] * (MOST - len(known)))


def lengths_of(
    read: OffsetsRead,
    batch: int,
    stream: int,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_k: Tensor | None = None,
) -> BatchLengths:
    """Return the lengths of a packed batch, derived once for as long as the offsets exist unchanged.

    The offsets' device has to be the current one, and `stream` its stream.
    """
    offsets = cu_seqlens_q, cu_seqlens_k, seqused_k
    return derived_from(offsets, stream, ("cuDNN", batch), partial(BatchLengths, read, batch, stream))


class BatchLengths:
    """The lengths and ragged offsets of one batch, padded with empty sequences to an execution plan's size.

    Args:
        read: which ragged offsets to write at once.
        batch: how many sequences the execution plan is for.
        stream: that of the offsets' device.
        cu_seqlens_q, cu_seqlens_k: int32 (B + 1,).
        seqused_k: how many keys of each sequence count, int32 (B,); None for all.
    """

    def __init__(
        self,
        read: OffsetsRead,
        batch: int,
        stream: int,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        seqused_k: Tensor | None,
    ) -> None:
        known, numbers = read.now
        device = cu_seqlens_q.device
        width = (batch + 4) // 4 * 4  # so that each vector begins at a multiple of sixteen bytes
        rows = uninitialized((3 + len(known), width), (width, 1), torch.int64, device)
        if device.type == "cuda" and WRITE.available(device):
            used, step = (0, 0) if seqused_k is None else (seqused_k, seqused_k.stride(0))
            steps = cu_seqlens_q.stride(0), cu_seqlens_k.stride(0), step
            sizes = cu_seqlens_q.shape[0] - 1, width
            arguments = rows, cu_seqlens_q, cu_seqlens_k, used, *steps, *sizes, *numbers
            WRITE(-(-width // _BLOCK), _BLOCK, *arguments, stream=stream)
        else:
            _write_by_ops(rows, known, cu_seqlens_q, cu_seqlens_k, seqused_k)
        self._rows, self._known = rows, known
        self._inputs: dict[Slot | RaggedOffset, Tensor] = {}
        self._of_plans: dict[int, list[Tensor]] = {}

    def differs(self, newer: BatchLengths) -> Tensor:
        """Return on the device whether a sequence begins elsewhere or has another length."""
        return (self._rows[:3] != newer._rows[:3]).any()

    def inputs_of(self, plan: ExecutionPlan) -> list[Tensor]:
        """Return an execution plan's inputs; each is at least as long as the plan reads.

        BatchLengths are int32 (batch,), ragged offsets int64 (batch + 1,).
        """
        inputs = self._of_plans.get(plan.lengths_key)
        if inputs is None:
            inputs = self._of_plans[plan.lengths_key] = [self._input(wanted) for wanted in plan.lengths]
        return inputs

    def _input(self, wanted: Slot | RaggedOffset) -> Tensor:
        """Return one input: a view of the rows, made when a plan first reads it."""
        kept = self._inputs.get(wanted)
        if kept is None:
            kept = self._inputs[wanted] = self._made(wanted)
        return kept

    def _made(self, wanted: Slot | RaggedOffset) -> Tensor:
        rows = self._rows
        if not isinstance(wanted, RaggedOffset):
            width = rows.shape[1]
            start = 0 if wanted is Slot.SEQ_LEN_Q else width
            return rows[0].view(torch.int32)[start : start + width]
        of_keys, stride = wanted
        if stride == 1:
            return rows[1 + of_keys]
        if wanted in self._known:
            return rows[3 + self._known.index(wanted)]
        return rows[1 + of_keys] * stride  # the plan was built after this batch was first seen


def _write_by_ops(
    rows: Tensor,
    known: Sequence[RaggedOffset],
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_k: Tensor | None,
) -> None:
    """Write what the kernel does."""
    width = rows.shape[1]
    rows[1], rows[2] = (_padded(x, width) for x in (cu_seqlens_q, cu_seqlens_k))
    lengths = rows[0].view(torch.int32).view(2, width)
    lengths[:, -1] = 0
    lengths[:, :-1] = rows[1:3].diff()
    if seqused_k is not None:
        lengths[1] = torch.nn.functional.pad(seqused_k, (0, width - len(seqused_k)))
    lengths[0] *= lengths[1] > 0
    for row, offset in zip(rows[3:], known, strict=True):
        torch.mul(rows[1 + offset.of_keys], offset.token_stride, out=row)


def _padded(cu_seqlens: Tensor, width: int) -> Tensor:
    return torch.cat((cu_seqlens, cu_seqlens[-1:].expand(width - len(cu_seqlens))))
