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
from attnreg.core.launching.derivation import OffsetsKernel
from attnreg.core.launching.offsets import derived_from
from attnreg.core.torchlib.device_code import DeviceKernel, launch_function
from attnreg.core.torchlib.layout import uninitialized

# How many ragged offsets the kernel writes at most, besides the two of token stride 1. A model whose queries
# are views of a shared projection needs up to six.
MOST = 12

# The threads of a block of this kernel.
_BLOCK = 256

WRITE = DeviceKernel("attnreg_cudnn_lengths", Path(__file__).with_name("lengths.cu"))


class Rows:
    """What the rows of a buffer are: two vectors of lengths, two of begins in tokens, then ragged offsets.

    Attributes:
        ragged: the ragged offsets, except for token stride 1.
        numbers: the kernel's arguments for them. These are their number, a mask with a bit for each ragged
            offset of the keys, and the token strides.
    """

    def __init__(self, ragged: tuple[RaggedOffset, ...] = ()) -> None:
        of_keys = sum(1 << number for number, offset in enumerate(ragged) if offset.of_keys)
        strides = [offset.token_stride for offset in ragged]
        self.ragged = ragged
        self.numbers = (len(ragged), of_keys, *strides, *[0] * (MOST - len(ragged)))
        self._places: dict[tuple[int, int], tuple[int, ...] | None] = {}

    def places_of(self, plan: ExecutionPlan, width: int) -> tuple[int, ...] | None:
        """Return where the execution plan's inputs are in a buffer with rows of this width, in bytes.

        None if the buffer lacks one of them.
        """
        source = plan.lengths_key, width
        try:
            return self._places[source]
        except KeyError:
            places = [self._place_of(wanted, width) for wanted in plan.lengths]
            present = tuple([place for place in places if place is not None])
            return self._places.setdefault(source, present if len(present) == len(places) else None)

    def _place_of(self, wanted: Slot | RaggedOffset, width: int) -> int | None:
        if not isinstance(wanted, RaggedOffset):
            return 0 if wanted is Slot.SEQ_LEN_Q else 4 * width
        if wanted.token_stride == 1:
            return 8 * width * (1 + wanted.of_keys)
        return 8 * width * (3 + self.ragged.index(wanted)) if wanted in self.ragged else None


class OffsetsRead:
    """The ragged offsets that execution plans read, the newest `MOST` of them.

    A new batch gets all of them at once, because the first execution plan doesn't know which others will
    follow.

    Attributes:
        now: the rows of a new batch's buffer.
    """

    def __init__(self) -> None:
        self.now = Rows()

    def add(self, plan: ExecutionPlan) -> None:
        """Make the ragged offsets of an execution plan the newest."""
        read = {offset for offset in plan.lengths if isinstance(offset, RaggedOffset)}
        read = {offset for offset in read if offset.token_stride != 1}
        if not read.issubset(self.now.ragged):
            others = [offset for offset in self.now.ragged if offset not in read]
            self.now = Rows((*others, *sorted(read))[-MOST:])


# A buffer, and where in it an execution plan's lengths and ragged offsets are, in bytes.
Inputs = tuple[Tensor, tuple[int, ...]]


def inputs_of(
    plan: ExecutionPlan,
    read: OffsetsRead,
    batch: int,
    stream: int,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_k: Tensor | None = None,
    written: tuple[Rows, Tensor] | None = None,
) -> Inputs:
    """Return an execution plan's lengths, written once and kept while the offsets exist unchanged.

    The offsets, int32 (B + 1,), and `seqused_k`, int32 (B,), are on the current device, and `stream` is a
    stream of it. `written` is what the call cache has written for the offsets, if it has. It is compared, and
    returned where values are kept. The other arguments are described at `BatchLengths`.
    """
    offsets, make = (cu_seqlens_q, cu_seqlens_k, seqused_k), partial(BatchLengths, read, batch, stream)
    purpose: tuple[object, ...] = "cuDNN", batch
    if written is None:
        return derived_from(offsets, stream, purpose, make).inputs_of(plan, *offsets)
    used = make(*offsets, written)
    return derived_from(offsets, stream, (*purpose, id(written[1])), make, used).inputs_of(plan, *offsets)


