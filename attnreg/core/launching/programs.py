"""Programs: launches as data, so that C++ runs them without Python, and Python runs the same.

A program allocates tensors whose sizes follow from the call, then calls compiled functions. Tensors are
numbered: first the tensors that a launcher is given, in its order, with both offsets of a packed call last;
then the program's own buffers.

C++ calls functions of TVM-FFI by its C interface (`dispatch/csrc/program.h`). A program with anything else,
such as a tensor that a Python function computes, runs in Python alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnreg.core.torchlib.layout import contiguous_strides, uninitialized

# The numbers of a call that sizes depend on: lengths in the call cache's order, then heads.
Numbers = tuple[int, int, int, int, int, int, int]
# For each of the five lengths the least and the greatest with which a program may run.
Bounds = tuple[tuple[int, int], ...]
ANY = (0, 2**62)

# Kinds of arguments. The values are type indices of TVM-FFI's C interface (c_api.h).
NOTHING, INTEGER, FLOAT, TENSOR, OBJECT = 0, 1, 3, 7, 64
# Kinds of buffers, as C++ has them.
NEW, LIKE, PAGES, TABLE = range(4)


class BufferSize(NamedTuple):
    """A size: `(the sum of the numbers times factors, plus more) // unit * times`.

    `factors` are those of the numbers of sequences, longest query, longest key, tokens of the queries, tokens
    of the keys, query heads and key heads.
    """

    factors: Numbers = (0, 0, 0, 0, 0, 0, 0)
    more: int = 0
    unit: int = 1
    times: int = 1

    def value(self, numbers: Numbers) -> int:
        """Return the size for a call's numbers."""
        sizes = sum(map(int.__mul__, self.factors, numbers))
        return (sizes + self.more) // self.unit * self.times


BATCH, MAX_Q, MAX_K, TOKENS_Q, TOKENS_K, HEADS_Q, HEADS_K = (
    BufferSize(tuple(int(place == own) for place in range(7)))  # type: ignore[arg-type]
    for own in range(7)
)


class Buffer(NamedTuple):
    """A new contiguous tensor."""

    sizes: tuple[BufferSize, ...]
    dtype: torch.dtype
    zero: bool = False


class Like(NamedTuple):
    """A new tensor with the layout of another, as `torch.empty_like` gives it."""

    number: int


class Pages(NamedTuple):
    """Packed rows (T, H, D) as pages that overlap; see `pages_of`. There are other than `tile` rows."""

    number: int
    tile: int


class PageTable(NamedTuple):
    """Offsets (B + 1,) as the table of such pages; see `table_of`."""

    number: int


class Computed(NamedTuple):
    """A tensor that a Python function returns for some tensors."""

    function: Callable[..., Tensor]
    numbers: tuple[int, ...]


class Operand(NamedTuple):
    """A tensor among a function's arguments."""

    number: int


class Bundle(NamedTuple):
    """An argument that a Python function makes of some tensors."""

    function: Callable[..., object]
    numbers: tuple[int, ...]


class FunctionCall(NamedTuple):
    """A call of a compiled function. Arguments that are no `Operand` or `Bundle` are passed as they are."""

    function: Callable[..., object]
    arguments: tuple[Any, ...]


class LaunchProgram(NamedTuple):
    """What runs a call.

    Attributes:
        buffers: the tensors to allocate, and the views to make, in order.
        steps: the functions to call, in order.
        results: the numbers of the tensors to return.
        contiguous: the numbers of given tensors that are copied unless they are contiguous.
    """

    buffers: tuple[Buffer | Like | Pages | PageTable | Computed, ...]
    steps: tuple[FunctionCall, ...]
    results: tuple[int, ...]
    contiguous: tuple[int, ...] = ()


class Memory(NamedTuple):
    """The allocation functions: `new` by size, strides, dtype and device, `like` by another tensor."""

    new: Callable[..., Tensor] = uninitialized
    like: Callable[[Tensor], Tensor] = torch.empty_like


UNINITIALIZED = Memory()


def pages_of(rows: Tensor) -> Tensor:
    """Return rows (T, H, D) as pages of T rows that overlap, (1, T, H, D): page p begins at row p.

    The shape has the first page alone, as the others reach beyond the rows. A kernel reads them by the same
    strides, as far as keys count.
    """
    first, *rest = rows.stride()
    return rows.as_strided((1, *rows.shape), (first, first, *rest))


