"""The launches of release 4.0.0b36 on Hopper, as programs: allocations, compiled functions, their arguments.

They follow `_flash_attn_fwd` and `_flash_attn_bwd` of the package's interface.py. Lengths determine sizes and
arguments, and, by whether they fit into a tile, the compiled functions. `trials` compares these launches with
the package's before they are used.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnreg.backends.fa4.compiled_kinds import Class, Family, bounds_of, tiles
from attnreg.backends.fa4.package import INTERFACE
from attnreg.backends.fa4.tvm_ffi import interface_of_package
from attnreg.core.launching import programs
from attnreg.core.launching.launchers import FunctionLauncher
from attnreg.core.launching.programs import (
    BATCH,
    HEADS_K,
    HEADS_Q,
    MAX_K,
    MAX_Q,
    TOKENS_K,
    TOKENS_Q,
    UNINITIALIZED,
    Buffer,
    BufferSize,
    Bundle,
    Computed,
    FunctionCall,
    LaunchProgram,
    Like,
    Memory,
    Operand,
    Pages,
    PageTable,
)

Results = tuple[Tensor, ...]


class CompiledFunctions(NamedTuple):
    """The functions that run a class of lengths, in order, and the queries and keys of a tile."""

    functions: tuple[Callable[..., object], ...]
    rows: int
    columns: int


class LauncherArguments(NamedTuple):
    """The arguments that all launches of a launcher share, in the form of the compiled functions."""

    scale: float
    left: int | None
    right: int | None
    window: tuple[int, int]


def launch_of(
    family: Family,
    arguments: LauncherArguments,
    compiled: dict[Class, CompiledFunctions],
    memory: Memory = UNINITIALIZED,
) -> FunctionLauncher:
    """Return what launches calls of a family; `compiled` may get more classes later.

    It takes a dense call's tensors. In a packed call more arguments follow: sinks, `seqused_k` and the table
    of pages, as far as it has them, both offsets (with pages None for the key's), and the longest lengths.
    The last argument is whether each row is known to belong to a sequence and to see a key. It returns None
    if no launch is confirmed for the lengths.
    """
    launches = _Launches(family, arguments, compiled, memory, {})
    if not family.packed:
        return FunctionLauncher(launches.launch_dense, programs=launches.described)
    # Weights of unused keys are zero, whatever the keys contain, so a forward needs only finite values. In a
    # backward each row is a factor of a sum over a whole tile. Of pages no unused row is loaded, but zeros in
    # its place, so that the output of a sequence without keys is 0. Of packed keys the kernel then loads the
    # tile before the sequence.
    finite = ((2, 1),) if launches.is_forward else ((0, 0), (1, 0), (2, 1), (3, 1))
    takes = ("seqused_k",) * family.seqused + ("block_table",) * (family.page_size is not None)
    reads_pages = bool(takes)
    return FunctionLauncher(
        launches.launch_packed, arguments.window, () if reads_pages else finite, launches.described, takes,
        zeroes_rows=reads_pages,
    )  # fmt: skip


class _Launches(NamedTuple):
    """The launches of a family.

    Attributes:
        programs: the programs of the classes of lengths that have run.
    """

    family: Family
    arguments: LauncherArguments
    compiled: dict[Class, CompiledFunctions]
    memory: Memory
    programs: dict[Class, LaunchProgram]

    @property
    def is_forward(self) -> bool:
        return self.family.direction == "forward"

    def launch_dense(self, *tensors: Tensor) -> Results | None:
        """Run a dense call; returns None if no launch is confirmed for its lengths."""
        query, key = tensors[:2] if self.is_forward else tensors[1:3]
        (batch, max_q, *_), max_k = query.shape, key.shape[1]
        return self._run((batch, max_q, max_k, batch * max_q, batch * max_k), query, key, tensors)

    def launch_packed(self, *arguments: Any) -> Results | None:
        """Run a packed call; returns None if no launch is confirmed for its lengths."""
        *tensors, max_q, max_k, _ = arguments
        query, key = tensors[:2] if self.is_forward else tensors[1:3]
        if self.family.sinks and tensors[-3].data_ptr() & 15:
            return None  # the package copies sinks that aren't aligned
        if self.family.as_pages and len(key) == tiles(self.family, max_q)[1]:
            return None  # a page of a tile's size is loaded whole
        batch = len(tensors[-2]) - 1
        return self._run((batch, max_q, max_k, len(query), len(key)), query, key, tensors)

    def described(self, *lengths: int) -> tuple[Any, ...] | None:
        """Return the program for these lengths as C++ reads it; None if only Python can run it."""
        of_lengths = self.family.class_of(*lengths[:3])
        program, interface = self._program(of_lengths), interface_of_package()
        if program is None or interface is None:
            return None
        return programs.described(program, bounds_of(self.family, of_lengths), interface)

    def _run(
        self, lengths: tuple[int, int, int, int, int], query: Tensor, key: Tensor, tensors: Any
    ) -> Results | None:
        program = self._program(self.family.class_of(*lengths[:3]))
        if program is None or not query.numel() or not key.numel():
            return None
        return programs.run(program, (*lengths, query.shape[-2], key.shape[-2]), tensors, self.memory)

    def _program(self, of_lengths: Class) -> LaunchProgram | None:
        program = self.programs.get(of_lengths)
        if program is None and (compiled := self.compiled.get(of_lengths)) is not None:
            make = _forward if self.is_forward else _backward
            has_many = self.family.packed and of_lengths[0] > 0
            program = self.programs[of_lengths] = make(self.family, self.arguments, compiled, has_many)
        return program


class _Numbers:
    """The numbers of a program's tensors: of its arguments, and of its buffers as they are added."""

    def __init__(self, family: Family, kernels: int) -> None:
        self.buffers: list[Buffer | Like | Pages | PageTable | Computed] = []
        self._next = kernels
        self.sinks = self._take() if family.sinks else None
        self.used = self._take() if family.seqused else None
        self.table = self._take() if family.page_size is not None else None
        self.cu_q = self._take() if family.packed else None
        self.cu_k = self._take() if family.packed else None

    def _take(self) -> int:
        self._next += 1
        return self._next - 1

    def add(self, buffer: Buffer | Like | Pages | PageTable | Computed) -> int:
        """Add a buffer; returns its number."""
        self.buffers.append(buffer)
        return self._take()


def _tensors(*values: Any) -> tuple[Any, ...]:
    """Return arguments; whole numbers are the numbers of tensors."""
    return tuple(Operand(value) if isinstance(value, int) else value for value in values)


def _fixed(number: int) -> BufferSize:
    return BufferSize(more=number)


def _sum_of_tiles(rows: int, **options: Any) -> Callable[[Tensor], Tensor]:
    """Return the function that sums up the tiles of sequences by their offsets, int32 (B + 1,)."""
    sum_tiles = import_module(INTERFACE)._compute_tile_cumsum

    def compute(offsets: Tensor) -> Tensor:
        return sum_tiles(cu_seqlens=offsets, tile_size=rows, **options)[0]  # type: ignore[no-any-return]

    return compute


def _forward(
    family: Family, arguments: LauncherArguments, compiled: CompiledFunctions, has_many: bool
) -> LaunchProgram:
    (attend,), rows, columns = compiled
    scale, left, right, _ = arguments
    numbers, dim, sums = _Numbers(family, 3), _fixed(family.dim_v), None
    keys, values, offsets_k, table = 1, 2, numbers.cu_k, numbers.table
    if family.as_pages and offsets_k is not None:
        keys, values = (numbers.add(Pages(number, columns)) for number in (keys, values))
        table = numbers.add(PageTable(offsets_k))
    batch = () if family.packed else (BATCH,)
    length = TOKENS_Q if family.packed else MAX_Q
    out = numbers.add(Buffer((*batch, length, HEADS_Q, dim), family.dtype))
    lse = numbers.add(Buffer((*batch, HEADS_Q, length), torch.float32))
    if has_many and numbers.cu_q is not None:
        heads_of_tile = {"qhead_per_kvhead": family.group, "pack_gqa": family.group > 1}
        sums = numbers.add(Computed(_sum_of_tiles(rows, **heads_of_tile), (numbers.cu_q,)))
    step = FunctionCall(
        attend,
        (
            *_tensors(0, keys, values, out, lse), scale,
            *_tensors(numbers.cu_q, None if table is not None else offsets_k), None,
            *_tensors(numbers.used, table), left, right, *_tensors(numbers.sinks), None,
            import_module(INTERFACE).AuxData(), *_tensors(sums), None,
        ),
    )  # fmt: skip
    return LaunchProgram(tuple(numbers.buffers), (step,), (out, lse))


def _backward(
    family: Family, arguments: LauncherArguments, compiled: CompiledFunctions, has_many: bool
) -> LaunchProgram:
    (prepare, differentiate, convert, *convert_shared), rows, columns = compiled
    scale, left, right, _ = arguments
    interface, numbers = import_module(INTERFACE), _Numbers(family, 6)
    grad, query, key, value, out, lse = range(6)
    dq, dk, dv = (numbers.add(Like(number)) for number in (query, key, value))
    sums = _sums(family, rows, columns)
    dq_sums, products, lse_log2, *shared_sums = map(numbers.add, sums)
    turns = [numbers.add(x) for x in _semaphores(family, rows, columns)] if family.deterministic else []
    sums_q, sums_k, dsinks, of_sinks = None, None, None, None
    if has_many and numbers.cu_q is not None and numbers.cu_k is not None:
        sums_q = numbers.add(Computed(_sum_of_tiles(rows), (numbers.cu_q,)))
        sums_k = numbers.add(Computed(_sum_of_tiles(columns), (numbers.cu_k,)))
    if numbers.sinks is not None:
        dsinks = numbers.add(Like(numbers.sinks))
        of_sinks = Bundle(interface.LearnableSinkBwdTensors, (products, lse, numbers.sinks, dsinks))
    offsets_q, offsets_k, tiles_q, tiles_k = _tensors(numbers.cu_q, numbers.cu_k, sums_q, sums_k)
    steps = [
        FunctionCall(
            prepare,
            (
                *_tensors(out, grad, products, lse, lse_log2, dq_sums), offsets_q, None, None, None, None,
                1.0, tiles_q, None,
            ),
        ),
        FunctionCall(
            differentiate,
            (
                *_tensors(query, key, value, grad, lse_log2, products, dq_sums, *(shared_sums or (dk, dv))),
                scale, offsets_q, offsets_k, None, None, left, right,
                *_tensors(*(*turns, None, None, None)[:3]), interface.AuxData(), None, tiles_k,
            ),
        ),
        FunctionCall(convert, (*_tensors(dq_sums, dq), scale, offsets_q, None, of_sinks, tiles_q)),
    ]  # fmt: skip
    factors = scale, 1.0  # of key and value; there is nothing to convert without shared heads
    for function, summed, result, factor in zip(convert_shared, shared_sums, (dk, dv), factors, strict=False):
        operands = *_tensors(summed, result), factor, offsets_k, None, None, tiles_k
        steps.append(FunctionCall(function, operands))
    results = (dq, dk, dv) if dsinks is None else (dq, dk, dv, dsinks)
    return LaunchProgram(tuple(numbers.buffers), tuple(steps), results, contiguous=(lse,))


def _length_in_tiles(family: Family, of_keys: bool, rows: int, width: int = 1) -> BufferSize:
    """Return the size of a tensor with `width` numbers for each row of whole tiles.

    Each sequence of a packed call may begin a new tile.
    """
    if not family.packed:
        return (MAX_K if of_keys else MAX_Q)._replace(more=rows - 1, unit=rows, times=rows * width)
    tokens = TOKENS_K if of_keys else TOKENS_Q
    factors = rows, *tokens.factors[1:]
    return BufferSize(factors, rows - 1, rows, rows * width)


def _sums(family: Family, rows: int, columns: int) -> list[Buffer]:
    """Return a backward's sums in float32.

    These are the gradient of the query, tile by tile; the products of output and gradient; the LSE in base 2;
    and with shared heads the gradients of key and value.
    """
    step = 64 if family.dim > 128 else 32
    width, width_v = (-(-dim // step) * step for dim in (family.dim, family.dim_v))
    batch = () if family.packed else (BATCH,)

    def floats(of_keys: bool, rows: int, width: int = 1, zero: bool = False) -> Buffer:
        length = _length_in_tiles(family, of_keys, rows, width)
        return Buffer((*batch, HEADS_K if of_keys else HEADS_Q, length), torch.float32, zero)

    sums = [floats(False, rows, width), floats(False, rows), floats(False, rows)]
    if family.group > 1:
        sums += [floats(True, columns, size, zero=True) for size in (width, width_v)]
    return sums


def _semaphores(family: Family, rows: int, columns: int) -> list[Buffer]:
    """Return semaphores, which order the additions to each tile."""

    def zeros(of_keys: bool, rows: int, count: int) -> Buffer:
        heads, longest = (HEADS_K, MAX_K) if of_keys else (HEADS_Q, MAX_Q)
        tiles = longest._replace(more=rows - 1, unit=rows)
        return Buffer((BATCH, heads, tiles, _fixed(count)), torch.int32, zero=True)

    of_query = [zeros(False, rows, 1)]
    return of_query if family.group == 1 else [*of_query, *(zeros(True, columns, 2) for _ in "kv")]