def tensors_of(plan: ExecutionPlan, inputs: Inputs) -> list[Tensor]:
    """Return an execution plan's inputs as tensors; each is at least as long as the plan reads.

    Lengths are int32 (batch,), ragged offsets int64 (batch + 1,).
    """
    (buffer, places), width = inputs, inputs[0].shape[1]
    ragged = buffer.view(-1)
    lengths = ragged.view(torch.int32)
    return [
        ragged[place // 8 :][:width] if isinstance(wanted, RaggedOffset) else lengths[place // 4 :][:width]
        for wanted, place in zip(plan.lengths, places, strict=True)
    ]


class BatchLengths:
    """The lengths and ragged offsets of one batch, padded with empty sequences to an execution plan's size.

    Args:
        read: the ragged offsets to write at once.
        batch: the number of sequences of the execution plan.
        stream: a CUDA stream of the offsets' device.
        cu_seqlens_q, cu_seqlens_k: int32 (B + 1,).
        seqused_k: the number of keys of each sequence that count, int32 (B,). None counts all.
        written: a buffer with these lengths, and its rows, if there is one.
    """

    def __init__(
        self,
        read: OffsetsRead,
        batch: int,
        stream: int,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        seqused_k: Tensor | None,
        written: tuple[Rows, Tensor] | None = None,
    ) -> None:
        self._read, self._batch, self._stream = read, batch, stream
        self._buffers = [] if written is None else [written]
        if written is None:
            self._write(cu_seqlens_q, cu_seqlens_k, seqused_k)

    def differs(self, newer: BatchLengths) -> Tensor:
        """Return whether a sequence has another begin or length, as a boolean tensor () on the device."""
        return (self._buffers[0][1][:3] != newer._buffers[0][1][:3]).any()

    def inputs_of(
        self, plan: ExecutionPlan, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, seqused_k: Tensor | None
    ) -> Inputs:
        """Return an execution plan's inputs.

        The offsets, int32 (B + 1,), and `seqused_k`, int32 (B,), are the tensors that this was made of.
        """
        for rows, buffer in self._buffers:
            places = rows.places_of(plan, buffer.shape[1])
            if places is not None:
                return buffer, places
        self._read.add(plan)  # it was built after this was made, or many others have been since
        self._write(cu_seqlens_q, cu_seqlens_k, seqused_k)
        return self.inputs_of(plan, cu_seqlens_q, cu_seqlens_k, seqused_k)

    def _write(self, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, seqused_k: Tensor | None) -> None:
        """Write one more buffer, int64 (rows, width)."""
        known, device = self._read.now, cu_seqlens_q.device
        width = _width(self._batch)
        buffer = uninitialized((3 + len(known.ragged), width), (width, 1), torch.int64, device)
        if device.type == "cuda" and WRITE.available(device):
            used = (0, 0) if seqused_k is None else (seqused_k, seqused_k.stride(0))
            offsets = cu_seqlens_q, cu_seqlens_k, cu_seqlens_q.stride(0), cu_seqlens_k.stride(0)
            sizes = cu_seqlens_q.shape[0] - 1, width
            arguments = buffer, *offsets, *sizes, *used, *known.numbers
            WRITE(-(-width // _BLOCK), _BLOCK, *arguments, stream=self._stream)
        else:
            _write_by_ops(buffer, known.ragged, cu_seqlens_q, cu_seqlens_k, seqused_k)
        self._buffers.append((known, buffer))


def kernel_of(plan: ExecutionPlan, rows: Rows, batch: int, device: int) -> OffsetsKernel | None:
    """Return the kernel that writes rows for the call cache.

    None where the kernel can't run, or if the rows lack an input of the execution plan. `batch` is the number
    of sequences of the execution plan, `device` the index of the GPU.
    """
    function, width = WRITE.address(device), _width(batch)
    if function is None or (places := rows.places_of(plan, width)) is None:
        return None
    words = 0, 0, *rows.numbers  # no `seqused_k`
    return OffsetsKernel(launch_function(), function, _BLOCK, 3 + len(rows.ragged), width, words, places)


def _width(batch: int) -> int:
    """Return the length of a row, such that each vector begins at a multiple of sixteen bytes."""
    return (batch + 4) // 4 * 4


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
