"""The inputs that execution plans derive from the offsets of a packed batch: lengths and ragged offsets.

A small kernel writes all of them for a new batch, for both directions and all layers of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from attnreg.backends.cudnn.graph import ExecutionPlan
from attnreg.backends.cudnn.problem import RaggedOffset, Slot
from attnreg.core.launching.offsets import derived_from
from attnreg.core.torchlib.device_code import DeviceKernel
from attnreg.core.torchlib.layout import uninitialized

# How many ragged offsets the kernel writes at most, besides the two of token stride 1. A model whose queries
# are views of a shared projection needs up to six.
MOST = 12

# The threads of a block of this kernel.
_BLOCK = 256

WRITE = DeviceKernel("attnreg_cudnn_lengths", Path(__file__).with_name("lengths.cu"))


class OffsetsRead:
    """The ragged offsets that execution plans read, the newest `MOST` of them.

    A new batch gets all of them at once, because the first execution plan doesn't know which others will
    follow.

    Attributes:
        now: the ragged offsets, and the kernel's arguments for them. These are their number, a mask with a
            bit for each ragged offset of the keys, and the token strides.
    """

    def __init__(self) -> None:
        self.now: tuple[tuple[RaggedOffset, ...], tuple[int, ...]] = (), (0, 0, *[0] * MOST)

    def add(self, plan: ExecutionPlan) -> None:
        """Add the ragged offsets of a new execution plan."""
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
    """Return the lengths of a packed batch, derived once and cached while the offsets exist unchanged.

    The offsets, int32 (B + 1,), and `seqused_k`, int32 (B,), are on the current device, and `stream` is a
    stream of it. The tensors of the result are described at `BatchLengths`.
    """
    offsets = cu_seqlens_q, cu_seqlens_k, seqused_k
    return derived_from(offsets, stream, ("cuDNN", batch), partial(BatchLengths, read, batch, stream))


class BatchLengths:
    """The lengths and ragged offsets of one batch, padded with empty sequences to an execution plan's size.

    Args:
        read: the ragged offsets to write at once.
        batch: the number of sequences of the execution plan.
        stream: a CUDA stream of the offsets' device.
        cu_seqlens_q, cu_seqlens_k: int32 (B + 1,).
        seqused_k: the number of keys of each sequence that count, int32 (B,). None counts all.
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
        """Return whether a sequence has another begin or length, as a boolean tensor () on the device."""
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
        return rows[1 + of_keys] * stride  # the plan was built after this object


def _write_by_ops(
    rows: Tensor,
    known: Sequence[RaggedOffset],
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_k: Tensor | None,
) -> None:
    """Write the same numbers as the kernel, by torch's ops."""
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
