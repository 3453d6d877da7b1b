"""Checks of a call's arguments and of a kernel's results; errors say what was got and what was expected.

`check` reads only shapes, dtypes and devices, so it runs once per kind of call, when the backend is chosen.
`check_values` reads values, which on a GPU would mean a synchronization. Results are checked the first time
that the kernel of a plan runs. A wrong shape, dtype, device or layout would otherwise lead to wrong numbers,
or to an error about something else.
"""

from __future__ import annotations

import math
import operator
import reprlib
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from attnreg.core.contract.backend import Call
from attnreg.core.contract.options import OPTIONS, Direction, Option, options_on
from attnreg.errors import InvalidInputError, RegistrationError

# So much of what a kernel returned instead of a tensor is shown.
LONGEST_TEXT = 40


def check(query: Tensor, key: Tensor, value: Tensor, call: Call) -> None:
    """Check that ranks, dtypes, devices, head counts and lengths of a call fit each other.

    Args:
        query: (B, S_q, H, D) or packed (T_q, H, D), floating point.
        key, value: (B, S_k, H_k, D) and (B, S_k, H_k, D_v), or packed (T_k, H_k, D) and (T_k, H_k, D_v), of
            the query's dtype. With a `block_table` they are pages, (pages, page size, H_k, D).
        call: the other arguments, in the shapes and dtypes of `Call`.

    Raises:
        InvalidInputError: an argument doesn't fit.
    """
    tensors = {"query": query, "key": key, "value": value}
    check_same("dtype", **tensors)
    check_same("device", **tensors)
    check_layouts(**tensors)
    if not query.dtype.is_floating_point:
        raise _wrong("dtype", str(query.dtype), "a floating-point dtype")
    rank = 3 if call.varlen else 4
    ranks = (rank, 4, 4) if call.block_table is not None else (rank, rank, rank)
    dense = (
        "(batch, length, heads, head_dim)"
        if call.block_table is None
        else "(pages, page size, heads, head_dim)"
    )
    for (name, tensor), expected in zip(tensors.items(), ranks, strict=True):
        if tensor.dim() != expected:
            layout = "(tokens, heads, head_dim)" if expected == 3 else dense
            raise _wrong(name, f"shape {tuple(tensor.shape)}", f"{expected} dimensions {layout}")
    if query.shape[-1] != key.shape[-1]:
        raise _wrong("head_dim", f"{query.shape[-1]} for query and {key.shape[-1]} for key", "equal ones")
    if key.shape[:-1] != value.shape[:-1]:
        got = f"shapes {tuple(key.shape)} and {tuple(value.shape)}"
        raise _wrong("key and value", got, "equal ones except for head_dim")
    heads_q, heads_k = query.shape[-2], key.shape[-2]
    if heads_k == 0 or heads_q % heads_k:
        raise _wrong("heads", f"{heads_q} for query and {heads_k} for key", "a multiple of the key's")
    for row in options_on(call):
        if row.shapes:
            _check_option(row, getattr(call, row.name), query, call)
    if call.key_ranges is not None:
        _check_ranges(call.key_ranges, query, call)
    if call.varlen:
        _check_varlen(query, call)
    elif query.shape[0] != key.shape[0]:
        raise _wrong("batch", f"{query.shape[0]} for query and {key.shape[0]} for key", "equal ones")


def check_same(what: Literal["dtype", "device"], **tensors: Tensor) -> None:
    """Check that tensors of any shape have the same dtype, or the same device."""
    first, *others = (getattr(tensor, what) for tensor in tensors.values())
    if any(other != first for other in others):
        got = ", ".join(f"{name} {getattr(tensor, what)}" for name, tensor in tensors.items())
        raise _wrong(what, got, f"one {what}")


def check_layouts(**tensors: object) -> None:
    """Check that no tensor is sparse, which the key of a plan doesn't say, or nested, which has no shape."""
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and (tensor.layout != torch.strided or tensor.is_nested):
            got = "a nested tensor" if tensor.layout == torch.strided else str(tensor.layout)
            raise _wrong(name, got, "torch.strided")


def _check_option(row: Option, tensor: Tensor, query: Tensor, call: Call) -> None:
    batch = query.shape[0] if call.cu_seqlens_q is None else call.cu_seqlens_q.shape[0] - 1
    shapes, what = row.shapes_of(batch, query.shape[-2]), row.argument or row.name
    dtype = f"torch.{row.dtype}" if row.dtype else str(tensor.dtype)
    if tuple(tensor.shape) not in shapes or str(tensor.dtype) != dtype:
        expected = f"{' or '.join(map(str, shapes))}, {dtype}"
        raise _wrong(what, f"shape {tuple(tensor.shape)}, {tensor.dtype}", expected)
    if tensor.device != query.device:
        raise _wrong(what, f"a tensor on {tensor.device}", f"{query.device}, where the query is")


