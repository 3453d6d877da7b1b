"""Launchers: what runs further calls like one that a kernel has just run, for the call cache.

`Kernels.specialize` is called after a call has run, with the tensors that it ran on, and returns a
launcher for calls that differ in nothing but the values of tensors and where these lie. The call cache
compares shapes, strides, dtypes, devices, alignment to 16 bytes, all of `Call` and the modes that torch
is in, and it sees to it that of every call

- each row belongs to a sequence that has queries and keys, and each query sees a key,
- the tensors' device is the current one.

Thread and stream may be others, and a CUDA graph may be captured. Whatever else a launcher depends on it
looks at itself, and returns None where that has changed: Python then looks up the call's plan. What it raises
means what it means of a kernel: after a BackendUnavailableError the next backend runs such calls.

A launcher is called with the tensors that the backend's function takes, followed by the sinks of a call that
has some, and by both offsets of a packed call (the same tensor twice if the first call's were). It returns
what the function does, save that a forward's LSE may have any strides, and it calls no op of aten's that
attnreg routes. Any function will do; where all it did would be to call a kernel, an `OpLauncher` or an
`AddressLauncher` spares the compiled call cache every Python object of a tensor.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnreg.contract import rows as rows_module
from attnreg.torchlib import captured
from attnreg.torchlib.layout import contiguous_strides, stream_of, with_strides

Launcher = Callable[..., "tuple[Tensor, ...] | None"]

LSE = 5  # its place among the tensors of a backward

# Size, strides and dtype.
Allocation = tuple[tuple[int, ...], tuple[int, ...], "torch.dtype"]


class OpLauncher:
    """One of torch's own kernels, with all its arguments but the tensors.

    Attributes:
        op, key: the aten op, without "aten::", and the dispatch key of the kernel (see `torchlib.captured`).
        rest, options: the op's arguments behind the tensors, and those by keyword.
        results: how many of the op's results are returned.
    """

    __slots__ = ("_run", "key", "op", "options", "rest", "results")

    def __init__(
        self, op: str, key: str, rest: tuple[Any, ...], options: dict[str, Any], results: int
    ) -> None:
        self.op, self.key, self.rest, self.options, self.results = op, key, rest, options, results
        self._run = captured.kernel(op, key)

    def described(self) -> tuple[Any, ...]:
        """Return all of it, as the compiled call cache takes it."""
        return self.op, self.key, self.rest, self.options, self.results

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the results for these tensors."""
        return tuple(self._run(*tensors, *self.rest, **self.options)[: self.results])


class Prepared(NamedTuple):
    """How one call's kernel is launched; equal lengths and strides share it.

    Tensors are numbered: first those that the call is given, offsets aside; then the results; then what is
    derived from the offsets.

    Attributes:
        launch: `launch(addresses, workspace, stream)` runs the kernel. `addresses` points to an array of
            pointers, `workspace` to the workspace (0 if there is none), and `stream` is a CUDA stream of the
            tensors' device, which is the current one. Returns False, having done nothing, if it can't any
            more.
        operands: the numbers of the tensors whose addresses the kernel is given, in order.
        workspace: how many more bytes the kernel needs.
        lse_token_first: whether the LSE of a packed forward, (H, T), is written with strides (1, H).
        lse_strides: the strides that a backward's given LSE has to have, which is copied otherwise; None if
            any will do.
        derive: `derive(cu_q, cu_k)` returns the further tensors that the kernel reads of packed calls, or
            None if it can't run any more. None for dense calls.
    """

    launch: Callable[[int, int, int], bool]
    operands: tuple[int, ...]
    workspace: int = 0
    lse_token_first: bool = False
    lse_strides: tuple[int, ...] | None = None
    derive: Callable[[Tensor, Tensor], list[Tensor] | None] | None = None


@dataclass(frozen=True, slots=True)
class AddressLauncher:
    """A kernel that is given the addresses of its tensors.

    Attributes:
        run: the launcher as a function of tensors, for callers that have them.
        prepare: `prepare(batch, max_q, max_k, tokens_q, tokens_k, strides)` returns how a call of these
            lengths is launched, or None if Python has to run it. `strides` are those of each given tensor.
    """

    run: Callable[..., tuple[Tensor, ...] | None]
    prepare: Callable[..., Prepared | None]

    def __call__(self, *given: Any) -> tuple[Tensor, ...] | None:
        """Return the results for these tensors."""
        return self.run(*given)

    def on_addresses(self, *given: Any) -> tuple[Tensor, ...] | None:
        """Return the results as the compiled call cache has them, by `prepare`; None if it can't."""
        if given[0].is_cuda:
            with torch.cuda.device(given[0].device):
                return self._launched(*given)
        return self._launched(*given)

    def _launched(self, *given: Any) -> tuple[Tensor, ...] | None:
        packed = isinstance(given[-1], bool)
        tensors, (cu_q, cu_k, max_q, max_k, seen) = (
            (list(given[:-5]), given[-5:]) if packed else (list(given), (None, None, 0, 0, True))
        )
        backward = len(tensors) > LSE
        query, key, value = tensors[1:4] if backward else tensors[:3]
        tokens = query.shape[:-2].numel(), key.shape[:-2].numel()
        batch = len(cu_q) - 1 if packed else query.shape[0]
        longest = (max_q, max_k) if packed else (query.shape[1], key.shape[1])
        prepared = self.prepare(batch, *longest, *tokens, tuple(x.stride() for x in tensors))
        if prepared is None:
            return None
        if prepared.lse_strides is not None:
            tensors[LSE] = with_strides(tensors[LSE], prepared.lse_strides)
        if backward:
            results = [x.new_empty(x.shape) for x in (query, key, value)]
        else:
            *rows, heads = query.shape[:-1]
            size = *rows[:-1], heads, rows[-1]
            strides = (1, heads) if prepared.lse_token_first else contiguous_strides(size)
            out = query.new_empty((*query.shape[:-1], value.shape[-1]))
            results = [out, query.new_empty_strided(size, strides, dtype=torch.float32)]
        derived = prepared.derive(cu_q, cu_k) if prepared.derive is not None else []
        if derived is None:
            return None
        operands = *tensors, *results, *derived
        addresses = (ctypes.c_void_p * len(prepared.operands))(
            *(operands[n].data_ptr() for n in prepared.operands)
        )
        workspace = torch.empty(prepared.workspace, dtype=torch.uint8, device=query.device)
        stream = stream_of(query) if query.is_cuda else 0
        if not prepared.launch(ctypes.addressof(addresses), workspace.data_ptr(), stream):
            return None
        if not seen and backward:
            rows_module.clear_backward(*results, cu_q, cu_k)
        elif not seen:
            rows_module.clear_forward(*results, cu_q, cu_k, (-1, -1))
        return tuple(results)
