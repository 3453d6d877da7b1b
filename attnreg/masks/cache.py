"""The structures of the masks in use: each mask is read once for all layers, until torch writes to it.

The key is the mask's tensor, or the tensor that it is a view of, with its version. So layers that cut the
same view out of a mask share the structure. A write that torch doesn't count isn't noticed:
`mask.data.copy_()`, a collective, a kernel of the user's, a graph's replay.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnreg.core.torchlib.frames import leave_module_uncompiled
from attnreg.core.torchlib.layout import stream_of
from attnreg.core.torchlib.locks import open_after_fork
from attnreg.masks.structure import Sizes, Structure, describe, structure_of

# Enough for the masks of a model's kinds of layers in a few micro-batches. A structure has a few numbers for
# each token.
_MOST_KEPT = 64


class _KeptStructure(NamedTuple):
    owner: weakref.ref[Tensor]
    storage: object  # kept alive, because the address of a freed storage is reused
    structure: Structure | str


_lock = open_after_fork(threading.RLock())
_kept: dict[tuple[object, ...], _KeptStructure] = {}


def read(numbers: Tensor) -> Tensor:
    """Copy numbers, of any shape and dtype, to the CPU.

    Nothing else here waits for the device, so tests count the calls.
    """
    return numbers.cpu()


def find(mask: Tensor, sizes: Sizes) -> Structure | str:
    """Return the structure of a mask in a call, or why it has none.

    Args:
        mask: bool, of 2 to 4 dimensions, expandable to (B, H, S_q, S_k).
        sizes: the call's (B, S_q, S_k).
    """
    if mask.is_inference():
        return "an inference tensor, which may change unnoticed"
    owner: Tensor = mask if mask._base is None else mask._base
    stream = stream_of(mask) if mask.is_cuda else 0  # another stream wouldn't wait for the indices
    view = mask.data_ptr(), mask.shape, mask.stride()
    key = id(owner), mask._version, *view, sizes, stream
    kept = _kept.get(key)
    if kept is not None and kept.owner() is owner:
        return kept.structure
    # A structure made in inference mode couldn't serve later calls with gradients. A program's default
    # device, which is a torch function mode, doesn't apply to the tensors made here.
    with torch.inference_mode(False), torch._C.DisableTorchFunction():
        structure = _look(mask, sizes)
    with _lock:
        for oldest in [*_kept][: max(len(_kept) + 1 - _MOST_KEPT, 0)]:
            _kept.pop(oldest, None)
        gone: Callable[[Any], object] = lambda _: _kept.pop(key, None)  # noqa: E731 - it needs no name
        _kept[key] = _KeptStructure(weakref.ref(owner, gone), owner.untyped_storage(), structure)
    return structure


def _look(mask: Tensor, sizes: Sizes) -> Structure | str:
    mask = mask[(None,) * (4 - mask.dim())]
    # All elements of an expanded dimension are the same.
    for dim, stride in enumerate(mask.stride()):
        if stride == 0:
            mask = mask.narrow(dim, 0, 1)
    if mask.shape[1] > 1:
        return "heads have masks of their own"
    mask = mask[:, 0]
    batch, queries, keys = mask.shape
    # On a GPU copying the rows that count is faster than sequences of queries or keys alone, whose rows have
    # to be cleared first.
    structure = structure_of(read(describe(mask)), (batch, queries, keys), sizes, in_place=mask.is_cpu)
    return structure if isinstance(structure, str) else structure.to(mask.device)


leave_module_uncompiled(__name__)
