"""Calls of the compiled kernel (`kernel/module.cpp`), which a wheel brings or `attnreg build` compiles.

One call of the library runs a whole batch of any lengths on torch's threads. The library receives the call's
kind and arguments (`problem.py`), and finds the sequences itself. So a launcher needs no Python.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from attnreg.backends.cpu import choice, torch_path
from attnreg.backends.cpu.paged import check_pages, gathered_backward
from attnreg.backends.cpu.problem import DTYPES, NativeArguments, count_of, kind_of
from attnreg.backends.cpu.sequences import sequences_of
from attnreg.core.contract.backend import Call, Kernels
from attnreg.core.contract.spec import Direction
from attnreg.core.launching.launchers import NativeLauncher
from attnreg.core.launching.validation import check_values
from attnreg.core.torchlib import building
from attnreg.core.torchlib.layout import with_last_stride_1
from attnreg.core.torchlib.modes import resolved
from attnreg.errors import BuildError, InvalidInputError

log = logging.getLogger("attnreg")

# The status that the library returns: `Status` in kernel/call.h.
_NO_MEMORY, _NO_THREADS, _NO_PAGE, _WRONG_LENGTHS, _DECLINED = range(1, 6)


class CompiledKernel(NamedTuple):
    """The two functions of the library."""

    forward_entry: Any
    backward_entry: Any

    @classmethod
    def of(cls, library: ctypes.CDLL) -> CompiledKernel:
        """Return the functions of a library, which run calls in torch's threads from now on."""
        # Torch has loaded it, so its name is enough. The functions are of torch's stable C interface.
        torchs = ctypes.CDLL("libtorch_cpu.so", mode=os.RTLD_NOLOAD)
        library.attnreg_use_threads(torchs.torch_get_num_threads, torchs.torch_parallel_for)
        entries = library.attnreg_forward, library.attnreg_backward
        for entry in entries:
            entry.argtypes, entry.restype = (ctypes.c_void_p, ctypes.c_void_p), ctypes.c_int64
        return cls(*entries)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """Return the output, in the query's dtype, and the LSE in float32, (B, H, S) or (H, T).

        Query, key and value are (B, S, H, D) or (T, H, D), in a dtype of `problem.DTYPES`; with pages key and
        value are (pages, page size, H, D).

        Raises:
            InvalidInputError: offsets, counts of keys, pages or shapes don't fit.
        """
        q, k, v = _readable(q), _readable(k), _readable(v)
        results = _forward_results(q, v)
        _run(self.forward_entry, (q, k, v, *results), q, k, call)
        return results

    @gathered_backward
    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value, in their shapes and dtype.

        `grad_out` and `out` are like a forward's output, `lse` like its LSE. Raises as `forward` does.
        """
        if lse.dtype != torch.float32:
            out, lse = torch_path.of_all_keys(self.forward(q, k, v, call), out, lse)
        grad_out, q, k, v, out = (_readable(x) for x in (grad_out, q, k, v, out))
        grads = _backward_results(q, k, v)
        lse = resolved(lse)
        of_lse = () if call.grad_lse is None else (resolved(call.grad_lse).float(),)
        _run(self.backward_entry, (grad_out, q, k, v, out, lse, *grads, *of_lse), q, k, call)
        return grads[0], grads[1], grads[2]

    def specialize(
        self, direction: Direction, tensors: tuple[Tensor, ...], call: Call
    ) -> NativeLauncher | None:
        """Return a launcher for further calls of a kind, or None where such calls would copy tensors.

        `tensors` are query, key and value, of a backward (grad_out, query, key, value, out, lse), in the
        shapes and dtypes of `forward` and `backward`: (B, S, H, D) or (T, H, D).
        """
        is_forward = direction == "forward"
        read, lse = tensors[:5], tensors[5:]  # a forward has no LSE
        if any(x.stride(-1) != 1 for x in read) or any(x.dtype != torch.float32 for x in lse):
            return None
        if call.dropout or not (call.alibi_slopes is call.grad_lse is None):
            return None
        if not (call.seqused_k is call.block_table is None or (is_forward and call.varlen)):
            return None  # no launcher of these is given them
        return _launcher(self.forward_entry if is_forward else self.backward_entry, tensors, call)

    def before(self, kernels: Kernels) -> Kernels:
        """Return kernels that use the library where it can run a call and is faster, else `kernels`."""
        rest = kernels.backward
        assert rest is not None

        def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
            return (self.forward if _takes_forward(*arguments) else kernels.forward)(*arguments)

        def backward(*arguments: Any) -> tuple[Tensor, ...]:
            return (self.backward if _takes_backward(*arguments) else rest)(*arguments)

        def specialize(
            direction: Direction, tensors: tuple[Tensor, ...], call: Call
        ) -> NativeLauncher | None:
            takes = _takes_kind(call, *tensors[:5])
            return self.specialize(direction, tensors, call) if takes else None

        return Kernels(forward, backward, specialize, choice.replaces_torch)


@functools.cache
def load() -> CompiledKernel | None:
    """Return the library, or None where it isn't built or can't be loaded."""
    try:
        return CompiledKernel.of(building.loaded_cpu_kernel())
    except (BuildError, OSError) as error:  # or torch is one file that has another name
        # `ensure_built` logs a library that isn't built or used.
        level = logging.WARNING if building.may_be_loaded(building.CPU_KERNEL) else logging.DEBUG
        log.log(level, "the cpu backend uses torch's kernel alone: %s", error)
        return None


def _takes_kind(call: Call, *tensors: Tensor) -> bool:
    """Return whether the library supports a call's kind: one known dtype of all `tensors`, and no bias."""
    dtype = tensors[0].dtype
    return dtype in DTYPES and call.attn_bias is None and all(x.dtype == dtype for x in tensors)