def table_of(offsets: Tensor) -> Tensor:
    """Return offsets (B + 1,) as the table (B, 1) of overlapping pages, one for each sequence."""
    return offsets[:-1, None]


def run(
    program: LaunchProgram, numbers: Numbers, operands: Sequence[Tensor], memory: Memory = UNINITIALIZED
) -> tuple[Tensor, ...]:
    """Run a program in Python; tensors have the launcher's shapes and dtypes, on the current device."""
    tensors = list(operands)
    for number in program.contiguous:
        tensors[number] = tensors[number].contiguous()
    device = tensors[0].device
    for buffer in program.buffers:
        if isinstance(buffer, Like):
            tensors.append(memory.like(tensors[buffer.number]))
        elif isinstance(buffer, Buffer):
            shape = tuple([size.value(numbers) for size in buffer.sizes])
            tensor = memory.new(shape, contiguous_strides(shape), buffer.dtype, device)
            tensors.append(tensor.zero_() if buffer.zero else tensor)
        elif isinstance(buffer, Pages):
            tensors.append(pages_of(tensors[buffer.number]))
        elif isinstance(buffer, PageTable):
            tensors.append(table_of(tensors[buffer.number]))
        else:
            tensors.append(buffer.function(*(tensors[number] for number in buffer.numbers)))
    for function, arguments in program.steps:
        function(*[_value(argument, tensors) for argument in arguments])
    return tuple([tensors[number] for number in program.results])


def _value(argument: Any, tensors: list[Tensor]) -> Any:
    if type(argument) is Operand:
        return tensors[argument.number]
    if type(argument) is Bundle:
        return argument.function(*(tensors[number] for number in argument.numbers))
    return argument


class Interface(NamedTuple):
    """TVM-FFI's C interface: addresses of its functions, and of objects.

    Attributes:
        addresses: those of `TVMFFIFunctionCall`, `TVMFFIEnvSetStream`, `TVMFFIErrorMoveFromRaised` and
            `TVMFFIObjectDecRef`.
        handle: returns the handle of a compiled function; None if it has none.
        convert: returns an object of TVM-FFI's, which has a handle, for a Python value; None if it can't.
    """

    addresses: tuple[int, int, int, int]
    handle: Callable[[Any], int | None]
    convert: Callable[[Any], Any]


def described(program: LaunchProgram, bounds: Bounds, interface: Interface) -> tuple[Any, ...] | None:
    """Return a program as C++ reads it, for calls with lengths in these bounds; None if C++ can't run it."""
    if any(isinstance(buffer, Computed) for buffer in program.buffers) or any(
        isinstance(argument, Bundle) for step in program.steps for argument in step.arguments
    ):
        return None  # before anything is converted: this is asked at each such call
    keep: list[Any] = [program]
    steps = []
    for function, arguments in program.steps:
        handle = interface.handle(function)
        values = [_described_argument(argument, interface, keep) for argument in arguments]
        if handle is None or None in values:
            return None
        steps.append((handle, tuple(values)))
    buffers: list[tuple[Any, ...]] = []
    for buffer in program.buffers:
        if isinstance(buffer, Buffer):
            sizes = tuple((*size.factors, size.more, size.unit, size.times) for size in buffer.sizes)
            buffers.append((NEW, buffer.dtype, sizes, buffer.zero))
        elif isinstance(buffer, Pages):
            buffers.append((PAGES, buffer.number, buffer.tile))
        elif not isinstance(buffer, Computed):
            buffers.append((LIKE if isinstance(buffer, Like) else TABLE, buffer.number))
    return (
        interface.addresses, bounds, program.contiguous, tuple(buffers), tuple(steps), program.results,
        tuple(keep),
    )  # fmt: skip


def _described_argument(argument: Any, interface: Interface, keep: list[Any]) -> tuple[int, Any] | None:
    """Return an argument's kind and value; objects are added to `keep`."""
    if isinstance(argument, Operand):
        return TENSOR, argument.number
    if argument is None:
        return NOTHING, 0
    if type(argument) is int:
        return INTEGER, argument
    if type(argument) is float:
        return FLOAT, argument
    value = interface.convert(argument)
    if value is None:
        return None
    keep.append(value)
    return OBJECT, value.__chandle__()
