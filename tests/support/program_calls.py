"""Programs that run functions of this file's, and a stand-in for TVM-FFI that calls them from C."""

import ctypes
from typing import ClassVar, NamedTuple

import torch

from attnreg.core.launching import programs
from attnreg.core.launching.launchers import FunctionLauncher
from attnreg.core.launching.programs import (
    ANY,
    BATCH,
    HEADS_Q,
    MAX_Q,
    TOKENS_Q,
    Buffer,
    BufferSize,
    FunctionCall,
    Interface,
    LaunchProgram,
    Like,
    Operand,
    Pages,
    PageTable,
)

ARRAY = 71  # TVM-FFI's type index of an array


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("rank", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("sizes", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
    )

    def tensor(self):
        sizes, strides = self.sizes[: self.rank], self.strides[: self.rank]
        assert (tuple(self.device), self.lanes, self.offset) == ((1, 0), 1, 0)
        reach = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        dtype = {(2, 32): torch.float32, (0, 32): torch.int32, (4, 16): torch.bfloat16}[self.code, self.bits]
        memory = (ctypes.c_byte * (reach * self.bits // 8)).from_address(self.data)
        return torch.frombuffer(memory, dtype=dtype).as_strided(sizes, strides)


class _Payload(ctypes.Union):
    _fields_ = (("integer", ctypes.c_int64), ("number", ctypes.c_double), ("pointer", ctypes.c_void_p))


class Value(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("padding", ctypes.c_uint32), ("payload", _Payload))

    def read(self):
        assert self.padding == 0
        if self.type == programs.NOTHING:
            return None
        if self.type == programs.TENSOR:
            return DLTensor.from_address(self.payload.pointer).tensor()
        if self.type == programs.INTEGER:
            return self.payload.integer
        if self.type == programs.FLOAT:
            return self.payload.number
        assert self.type == ARRAY
        return Array.alive[self.payload.pointer].value


class Header(ctypes.Structure):
    _fields_ = (
        ("references", ctypes.c_uint64),
        ("type", ctypes.c_int32),
        ("padding", ctypes.c_uint32),
        ("deleter", ctypes.c_void_p),
    )


class Text(ctypes.Structure):
    _fields_ = (("data", ctypes.c_char_p), ("size", ctypes.c_size_t))


class ErrorObject(ctypes.Structure):
    _fields_ = (("header", Header), ("kind", Text), ("message", Text))


class Array:
    """A converted tuple."""

    alive: ClassVar = {}

    def __init__(self, value):
        self.value, self._header = value, Header(1, ARRAY)
        self.alive[ctypes.addressof(self._header)] = self

    def __chandle__(self):
        return ctypes.addressof(self._header)


class FakeFfi:
    """TVM-FFI's C interface. Functions are called by their number; an exception is raised as there.

    Attributes:
        called: what the functions were given from C, in order.
        dropped: how many errors were dropped.
    """

    def __init__(self):
        self.functions, self.called, self.dropped, self.raised = [], [], 0, None
        kinds = (
            (self._call, ctypes.c_void_p, ctypes.POINTER(Value), ctypes.c_int32, ctypes.POINTER(Value)),
            (self._set_stream, ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p),
            (self._take_error, ctypes.POINTER(ctypes.c_void_p)),
            (self._drop, ctypes.c_void_p),
        )
        self._kept = [ctypes.CFUNCTYPE(ctypes.c_int, *types)(function) for function, *types in kinds]
        addresses = tuple(ctypes.cast(function, ctypes.c_void_p).value for function in self._kept)
        self.interface = Interface(addresses, self.handle, Array)

    def handle(self, function):
        if function not in self.functions:
            self.functions.append(function)
        return self.functions.index(function) + 1

    def _call(self, handle, values, count, result):
        arguments = [values[number].read() for number in range(count)]
        self.called.append(arguments)
        try:
            assert result[0].type == programs.NOTHING
            self.functions[handle - 1](*arguments)
        except Exception as error:
            texts = [Text(x, len(x)) for x in (type(error).__name__.encode(), str(error).encode())]
            self.raised = ErrorObject(Header(1, 67), *texts)
            return -1
        return 0

    def _set_stream(self, *_):
        raise AssertionError("there is no stream on a CPU")

    def _take_error(self, place):
        place[0] = ctypes.addressof(self.raised)
        return 0

    def _drop(self, _):
        self.dropped += 1
        return 0


class Nothing(NamedTuple):
    """An argument that is converted to an object."""

    value: int | None = None


def forward_step(q, k, v, out, lse, scale, nothing, number, array, padded):
    assert (scale, nothing, number, tuple(array)) == (2.0, None, 7, (None,))
    assert padded.dtype == torch.int32 and not padded.any()
    out.copy_(q * scale)
    lse.copy_(q.sum(-1).transpose(-1, -2))


def backward_step(grad, lse, dq, dk, dv):
    assert lse.is_contiguous()
    for result, factor in zip((dq, dk, dv), (2, 3, 4), strict=True):
        result.copy_(grad * factor)


class InPrograms:
    """A launcher that is described as a program, and what C++ asked and called.

    Attributes:
        asked: the lengths for which a description was asked.
        ran: the numbers of tensors that Python was given instead.
        bounds: what the programs say of their lengths; None where Python has to run all calls.
    """

    def __init__(self, direction="forward", shape=(), bounds=(ANY,) * 5, **changes):
        self.ffi, self.asked, self.ran, self.bounds = FakeFfi(), [], [], bounds
        is_packed = len(shape) == 3
        self._packed = is_packed
        self.program = (_backward if direction == "backward" else _forward)(is_packed)
        self.program = self.program._replace(**changes)
        self.launcher = FunctionLauncher(self.run, programs=self.describe)

    def describe(self, *lengths):
        self.asked.append(lengths)
        if self.bounds is None:
            return None
        return programs.described(self.program, self.bounds, self.ffi.interface)

    def run(self, *arguments):
        """Run the same program by Python."""
        self.ran.append(len(arguments))
        tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
        query, key = tensors[:2] if len(self.program.results) == 2 else tensors[1:3]
        if self._packed:
            lengths = (len(tensors[-1]) - 1, *arguments[-3:-1], len(query), len(key))
        else:
            batch, max_q, max_k = query.shape[0], query.shape[1], key.shape[1]
            lengths = batch, max_q, max_k, batch * max_q, batch * max_k
        return programs.run(self.program, (*lengths, query.shape[-2], key.shape[-2]), tensors)


def _forward(is_packed):
    first = 5 if is_packed else 3  # both offsets come before the buffers
    rows = (TOKENS_Q,) if is_packed else (BATCH, MAX_Q)
    lse = (HEADS_Q, TOKENS_Q) if is_packed else (BATCH, HEADS_Q, MAX_Q)
    padded = BufferSize((1, 0, 0, 1, 0, 0, 0), 3, 4, 8)
    buffers = (
        Buffer((*rows, HEADS_Q, BufferSize(more=8)), torch.float32),
        Buffer(lse, torch.float32),
        Buffer((padded,), torch.int32, zero=True),
    )
    arguments = (
        *map(Operand, (0, 1, 2, first, first + 1)), 2.0, None, 7, Nothing(), Operand(first + 2),
    )  # fmt: skip
    return LaunchProgram(buffers, (FunctionCall(forward_step, arguments),), (first, first + 1))


def keys_as_pages(tile):
    """Return the program of a packed call with `seqused_k`, which reads keys as overlapping pages."""
    query, key, used, offsets_q, offsets_k = 0, 1, 3, 4, 5
    out, lse, pages, table = range(6, 10)
    rows = Buffer((TOKENS_Q, HEADS_Q, BufferSize(more=8)), torch.float32)
    buffers = rows, Buffer((HEADS_Q, TOKENS_Q), torch.float32), Pages(key, tile), PageTable(offsets_k)
    arguments = tuple(map(Operand, (query, key, pages, table, used, offsets_q, out, lse)))
    return LaunchProgram(buffers, (FunctionCall(step_of_pages, arguments),), (out, lse))


def step_of_pages(q, k, pages, table, used, offsets_q, out, lse):
    """Write the query to the output, and to it each sequence's last key that counts."""
    out.copy_(q)
    lse.copy_(q.sum(-1).transpose(-1, -2))
    (step, next_row, *_), (count, size, *shape) = pages.stride(), pages.shape
    keys = pages.as_strided((count + size - 1, *shape), pages.stride()[1:])  # a kernel reads by addresses
    assert step == next_row
    for sequence, count in enumerate(used.tolist()):
        if count:
            rows = slice(*offsets_q[sequence : sequence + 2].tolist())
            out[rows] += keys[table[sequence, 0] + count - 1]


def _backward(is_packed):
    first = 8 if is_packed else 6
    buffers = Like(1), Like(2), Like(3)
    arguments = tuple(map(Operand, (0, 5, first, first + 1, first + 2)))
    results = first, first + 1, first + 2
    return LaunchProgram(buffers, (FunctionCall(backward_step, arguments),), results, contiguous=(5,))
