"""The launches of release 4.0.0b36 on Hopper: allocations, compiled functions, and their arguments.

They follow `_flash_attn_fwd` and `_flash_attn_bwd` of the package's interface.py. Lengths determine sizes and
arguments, and, by whether they fit into a tile, the compiled functions. `trials` compares these launches with
the package's before they are used.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnreg.backends.fa4.compiled_kinds import MANY, Class, Family, cuts
from attnreg.backends.fa4.package import INTERFACE
from attnreg.core.launching.launchers import FunctionLauncher
from attnreg.core.torchlib.layout import uninitialized

Results = tuple[Tensor, ...]
# A function of a dense call's tensors. In a packed call more arguments follow: sinks if it has any, both
# offsets, the longest lengths, and whether each row is known to belong to a sequence and to see a key. It
# returns None if no launch is confirmed for the lengths.
Launch = Callable[..., Results | None]


class CompiledFunctions(NamedTuple):
    """The functions that run a class of lengths, in order, and the queries and keys of a tile."""

    functions: tuple[Callable[..., object], ...]
    rows: int
    columns: int


class Memory(NamedTuple):
    """The allocation functions: `new` by size, strides, dtype and device, `like` by another tensor."""

    new: Callable[..., Tensor] = uninitialized
    like: Callable[[Tensor], Tensor] = torch.empty_like


class LauncherArguments(NamedTuple):
    """The arguments that all launches of a launcher share, in the form of the compiled functions."""

    scale: float
    left: int | None
    right: int | None
    window: tuple[int, int]


UNINITIALIZED = Memory()


def launch_of(
    family: Family,
    arguments: LauncherArguments,
    compiled: dict[Class, CompiledFunctions],
    memory: Memory = UNINITIALIZED,
) -> Launch:
    """Return the function that launches calls of a family; `compiled` may get more classes later."""
    forward = family.direction == "forward"
    run = (_forward if forward else _backward)(family, arguments, memory)
    first = 0 if forward else 1  # a backward's first tensor is the gradient of the output
    if family.packed:
        return _packed(family, run, compiled.get, first, arguments.window)
    return _dense(family, run, compiled.get, first)


def _dense(family: Family, run: Any, find: Any, first: int) -> Launch:
    _, of_q, of_k = cuts(family)

    def launch(*tensors: Tensor) -> Results | None:
        query, key = tensors[first : first + 2]
        batch, max_q, *_ = query.shape
        max_k = key.shape[1]
        compiled = find((0, bisect_left(of_q, max_q), bisect_left(of_k, max_k)))
        if compiled is None or not query.numel() or not key.numel():
            return None
        return run(compiled, batch, max_q, max_k, None, None, None, *tensors)  # type: ignore[no-any-return]

    return launch


def _packed(family: Family, run: Any, find: Any, first: int, window: tuple[int, int]) -> Launch:
    (of_batch, of_q, of_k), has_sinks = cuts(family), bool(family.sinks)

    def launch(*arguments: Any) -> Results | None:
        *tensors, cu_q, cu_k, max_q, max_k, _ = arguments
        sinks = tensors.pop() if has_sinks else None
        query, key = tensors[first : first + 2]
        batch = cu_q.shape[0] - 1
        compiled = find((bisect_left(of_batch, batch), bisect_left(of_q, max_q), bisect_left(of_k, max_k)))
        if compiled is None or not query.numel() or not key.numel():
            return None
        if sinks is not None and sinks.data_ptr() & 15:
            return None  # the package copies sinks that aren't aligned
        return run(compiled, batch, max_q, max_k, cu_q, cu_k, sinks, *tensors)  # type: ignore[no-any-return]

    # Weights of unused keys are zero, whatever the keys contain, so a forward needs only finite values. In a
    # backward each row is a factor of a sum over a whole tile.
    finite = ((0, 0), (1, 0), (2, 1), (3, 1)) if first else ((2, 1),)
    return FunctionLauncher(launch, window, finite)


def _forward(family: Family, arguments: LauncherArguments, memory: Memory) -> Any:
    scale, left, right, _ = arguments
    new, dim, dtype, interface = memory.new, family.dim_v, family.dtype, import_module(INTERFACE)
    nothing, sum_tiles = interface.AuxData(), interface._compute_tile_cumsum
    heads_of_tile = {"qhead_per_kvhead": family.group, "pack_gqa": family.group > 1}

    def run(
        compiled: CompiledFunctions, batch: int, max_q: int, _: int, cu_q: Tensor | None, cu_k: Tensor | None,
        sinks: Tensor | None, query: Tensor, key: Tensor, value: Tensor,
    ) -> Results:  # fmt: skip
        (attend,), rows, _ = compiled
        heads, device, tiles = query.shape[-2], query.device, None
        if cu_q is None:
            strides = max_q * heads * dim, heads * dim, dim, 1
            out = new((batch, max_q, heads, dim), strides, dtype, device)
            lse = new((batch, heads, max_q), (heads * max_q, max_q, 1), torch.float32, device)
        else:
            tokens = query.shape[0]
            out = new((tokens, heads, dim), (heads * dim, dim, 1), dtype, device)
            lse = new((heads, tokens), (tokens, 1), torch.float32, device)
            if batch > MANY:
                tiles, _ = sum_tiles(cu_seqlens=cu_q, tile_size=rows, **heads_of_tile)
        attend(
            query, key, value, out, lse, scale, cu_q, cu_k, None, None, None, left, right, sinks, None,
            nothing, tiles, None,
        )  # fmt: skip
        return out, lse

    return run


def _backward(family: Family, arguments: LauncherArguments, memory: Memory) -> Any:
    scale, left, right, _ = arguments
    like, shared, interface = memory.like, family.group > 1, import_module(INTERFACE)
    nothing, sum_tiles = interface.AuxData(), interface._compute_tile_cumsum
    of_sinks, allocate = interface.LearnableSinkBwdTensors, _sums(family, memory)
    semaphores = _semaphores(family, memory) if family.deterministic else lambda *_: (None, None, None)

    def run(
        compiled: CompiledFunctions, batch: int, max_q: int, max_k: int, cu_q: Tensor | None,
        cu_k: Tensor | None,
        sinks: Tensor | None, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor,
        lse: Tensor,
    ) -> Results:  # fmt: skip
        (prepare, differentiate, convert, *convert_shared), rows, columns = compiled
        dq, dk, dv, sums_q, sums_k, dsinks = like(query), like(key), like(value), None, None, None
        if not lse.is_contiguous():
            lse = lse.contiguous()  # another backend's forward may give it other strides
        offsets = None if cu_q is None else batch + 1
        dq_sums, products, lse_log2, *shared_sums = allocate(query, key, offsets, rows, columns)
        turns = semaphores(query, key, batch, -(-max_q // rows), -(-max_k // columns))
        if batch > MANY and cu_q is not None:
            sums_q, _ = sum_tiles(cu_seqlens=cu_q, tile_size=rows)
            sums_k, _ = sum_tiles(cu_seqlens=cu_k, tile_size=columns)
        prepare(out, grad, products, lse, lse_log2, dq_sums, cu_q, None, None, None, None, 1.0, sums_q, None)
        differentiate(
            query, key, value, grad, lse_log2, products, dq_sums, *(shared_sums or (dk, dv)), scale, cu_q,
            cu_k, None, None, left, right, *turns, nothing, None, sums_k,
        )  # fmt: skip
        if sinks is not None:
            dsinks = of_sinks(products, lse, sinks, like(sinks))
        convert(dq_sums, dq, scale, cu_q, None, dsinks, sums_q)
        if shared:
            (convert_key, convert_value), (dk_sums, dv_sums) = convert_shared, shared_sums
            convert_key(dk_sums, dk, scale, cu_k, None, None, sums_k)
            convert_value(dv_sums, dv, 1.0, cu_k, None, None, sums_k)
        return (dq, dk, dv) if dsinks is None else (dq, dk, dv, dsinks[3])

    return run


def _sums(family: Family, memory: Memory) -> Any:
    """Return the function that allocates a backward's sums in float32.

    These are the gradient of the query, tile by tile; the products of output and gradient; the LSE in base 2;
    and with shared heads the gradients of key and value.
    """
    new, shared, step = memory.new, family.group > 1, 64 if family.dim > 128 else 32
    width, width_v = (-(-dim // step) * step for dim in (family.dim, family.dim_v))

    def floats(heads: int, length: int, batch: int | None, device: torch.device) -> Tensor:
        if batch is None:
            return new((heads, length), (length, 1), torch.float32, device)
        return new((batch, heads, length), (heads * length, length, 1), torch.float32, device)

    def allocate(query: Tensor, key: Tensor, offsets: int | None, rows: int, columns: int) -> Results:
        (*batches, tokens, heads, _), (*_, tokens_k, heads_k, _) = query.shape, key.shape
        batch = batches[0] if batches else None
        # Each sequence of a packed call may begin a new tile.
        more, more_k = (rows, columns) if offsets is None else (offsets * rows, offsets * columns)
        length, device = (tokens + more - 1) // rows * rows, query.device
        sums = (
            floats(heads, length * width, batch, device),
            floats(heads, length, batch, device),
            floats(heads, length, batch, device),
        )
        if not shared:
            return sums
        length = (tokens_k + more_k - 1) // columns * columns
        of_key, of_value = (floats(heads_k, length * size, batch, device) for size in (width, width_v))
        return *sums, of_key.zero_(), of_value.zero_()

    return allocate


def _semaphores(family: Family, memory: Memory) -> Any:
    """Return the function that allocates semaphores, which order the additions to each tile."""
    new, shared = memory.new, family.group > 1

    def zeros(batch: int, heads: int, tiles: int, count: int, device: torch.device) -> Tensor:
        strides = heads * tiles * count, tiles * count, count, 1
        return new((batch, heads, tiles, count), strides, torch.int32, device).zero_()

    def allocate(query: Tensor, key: Tensor, batch: int, tiles_q: int, tiles_k: int) -> Any:
        heads, heads_k, device = query.shape[-2], key.shape[-2], query.device
        of_query = zeros(batch, heads, tiles_q, 1, device)
        if not shared:
            return of_query, None, None
        return of_query, *(zeros(batch, heads_k, tiles_k, 2, device) for _ in "kv")

    return allocate
