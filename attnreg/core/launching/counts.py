"""How many keys each packed sequence has, as `seqused_k`, for kernels that take that though all keys count.

FA4 is such a kernel: told how many keys count, it reads no row behind them. It also reads where sequences
begin. Both numbers are derived of the offsets at once. Offsets may be written to without a trace, and then
new begins with old counts would have a kernel read memory that isn't the keys'.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnreg.core.launching.derivation import Derivation, OffsetsKernel
from attnreg.core.launching.offsets import derived_from
from attnreg.core.launching.rows import BLOCK, COUNTS
from attnreg.core.torchlib.device_code import launch_function
from attnreg.core.torchlib.layout import stream_of

# For each sequence so many numbers of 64 bits have room for `Counts`, also if there is only one sequence.
ROWS = 3


class Counts(NamedTuple):
    """What a launch reads.

    Attributes:
        counts: how many keys each sequence has, int32 (B,).
        offsets: a copy of the offsets of keys, int32 (B + 1,).
    """

    counts: Tensor
    offsets: Tensor


class _Derived(NamedTuple):
    numbers: Tensor
    batch: int

    def differs(self, newer: _Derived) -> Tensor:
        """Return on the device whether offsets differ, from which the counts follow."""
        return (counts_in(*self).offsets != counts_in(*newer).offsets).any()


def counts_of(cu_seqlens_k: Tensor, written: Tensor | None = None) -> Tensor:
    """Return what `counts_in` reads, derived of offsets, int32 (B + 1,), once while they exist unchanged.

    `written` is what the call cache has derived of them, in integers of any size. It is compared, and
    returned.
    """
    stream = stream_of(cu_seqlens_k) if cu_seqlens_k.is_cuda else 0
    if written is None:
        return derived_from((cu_seqlens_k,), stream, ("counts",), _derived).numbers
    used = _Derived(written, len(cu_seqlens_k) - 1)
    return derived_from((cu_seqlens_k,), stream, ("counts", id(written)), _derived, used).numbers


def counts_in(derived: Tensor, batch: int) -> Counts:
    """Return counts and offsets of so many sequences in what was derived, (N,) or (R, N), int32 or int64.

    The offsets begin at a multiple of sixteen bytes, as kernels ask for.
    """
    numbers, first = derived.view(torch.int32).flatten(), batch + -batch % 4
    return Counts(numbers[:batch], numbers[first : first + batch + 1])


def derivation_for(device: torch.device) -> Derivation:
    """Return what derives the same for the call cache, on a device."""
    function = COUNTS.address(device)
    if function is None:
        return Derivation(_derive)
    return Derivation(_derive, OffsetsKernel(launch_function(), function, BLOCK, ROWS, 0, (), (0,)))


def _derived(cu_seqlens_k: Tensor) -> _Derived:
    batch = len(cu_seqlens_k) - 1
    if cu_seqlens_k.is_cuda and batch and COUNTS.available(cu_seqlens_k.get_device()):
        numbers = torch.empty(ROWS * batch, dtype=torch.int64, device=cu_seqlens_k.device)
        COUNTS(-(-batch // BLOCK), BLOCK, numbers, 0, cu_seqlens_k, 0, cu_seqlens_k.stride(0), batch, 0)
        return _Derived(numbers, batch)
    counts = cu_seqlens_k.diff()
    rest = cu_seqlens_k.new_zeros(-len(counts) % 4)
    return _Derived(torch.cat((counts, rest, cu_seqlens_k)), len(counts))


def _derive(_: Tensor, cu_seqlens_k: Tensor, written: Tensor | None = None) -> tuple[Tensor, tuple[int, ...]]:
    return counts_of(cu_seqlens_k, written), (0,)
