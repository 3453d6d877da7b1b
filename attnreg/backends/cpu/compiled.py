"""The compiled kernel (`cpu_kernel/module.cpp`), where `attnreg build` has made it.

A call of it is a whole batch, whatever its lengths: it gets the addresses and strides of the tensors and a
table of the sequences, and shares them out among torch's threads.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from array import array
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from attnreg.backends.cpu.runs import runs_of
from attnreg.backends.cpu.tiles import visible
from attnreg.contract.backend import Kernels
from attnreg.errors import BuildError, InvalidInputError
from attnreg.torchlib import building

if TYPE_CHECKING:
    from torch import Tensor

    from attnreg.contract.backend import Call

__all__ = ["Compiled", "Table", "is_there", "load", "table_of"]

log = logging.getLogger("attnreg")

# As the library numbers them.
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# From these lengths, and so many rows in each of its calls, torch's bfloat16 forward gains by AMX.
_LONG, _ROWS_OF_A_CALL = 256, 1024
# Rows of a key head that aren't worth packing its keys for, and keys to a row that are many.
_FEW, _MANY = 8, 16


class _Problem(ctypes.Structure):
    """What `Problem` is in `cpu_kernel/problem.h`; an operand is an address and three strides."""

    _fields_ = (
        ("sizes", ctypes.c_int64 * 5),
        ("sequences", ctypes.c_int64),
        ("operands", ctypes.c_int64 * (9 * 4)),
        ("scale", ctypes.c_double),
    )


class Table(NamedTuple):
    """The sequences of a call as the kernel reads them: seven numbers for each."""

    numbers: array[int]
    sequences: int
    has_all_rows: bool
    has_all_keys: bool


class Compiled(NamedTuple):
    """The two functions of the library."""

    forward_entry: Any
    backward_entry: Any

    @classmethod
    def of(cls, library: ctypes.CDLL) -> Compiled:
        """Return the functions of a library."""
        entries = library.attnreg_forward, library.attnreg_backward
        for entry in entries:
            entry.argtypes, entry.restype = (ctypes.c_int64, ctypes.c_void_p), ctypes.c_int64
        return cls(*entries)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """Return the output and the LSE."""
        table = table_of(q, k, call)
        out = _result((*q.shape[:-1], v.size(-1)), q.dtype, table.has_all_rows, 0.0)
        lse = _result(_lse_shape(q), torch.float32, table.has_all_rows, -torch.inf)
        _run(self.forward_entry, (q, k, v, out), lse, (), table, call.scale)
        return out, lse

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value."""
        table = table_of(q, k, call)
        grad_q = _result(q.shape, q.dtype, table.has_all_rows, 0.0)
        grad_k = _result(k.shape, k.dtype, table.has_all_keys, 0.0)
        grad_v = _result(v.shape, v.dtype, table.has_all_keys, 0.0)
        if lse.dtype != torch.float32:
            lse = self.forward(q, k, v, call)[1]
        grads = (grad_out, grad_q, grad_k, grad_v)
        _run(self.backward_entry, (q, k, v, out), lse, grads, table, call.scale)
        return grad_q, grad_k, grad_v

    def before(self, kernels: Kernels) -> Kernels:
        """Return kernels that have the library do what it does faster, and leave the rest to those given."""
        rest = kernels.backward
        assert rest is not None

        def forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
            if _takes(q, k, v, call) and not _torch_is_faster(q, k, call):
                return self.forward(q, k, v, call)
            return kernels.forward(q, k, v, call)

        def backward(
            grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
        ) -> tuple[Tensor, Tensor, Tensor]:
            if _takes(q, k, v, call) and _fit(grad_out, out, lse, q, v):
                return self.backward(grad_out, q, k, v, out, lse, call)
            return rest(grad_out, q, k, v, out, lse, call)

        return Kernels(forward, backward)


@functools.cache
def load() -> Compiled | None:
    """Return the library, or None where it isn't built or can't be loaded."""
    try:
        return Compiled.of(building.loaded_cpu_kernel())
    except BuildError as error:
        # One that is there and isn't used is worth a word; none at all is no matter.
        level = logging.WARNING if building.has_cpu_kernel_file() else logging.DEBUG
        log.log(level, "the cpu backend has torch's kernel alone: %s", error)
        return None


def is_there() -> bool:
    """Return whether there is a library to load; loads nothing."""
    return building.has_cpu_kernel()


def table_of(q: Tensor, k: Tensor, call: Call) -> Table:
    """Return the sequences of a call, without rows that see nothing and keys that nobody sees."""
    used = None if call.seqused_k is None else tuple(call.seqused_k.tolist())
    return _table(
        _lengths(call.cu_seqlens_q, q),
        _lengths(call.cu_seqlens_k, k),
        used,
        call.window,
    )


class _Lengths(NamedTuple):
    """Where sequences begin and end: by offsets, or a number of equally long ones."""

    offsets: tuple[int, ...] | None
    tokens: int
    sequences: int

    def of(self, index: int) -> tuple[int, int]:
        """Return the first token of a sequence, in its batch entry, and how many there are."""
        if self.offsets is None:
            return 0, self.tokens
        begin, end = self.offsets[index], self.offsets[index + 1]
        if not 0 <= begin <= end <= self.tokens:
            raise InvalidInputError(
                f"offsets: got {begin} to {end} at index {index}, expected some of {self.tokens} tokens"
            )
        return begin, end - begin

    @property
    def all_tokens(self) -> int:
        return self.tokens if self.offsets is not None else self.tokens * self.sequences