def _check_ranges(ranges: Tensor, query: Tensor, call: Call) -> None:
    if not call.varlen:
        raise _wrong("key_ranges", "a dense call", "packed tensors")
    _check_integers("key_ranges", ranges, query, rank=3)
    if ranges.shape[::2] != (query.shape[0], 2):
        raise _wrong("key_ranges", f"shape {tuple(ranges.shape)}", f"({query.shape[0]}, ranges, 2)")


def _check_varlen(query: Tensor, call: Call) -> None:
    rows = {"cu_seq_q": call.cu_seqlens_q, "cu_seq_k": call.cu_seqlens_k, "seqused_k": call.seqused_k}
    for name, offsets in rows.items():
        if offsets is not None:
            _check_integers(name, offsets, query, rank=1)
    if call.block_table is not None:
        _check_integers("block_table", call.block_table, query, rank=2)
    elif call.cu_seqlens_k is None:
        raise _wrong("cu_seq_k", "None", "a tensor (None goes with a block_table)")
    batch = call.cu_seqlens_q.shape[0] - 1 if call.cu_seqlens_q is not None else 0
    if batch < 0:
        raise _wrong("cu_seq_q", "no element", "batch + 1 offsets, the first of them 0")
    lengths = {"cu_seq_k": (call.cu_seqlens_k, batch + 1), "seqused_k": (call.seqused_k, batch)}
    for name, (offsets, expected) in {**lengths, "block_table": (call.block_table, batch)}.items():
        if offsets is not None and offsets.shape[0] != expected:
            raise _wrong(
                name, f"length {offsets.shape[0]}", f"{expected}, as cu_seq_q has length {batch + 1}"
            )
    for name, longest in (("max_q", call.max_q), ("max_k", call.max_k)):
        # Kernels count it in 32 bits. The op of compiled code checks the number that a symbol stands for.
        if not isinstance(longest, torch.SymInt) and not 0 <= longest < 2**31:
            raise _wrong(name, str(longest), "0 or more" if longest < 0 else "less than 2**31")


def _check_integers(name: str, tensor: Tensor, query: Tensor, rank: int) -> None:
    if tensor.dtype != torch.int32:
        raise _wrong(name, str(tensor.dtype), "torch.int32")
    if tensor.device != query.device:
        raise _wrong(name, f"a tensor on {tensor.device}", f"{query.device}, where the query is")
    if tensor.dim() != rank:
        raise _wrong(name, f"shape {tuple(tensor.shape)}", f"{rank} dimension{'s' * (rank > 1)}")


def check_values(query: Tensor, key: Tensor, call: Call) -> None:
    """Check the values of a packed call's integer tensors, which have to be on the CPU.

    Query and key are (T, H, D), the key may be pages (pages, page size, H_k, D). Offsets are int32 (B + 1,).
    They may end before the last token (the rest is output 0 and gradient 0), never after it.

    Raises `InvalidInputError` if offsets don't start at 0, decrease or end past the last token; a sequence is
    longer than `max_q` or `max_k`; `seqused_k` counts more keys, or `block_table` has other pages, than there
    are.
    """
    cu_seqlens_q, cu_seqlens_k = call.cu_seqlens_q, call.cu_seqlens_k
    if cu_seqlens_q is None:
        return
    lengths = _checked_lengths(cu_seqlens_q.tolist(), query.shape[0], call.max_q, "q")
    if call.block_table is not None:
        _check_pages(key, call.block_table.tolist(), call)
        return
    if cu_seqlens_k is None:
        return
    # In self-attention the key's offsets are the query's, which are checked above.
    if cu_seqlens_k is not cu_seqlens_q or key.shape[0] != query.shape[0] or call.max_k != call.max_q:
        lengths = _checked_lengths(cu_seqlens_k.tolist(), key.shape[0], call.max_k, "k")
    if call.seqused_k is not None:
        _check_used(call.seqused_k.tolist(), lengths)


def _checked_lengths(offsets: list[int], tokens: int, longest: int, side: str) -> list[int]:
    lengths = list(map(operator.sub, offsets[1:], offsets))
    if offsets[0] != 0:
        raise _wrong(f"cu_seq_{side}", f"first offset {offsets[0]}", "0")
    if min(lengths, default=0) < 0:
        at = next(i for i, length in enumerate(lengths, 1) if length < 0)
        raise _wrong(f"cu_seq_{side}", f"{offsets[at]} after {offsets[at - 1]} at index {at}", "no decrease")
    if offsets[-1] > tokens:
        expected = f"at most {tokens}, the number of tokens"
        raise _wrong(f"cu_seq_{side}", f"last offset {offsets[-1]}", expected)
    if max(lengths, default=0) > longest:
        raise _wrong(f"max_{side}", str(longest), f"at least {max(lengths)}, the longest sequence")
    return lengths


def _check_used(used: list[int], lengths: list[int]) -> None:
    for sequence, (count, length) in enumerate(zip(used, lengths, strict=True)):
        if not 0 <= count <= length:
            raise _wrong("seqused_k", f"{count} at index {sequence}", f"0 to {length}, the number of keys")


