"""A call as the compiled kernel reads it (`kernel/call.h`): its kind and its arguments, as C structures."""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Iterable
from typing import overload

import torch
from torch import Tensor

from attnreg.backends.cpu.choice import TorchsCalls
from attnreg.core.contract.backend import Call
from attnreg.core.launching.memory import address_of
from attnreg.core.torchlib.modes import resolved
from attnreg.errors import InvalidInputError

# The library's numbers of dtypes: kernel/dtypes.h.
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

# A tensor is an address, four sizes and four strides; missing dimensions are 0.
_DIMENSIONS = 4
# How many numbers come before the tensors: `NativeCall` in `kernel/call.h`.
_HEAD = 10


class NativeKind(ctypes.Structure):
    """`Kind` in `kernel/call.h`."""

    _fields_ = (
        ("dtype", ctypes.c_int64),
        ("scale", ctypes.c_double),
        ("softcap", ctypes.c_double),
        ("window", ctypes.c_int64 * 2),
        ("batch_invariant", ctypes.c_int64),
        ("torchs_calls", ctypes.c_int64 * 3),
        ("dropout", ctypes.c_double),
        ("rng_state", ctypes.c_void_p),
        ("slopes", ctypes.c_void_p),
        ("slope_strides", ctypes.c_int64 * 2),
    )
    owners: list[Tensor]  # of the memory at the addresses

    def _address(self, x: Tensor) -> int:
        self.owners.append(x)
        return address_of(x)

    def add_options(self, q: Tensor, call: Call) -> None:
        """Add dropout and slopes; raises `InvalidInputError` on a wrong shape."""
        self.owners = []
        if call.dropout:
            self.dropout, self.rng_state = call.dropout, self._address(_random_state(call))
        if call.alibi_slopes is not None:
            slopes = resolved(call.alibi_slopes).float()
            expected = (q.size(-2),), (count_of(q, call), q.size(-2))
            if slopes.shape not in expected:
                got = tuple(slopes.shape)
                raise InvalidInputError(f"alibi_slopes: got shape {got}, expected one of {expected}")
            self.slopes, self.slope_strides = self._address(slopes), (0, *slopes.stride())[-2:]


def kind_of(q: Tensor, call: Call, torchs_calls: TorchsCalls | None = None) -> NativeKind:
    """Return the kind of a call; its forwards within `torchs_calls` are declined by the library.

    `q` is (B, S, H, D) or packed (T, H, D), in a dtype of `DTYPES`. Raises as `NativeKind.add_options` does.
    """
    kind = NativeKind(
        DTYPES[q.dtype],
        call.scale,
        call.softcap,
        call.window,
        call.batch_invariant,
        torchs_calls or (0, 0, 0),
    )
    if call.dropout or call.alibi_slopes is not None:
        kind.add_options(q, call)
    return kind


def count_of(q: Tensor, call: Call) -> int:
    """Return the number of sequences of a call with query `q`, (B, S, H, D) or (T, H, D) in any dtype."""
    return q.size(0) if call.cu_seqlens_q is None else len(call.cu_seqlens_q) - 1


class NativeArguments:
    """The arguments of a call, `NativeCall` in `kernel/call.h`, at `address`.

    Args:
        tensors: the call's tensors, then its results, and in a backward the gradient of the LSE.
        cu_seqlens_q, cu_seqlens_k: (B + 1,) offsets of packed tensors, of any integer dtype. The library
            reads as many from both.
        max_q, max_k: the longest length that a packed sequence may have.
        used: (B,), how many keys of each sequence count, of any integer dtype; None for all.
        block_table: (B, pages of a sequence), of any integer dtype; None where keys and values aren't pages.
    """

    def __init__(
        self,
        tensors: Iterable[Tensor],
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_q: int = 0,
        max_k: int = 0,
        used: Tensor | None = None,
        block_table: Tensor | None = None,
    ) -> None:
        integers = [_integers(x) for x in (cu_seqlens_q, cu_seqlens_k, used, block_table)]
        self._owners = integers
        addresses = [0 if x is None else address_of(x) for x in integers]
        batch = 0 if integers[0] is None else integers[0].size(0) - 1
        width = 0 if block_table is None else block_table.size(1)
        numbers = [0, 0, *addresses[:2], batch, max_q, max_k, *addresses[2:], width]
        for numbers[0], x in enumerate(tensors, 1):
            rest = (0,) * (_DIMENSIONS - x.dim())
            numbers += (address_of(x), *x.shape, *rest, *x.stride(), *rest)
        # Packed to bytes first, because an array converts numbers one by one.
        self._memory = array("q", struct.pack(f"{len(numbers)}q", *numbers))
        self.address = self._memory.buffer_info()[0]
        self._memory[1] = self.address + _HEAD * self._memory.itemsize


@overload
def _integers(x: Tensor) -> Tensor: ...


@overload
def _integers(x: Tensor | None) -> Tensor | None: ...


def _integers(x: Tensor | None) -> Tensor | None:
    return None if x is None else resolved(x).int().contiguous()


def _random_state(call: Call) -> Tensor:
    rng_state = call.rng_state
    if rng_state is None or rng_state.nbytes != 16:
        got = f"got {rng_state!r} with dropout_p {call.dropout}"
        raise InvalidInputError(f"rng_state: {got}, expected a seed and an offset, uint64")
    return rng_state.contiguous()
