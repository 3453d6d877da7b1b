"""A call as the compiled kernel reads it: a description, which is cached, and addresses."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from attnreg.backends.cpu.sequences import Sequences
from attnreg.contract.backend import Call
from attnreg.errors import InvalidInputError

# As the library numbers them.
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

# Which operands are LSEs, or their gradients.
_LSES = (4, 9)
_NO_OPTIONS = (0,) * 6


class Problem(ctypes.Structure):
    """`Problem` in `kernel/problem.h`: an operand is an address, left out here, and three strides."""

    _fields_ = (
        ("dtype", ctypes.c_int64),
        ("operand_count", ctypes.c_int64),
        ("sizes", ctypes.c_int64 * 5),
        ("sequences", ctypes.c_int64),
        ("operands", ctypes.c_int64 * (10 * 4)),
        ("scale", ctypes.c_double),
        ("softcap", ctypes.c_double),
        ("batch_invariant", ctypes.c_int64),
        ("dropout", ctypes.c_double),
        ("options", ctypes.c_int64 * 6),  # as `_further` returns them
        ("option_addresses", ctypes.c_int64 * 3),
    )
    owner: Sequences  # of the memory at `sequences`


def addresses_of(tensors: Sequence[Tensor | None]) -> ctypes.Array[ctypes.c_void_p]:
    """Return the addresses of tensors."""
    return (ctypes.c_void_p * len(tensors))(*[None if x is None else x.data_ptr() for x in tensors])


def option_tensors(call: Call) -> tuple[Tensor | None, ...]:
    """Return the pages, slopes and random state of a call, whose addresses follow; nothing if it has none."""
    table, slopes, rng_state = call.block_table, call.alibi_slopes, None
    if call.dropout:
        rng_state = call.rng_state
        if rng_state is None:
            raise InvalidInputError(
                f"rng_state: got None with dropout_p {call.dropout}, expected a seed and an offset"
            )
    if table is None and slopes is None and rng_state is None:
        return ()
    return (
        None if table is None else table.int().contiguous(),
        None if slopes is None else slopes.float(),
        None if rng_state is None else rng_state.contiguous(),
    )


def problem_of(
    operands: Sequence[Tensor], sequences: Sequences, call: Call, options: Sequence[Tensor | None] = ()
) -> Problem:
    """Return the description of a call, the same for all calls alike."""
    q, k, v = operands[:3]
    sizes = (q.size(-2), k.size(-2), q.size(-1), v.size(-1))
    strides = tuple([x.stride() for x in operands])
    both = call.softcap, call.batch_invariant
    further = _further(q, k, sequences, *options) if options else _NO_OPTIONS
    return _problem(DTYPES[q.dtype], sizes, strides, sequences, call.scale, *both, call.dropout, further)


def _further(
    q: Tensor,
    k: Tensor,
    sequences: Sequences,
    table: Tensor | None,
    slopes: Tensor | None,
    rng_state: Tensor | None,
) -> tuple[int, ...]:
    """Return what the library is told of the options' tensors, of which it reads what that says."""
    expected = (q.size(-2),), (sequences.count, q.size(-2))
    if slopes is not None and slopes.shape not in expected:
        raise InvalidInputError(f"alibi_slopes: got shape {tuple(slopes.shape)}, expected one of {expected}")
    if rng_state is not None and rng_state.nbytes != 16:
        raise InvalidInputError(f"rng_state: got {rng_state!r}, expected a seed and an offset, uint64")
    strides = (0, 0) if slopes is None else (0, *slopes.stride())[-2:]
    return (1, *strides, *((0, 0, 0) if table is None else (k.size(0), k.size(1), table.size(1))))


@functools.lru_cache(maxsize=64)
def _problem(
    dtype: int,
    sizes: tuple[int, ...],
    strides: tuple[tuple[int, ...], ...],
    sequences: Sequences,
    scale: float,
    softcap: float,
    batch_invariant: bool,
    dropout: float,
    options: tuple[int, ...],
) -> Problem:
    operands: list[int] = []
    for number, each in enumerate(strides):
        if number in _LSES:  # (B, H, S) or (H, T), as it were (B, S, H, 1) or (T, H, 1)
            each = (*each[:-2], each[-1], each[-2], 1)
        operands += 0, each[0] if len(each) == 4 else 0, each[-3], each[-2]
    address, count = sequences.table.buffer_info()[0], len(sequences.each)
    problem = Problem(
        dtype, len(strides), (*sizes, count), address, (*operands,), scale, softcap, batch_invariant,
        dropout, options,
    )  # fmt: skip
    problem.owner = sequences
    return problem