def _check_pages(key: Tensor, table: list[list[int]], call: Call) -> None:
    pages, size = key.shape[:2]
    capacity = [len(row) * size for row in table]
    used = capacity if call.seqused_k is None else call.seqused_k.tolist()
    _check_used(used, capacity)
    if max(used, default=0) > call.max_k:
        raise _wrong("max_k", str(call.max_k), f"at least {max(used)}, the longest sequence")
    for sequence, (row, count) in enumerate(zip(table, used, strict=True)):
        for page in row[: -(-count // size) if size else 0]:
            if not 0 <= page < pages:
                raise _wrong("block_table", f"page {page} in row {sequence}", f"0 to {pages - 1}")


def check_scale(scale: float) -> None:
    """Check a softmax scale: any finite number, zero and negative ones included, not NaN."""
    if isinstance(scale, Tensor) and scale.requires_grad:
        raise _wrong("scale", "a tensor that needs a gradient", "a number, as it gets none")
    try:
        is_finite = math.isfinite(scale)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # of a tensor, and of a large integer
        is_finite = False
    if not is_finite:
        raise _wrong("scale", repr(scale), "a finite number")


def checked_number(name: str, value: Any) -> Any:
    """Return the value of an option that is a number: a field of `Call`, as Python's own number.

    Raises:
        InvalidInputError: it is no number, or out of range, or a tensor that needs a gradient.
    """
    return next(row for row in OPTIONS if row.name == name).checked(value)


def _wrong(what: str, got: str, expected: str) -> InvalidInputError:
    return InvalidInputError(f"{what}: got {got}, expected {expected}")


def checked_against_contract(
    kernel: Callable[..., Any],
    direction: Direction,
    backend: str,
    passed: Callable[[], None],
    adapt: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda kernel: kernel,
) -> Callable[..., Any]:
    """Return the kernel with a look at its results; calls `passed` once they are as promised.

    The returned function raises RegistrationError where they aren't. `adapt` returns what runs the kernel on
    arguments that it doesn't take itself: it may rely on results that the kernel has promised.
    """

    def run(*arguments: Any) -> Any:
        ran = []

        def note_results(*inputs: Any) -> Any:
            results = kernel(*inputs)
            ran.append((results, inputs))
            return results

        try:
            returned = adapt(note_results)(*arguments)
        finally:
            for results, inputs in ran:
                check_results(results, direction, inputs, backend)
        passed()
        return returned

    return run


class _Promise(NamedTuple):
    """What a result has to be: a dense tensor in memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def check_results(results: Any, direction: Direction, arguments: tuple[Any, ...], backend: str) -> None:
    """Check what a kernel has returned for these arguments."""
    if direction == "forward":
        expected = _promised(*arguments)
    else:
        models = dict(zip(("grad_q", "grad_k", "grad_v"), arguments[1:4], strict=True))
        call = arguments[-1]
        if call.bias_gradient:
            models["grad_attn_bias"] = call.attn_bias
        models |= {f"grad_{row.name}": getattr(call, row.name) for row in options_on(call) if row.gradient}
        expected = {name: _Promise(tuple(x.shape), x.dtype, x.device) for name, x in models.items()}
    problems = "; ".join(_differences(results, expected))
    if problems:
        raise RegistrationError(f"{backend} breaks the contract in its {direction}: {problems}")


def _promised(query: Tensor, key: Tensor, value: Tensor, call: Call) -> dict[str, _Promise]:
    """Return what a forward's results have to be like."""
    *rows, heads, _ = query.shape
    shape = (heads, *rows) if call.varlen else (rows[0], heads, rows[1])
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    out = _Promise((*rows, heads, value.shape[-1]), query.dtype, query.device)
    return {"out": out, "lse": _Promise(shape, dtype, query.device)}


def _differences(results: Any, expected: dict[str, _Promise]) -> Iterator[str]:
    if not isinstance(results, tuple) or len(results) != len(expected):
        got = f"{len(results)} values" if isinstance(results, tuple) else type(results).__name__
        yield f"got {got}, expected the tuple ({', '.join(expected)})"
        return
    for result, (name, promise) in zip(results, expected.items(), strict=True):
        wanted = f"{promise.shape} {promise.dtype}"
        if (got := _described(result, promise.device)) != wanted:
            is_elsewhere = isinstance(result, Tensor) and result.device != promise.device
            yield f"{name}: got {got}, expected {wanted}{f' on {promise.device}' if is_elsewhere else ''}"


def _described(result: Any, device: torch.device) -> str:
    """Return shape and dtype of a result, and what else it is unless it is plain memory on the device."""
    if not isinstance(result, Tensor):
        text = " ".join(reprlib.repr(result)[:LONGEST_TEXT].split())
        return f"{text} {type(result)}"
    if result.is_nested:
        return "a nested tensor"
    parts = [
        f"{tuple(result.shape)} {result.dtype}",
        "" if result.device == device else f"on {result.device}",
        "" if result.layout == torch.strided else str(result.layout),
        "lazily negated" if result.is_neg() else "",
        "without memory" if result._is_zerotensor() else "",
    ]
    return " ".join(filter(None, parts))
