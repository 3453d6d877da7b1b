"""The structures of the masks in use: each mask is read once for all layers, until it is written to.

The key is the mask's tensor, or the tensor that it is a view of, with its version. So layers that cut the
same view out of a mask share the structure. On a GPU writes that torch doesn't count are looked for, as
`launching.offsets` does for offsets. On a CPU they aren't noticed, because a look takes as long as a small
call. If no call has run without the mask, such a write is no error, and the mask is looked at again.
"""

from __future__ import annotations

from functools import cached_property, partial
from typing import Self

import torch
from torch import Tensor

from attnreg.core.launching.offsets import derived_from
from attnreg.core.torchlib.frames import leave_module_uncompiled
from attnreg.core.torchlib.layout import stream_of
from attnreg.masks.structure import Sizes, Structure, describe, structure_of

CHANGED = (
    "attn_mask was written to in a way that torch doesn't count (a collective, `.data`, a kernel of your "
    "own, a graph's replay), and calls since then may have used the old mask: after such a write call "
    "torch.autograd.graph.increment_version(attn_mask), or make a new mask"
)


def read(numbers: Tensor) -> Tensor:
    """Copy numbers, of any shape and dtype, to the CPU.

    Nothing else here waits for the device, so tests count the calls.
    """
    return numbers.cpu()


def is_compared(mask: Tensor) -> bool:
    """Whether writes to a mask, bool of any shape, that torch doesn't count are looked for."""
    return mask.is_cuda


class Look:
    """A look at a mask: what it holds, on its device. The host reads that when it asks for the structure."""

    def __init__(self, layout: tuple[torch.Size, tuple[int, ...], int], sizes: Sizes, owner: Tensor) -> None:
        """Describe a mask; waits for nothing.

        Args:
            layout: shape, strides and offset of the mask in its storage.
            sizes: the call's (B, S_q, S_k).
            owner: the mask, bool, or the tensor that it is a view of.
        """
        mask = owner.as_strided(*layout)[(None,) * (4 - len(layout[0]))]
        # All elements of an expanded dimension are the same.
        for dim, stride in enumerate(mask.stride()):
            if stride == 0:
                mask = mask.narrow(dim, 0, 1)
        self._sizes, self._device, self._of_mask = sizes, mask.device, mask[:, 0].shape
        self._numbers = describe(mask[:, 0]) if mask.shape[1] == 1 else None

    def differs(self, newer: Self) -> Tensor:
        """Return on the device whether the mask holds something else now."""
        if self._numbers is None or newer._numbers is None:
            return torch.zeros((), dtype=torch.bool, device=self._device)
        return (self._numbers != newer._numbers).any()

    @property
    def error(self) -> str:
        """The error of a mask that holds something else now; empty if no call has run or runs without it."""
        structure = vars(self).get("structure")
        is_used = isinstance(structure, Structure) and (structure.running or structure.is_used)
        return CHANGED if is_used else ""

    @cached_property
    def structure(self) -> Structure | str:
        """The mask's structure, or why it has none."""
        if self._numbers is None:
            return "heads have masks of their own"
        batch, queries, keys = self._of_mask
        # On a GPU copying the rows that count is faster than sequences of queries or keys alone, whose rows
        # have to be cleared first.
        in_place = self._device.type == "cpu"
        structure = structure_of(read(self._numbers), (batch, queries, keys), self._sizes, in_place=in_place)
        return structure if isinstance(structure, str) else structure.to(self._device)


def find(mask: Tensor, sizes: Sizes, is_served: bool = True) -> Structure | str:
    """Return the structure of a mask in a call, or why it has none.

    Args:
        mask: bool, of 2 to 4 dimensions, expandable to (B, H, S_q, S_k).
        sizes: the call's (B, S_q, S_k).
        is_served: whether the call may run without the mask. Else nothing is compared.

    Raises:
        InvalidInputError: the mask has changed in a way that torch doesn't count, and was used meanwhile.
    """
    if mask.is_inference():
        return "an inference tensor, which may change unnoticed"
    stream = stream_of(mask) if mask.is_cuda else 0  # another stream wouldn't wait for the indices
    layout = mask.shape, mask.stride(), int(mask.storage_offset())
    # A structure made in inference mode couldn't serve later calls with gradients. A program's default
    # device, which is a torch function mode, doesn't apply to the tensors made here.
    with torch.inference_mode(False), torch._C.DisableTorchFunction():
        return derived_from(
            (_owner(mask),), stream, ("mask", layout, sizes), partial(Look, layout, sizes),
            said=lambda look: look.error, is_compared=is_served and is_compared(mask),
        ).structure  # fmt: skip


def _owner(mask: Tensor) -> Tensor:
    """Return the tensor that a mask is a view of. After `mask.data = x` it is a view of none any more."""
    owner: Tensor | None = mask._base
    if owner is None or owner.untyped_storage().data_ptr() != mask.untyped_storage().data_ptr():
        return mask
    return owner


leave_module_uncompiled(__name__)