def _takes_forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> bool:
    if not (_takes_kind(call, q, k, v) and q.numel() and k.numel() and v.numel()):
        return False
    if call.block_table is not None and not call.block_table.numel():
        return False  # its address says that there are no pages
    is_only_here = call.softcap or call.dropout or call.alibi_slopes is not None
    return bool(is_only_here) or call.block_table is not None or not choice.leaves_to_torch(q, k, call)


def _takes_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
) -> bool:
    """Return whether the library can run a backward; shapes and dtypes must be as a forward returns them."""
    return bool(
        _takes_kind(call, q, k, v, out, grad_out)
        and q.numel() and k.numel() and v.numel()
        and grad_out.shape == out.shape == (*q.shape[:-1], v.size(-1))
        and lse.shape == (*q.shape[:-3], q.size(-2), q.size(-3))
        and (call.grad_lse is None or call.grad_lse.shape == lse.shape)
    )  # fmt: skip


def _readable(x: Tensor) -> Tensor:
    return with_last_stride_1(resolved(x))


def _forward_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate the output and the LSE for a query whose last stride is 1.

    Results of dense calls have the layout of torch's kernel, so that a router needs no copy: the output has
    the query's layout, the LSE has the strides of (B, S, H).
    """
    *outer, heads, size = q.shape
    if len(outer) == 1:
        out = torch.empty(*outer, heads, v.size(-1), dtype=q.dtype, device="cpu")
        return out, torch.empty(heads, *outer, dtype=torch.float32, device="cpu")
    out = torch.empty_like(q) if v.size(-1) == size else q
    if out is q or out.stride(-1) != 1:
        out = torch.empty(*outer, heads, v.size(-1), dtype=q.dtype, device="cpu")
    shape, strides = (outer[0], heads, outer[1]), (heads * outer[1], 1, heads)
    return out, torch.empty_strided(shape, strides, dtype=torch.float32, device="cpu")


def _backward_results(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Allocate gradients, contiguous like the gradients of torch's kernel."""
    return tuple(torch.empty(x.shape, dtype=x.dtype, device="cpu") for x in tensors)


def _run(entry: Any, tensors: Sequence[Tensor], q: Tensor, k: Tensor, call: Call) -> None:
    # With pages the keys' offsets don't count: `seqused_k` has the numbers of keys.
    count, ends = count_of(q, call), None if call.block_table is not None else call.cu_seqlens_k
    counted = [len(x) for x in (call.seqused_k, call.block_table) if x is not None]
    if any(other != count for other in (*counted, count if ends is None else len(ends) - 1)):
        _raise_for(_WRONG_LENGTHS, q, k, call)
    kind = kind_of(q, call)
    lengths = call.cu_seqlens_q, ends, call.max_q, call.max_k
    arguments = NativeArguments(tensors, *lengths, call.seqused_k, call.block_table)
    if status := entry(ctypes.addressof(kind), arguments.address):
        _raise_for(status, q, k, call)


def _launcher(entry: Any, tensors: tuple[Tensor, ...], call: Call) -> NativeLauncher:
    is_forward = len(tensors) == 3
    query = tensors[not is_forward]
    # The compiled kernel runs every backward of a kind, whichever kernel ran the forward.
    may_be_torchs = is_forward and call.block_table is None
    kind = kind_of(query, call, choice.torchs_calls(query, call) if may_be_torchs else None)
    is_packed, context = call.varlen, ctypes.addressof(kind)
    options = {"seqused_k": call.seqused_k, "block_table": call.block_table}
    takes = tuple(name for name, tensor in options.items() if tensor is not None)

    def run(*arguments: Any) -> tuple[Tensor, ...] | None:
        tensors, lengths = (arguments[:-5], arguments[-5:-1]) if is_packed else (arguments, ())
        count = len(tensors) - len(takes)
        tensors, named = tensors[:count], dict(zip(takes, tensors[count:], strict=True))
        q, k, v = tensors[:3] if is_forward else tensors[1:4]
        results = _forward_results(q, v) if is_forward else _backward_results(q, k, v)
        native_call = NativeArguments((*tensors, *results), *lengths, *map(named.get, options))
        return None if entry(context, native_call.address) else results

    address = ctypes.cast(entry, ctypes.c_void_p).value or 0  # it isn't null
    return NativeLauncher(run=run, function=address, context=context, keep=kind, takes=takes)


def _raise_for(status: int, q: Tensor, k: Tensor, call: Call) -> NoReturn:
    if status == _NO_MEMORY:
        raise MemoryError("no memory for the blocks that attention works on")
    if status == _NO_THREADS:
        raise RuntimeError("torch couldn't start its threads for attention on the CPU")
    if status == _NO_PAGE and call.block_table is not None:
        check_pages(k, call.block_table, call)
    if status == _WRONG_LENGTHS:
        sequences_of(q, k, call)
        check_values(q, k, call)
    what = "shapes don't fit" if status == _DECLINED else "lengths or pages changed while it ran"
    raise InvalidInputError(f"the tensors of a call: {what}")