def _lengths(cu_seqlens: Tensor | None, x: Tensor) -> _Lengths:
    if cu_seqlens is None:
        return _Lengths(None, x.size(1), x.size(0))
    offsets = tuple(cu_seqlens.tolist())
    return _Lengths(offsets, x.size(0), len(offsets) - 1)


# The backward asks again what its forward did, and so does the next layer. What is wrong was told a forward
# before it came here; a backward may be handed something else, and the library would read any address.
@functools.lru_cache(maxsize=32)
def _table(of_q: _Lengths, of_k: _Lengths, used: tuple[int, ...] | None, window: tuple[int, int]) -> Table:
    counts = of_q.sequences if used is None else len(used)
    if not of_q.sequences == of_k.sequences == counts:
        raise InvalidInputError(
            f"sequences: got {of_q.sequences} of the query, {of_k.sequences} of the key "
            f"and {counts} counts of keys, expected as many of each"
        )
    numbers = array("q")
    rows_left, keys_left = of_q.all_tokens, of_k.all_tokens
    for index in range(of_q.sequences):
        (row, rows), (key, keys) = of_q.of(index), of_k.of(index)
        if used is not None:
            if not 0 <= used[index] <= keys:
                raise InvalidInputError(
                    f"seqused_k: got {used[index]} at index {index}, expected 0 to {keys}, the keys there are"
                )
            keys = used[index]
        seen = visible(rows, keys, window)
        if seen is None:
            continue
        batch = index if of_q.offsets is None else 0
        rows, keys = rows - seen.row, keys - seen.key
        numbers.extend((batch, row + seen.row, rows, key + seen.key, keys, *seen.window))
        rows_left, keys_left = rows_left - rows, keys_left - keys
    return Table(numbers, len(numbers) // 7, rows_left == 0, keys_left == 0)


def _takes(q: Tensor, k: Tensor, v: Tensor, call: Call) -> bool:
    return q.dtype in _DTYPES and call.attn_bias is None and q.numel() > 0 and k.numel() > 0 and v.numel() > 0


def _fit(grad_out: Tensor, out: Tensor, lse: Tensor, q: Tensor, v: Tensor) -> bool:
    """Return whether a backward is handed what a forward gives, for all that is read by its address."""
    shape = (*q.shape[:-1], v.size(-1))
    return (
        grad_out.shape == out.shape == shape
        and lse.shape == _lse_shape(q)
        and grad_out.dtype == out.dtype == q.dtype
    )


def _torch_is_faster(q: Tensor, k: Tensor, call: Call) -> bool:
    """Return whether torch's forward is faster.

    It multiplies bfloat16 by AMX, the library float32; and it reads float32 keys where they lie, which is
    all there is to do for a few queries.
    """
    if q.dtype == torch.bfloat16:
        if call.max_k < _LONG or not _has_amx():
            return False
        return q.shape[:-2].numel() >= _ROWS_OF_A_CALL * len(runs_of(q, k, call))
    rows = call.max_q * q.size(-2) // k.size(-2)
    return q.dtype == torch.float32 and rows <= _FEW and call.max_k >= _MANY * rows


@functools.cache
def _has_amx() -> bool:
    return bool(torch.cpu.get_capabilities().get("amx_bf16"))


def _lse_shape(q: Tensor) -> tuple[int, ...]:
    return (*q.shape[:-3], q.size(-2), q.size(-3))


def _result(shape: tuple[int, ...], dtype: torch.dtype, written: bool, fill: float) -> Tensor:
    """Return a contiguous tensor, filled where not all of it will be written."""
    if written:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.full(shape, fill, dtype=dtype, device="cpu")


def _run(
    entry: Any,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    lse: Tensor,
    grads: tuple[Tensor, ...],
    table: Table,
    scale: float,
) -> None:
    # What is copied here has to live until the kernel has read it.
    kept = [x if x.stride(-1) == 1 else x.contiguous() for x in (*tensors, *grads)]
    numbers: list[int] = []
    for x in kept:
        numbers += _rows(x)
    numbers[16:16] = _rows(lse.mT.unsqueeze(-1))
    q, k, v = kept[:3]
    sizes = q.size(-2), k.size(-2), q.size(-1), v.size(-1), table.sequences
    address = table.numbers.buffer_info()[0]
    problem = _Problem(sizes, address, (*numbers,), scale)
    if status := entry(_DTYPES[q.dtype], ctypes.addressof(problem)):
        raise (
            MemoryError("no memory for the blocks that attention works on")
            if status == 1
            else RuntimeError("torch refused its threads to attention on the CPU")
        )


def _rows(x: Tensor) -> tuple[int, int, int, int]:
    """Return where (B, S, H, D) or (T, H, D) lies, for `Operand`."""
    strides = x.stride()
    return x.data_ptr(), strides[0] if len(strides) == 4 else 0, strides[-3], strides[-2]
