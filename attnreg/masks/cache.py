"""The structures of the masks in use: each is looked at once for all layers, until torch writes to it.

Known again is the tensor, or the tensor that it is a view of, at its version: layers that cut the same view
out of one mask share what was found. A write that torch doesn't count (`mask.data.copy_()`, a collective, a
kernel of the user's, a graph's replay) isn't noticed.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnreg.core.torchlib.layout import stream_of
from attnreg.core.torchlib.locks import open_after_fork
from attnreg.masks.structure import Sizes, Structure, describe, structure_of

# Masks of a model's kinds of layers, in a few micro-batches; each has a few numbers for each token.
_MOST_KEPT = 64


class _Kept(NamedTuple):
    owner: weakref.ref[Tensor]
    storage: object  # an address is reused once a storage has gone
    found: Structure | str


_lock = open_after_fork(threading.Lock())
_kept: dict[tuple[object, ...], _Kept] = {}


def read(numbers: Tensor) -> Tensor:
    """Read numbers back from the device. Nothing else here waits for it, so tests count the calls."""
    return numbers.cpu()


def find(mask: Tensor, sizes: Sizes) -> Structure | str:
    """Return the structure of a mask in a call of these sizes, or why it has none."""
    if mask.is_inference():
        return "an inference tensor, which may change unnoticed"
    owner: Tensor = mask if mask._base is None else mask._base
    stream = stream_of(mask) if mask.is_cuda else 0  # another one wouldn't wait for the indices
    view = mask.data_ptr(), mask.shape, mask.stride()
    key = id(owner), mask._version, *view, sizes, stream
    kept = _kept.get(key)
    if kept is not None and kept.owner() is owner:
        return kept.found
    # What is kept has to serve later calls with gradients, too; no default device is for what is made here.
    with torch.inference_mode(False), torch._C.DisableTorchFunction():
        found = _look(mask, sizes)
    with _lock:
        for oldest in [*_kept][: max(len(_kept) + 1 - _MOST_KEPT, 0)]:
            _kept.pop(oldest, None)
        gone: Callable[[Any], object] = lambda _: _kept.pop(key, None)  # noqa: E731 - it needs no name
        _kept[key] = _Kept(weakref.ref(owner, gone), owner.untyped_storage(), found)
    return found


def _look(mask: Tensor, sizes: Sizes) -> Structure | str:
    mask = mask[(None,) * (4 - mask.dim())]
    # Where a dimension was expanded, one of its elements says all.
    for dim, stride in enumerate(mask.stride()):
        if stride == 0:
            mask = mask.narrow(dim, 0, 1)
    if mask.shape[1] > 1:
        return "heads have masks of their own"
    mask = mask[:, 0]
    batch, queries, keys = mask.shape
    # Kernels of a GPU take longer for sequences of queries or keys alone, whose rows have to be cleared
    # first, than copying what counts takes.
    found = structure_of(read(describe(mask)), (batch, queries, keys), sizes, in_place=mask.is_cpu)
    return found if isinstance(found, str) else found.to(mask.device)
