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
from typing import Any

import torch
from torch import Tensor

from attnreg.errors import RegistrationError
from attnreg.torchlib import captured
from attnreg.torchlib.layout import stream_of, uninitialized, with_strides

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


@dataclass(frozen=True, slots=True)
class AddressLauncher:
    """A kernel that is given the addresses of its tensors.

    The call cache allocates the results and the workspace. Tensors are numbered: first those that the call is
    given, offsets aside; then the results; then what is derived from the offsets.

    Attributes:
        run: the launcher as a function of tensors, for callers that have them.
        launch: `launch(addresses, workspace, stream)` runs the kernel. `addresses` points to an array of
            pointers, `workspace` to the workspace (0 if there is none), and `stream` is a CUDA stream of the
            tensors' device, which is the current one. Returns False, having done nothing, if it can't any
            more.
        operands: the numbers of the tensors whose addresses the kernel is given, in order.
        results: size, strides and dtype of each result.
        workspace: how many more bytes the kernel needs.
        lse_strides: the strides that a backward's LSE, its sixth tensor, has to have, which is copied
            otherwise; None if any will do.
        derive: `derive(cu_seqlens_q, cu_seqlens_k)` returns the further tensors that the kernel reads of
            packed calls, or None if it can't run any more. While the offsets exist unchanged and the tensors
            are alive (`offsets.derived_from` keeps them) it is called again only after `offsets.TRUSTED`
            seconds. None for dense calls.
    """

    run: Callable[..., tuple[Tensor, ...] | None]
    launch: Callable[[int, int, int], bool]
    operands: tuple[int, ...]
    results: tuple[Allocation, ...]
    workspace: int = 0
    lse_strides: tuple[int, ...] | None = None
    derive: Callable[[Tensor, Tensor], list[Tensor] | None] | None = None

    def __post_init__(self) -> None:
        strides = () if self.lse_strides is None else self.lse_strides
        given = {"operands": self.operands, "results": self.results, "lse_strides": strides}
        for name, value in given.items():
            if not isinstance(value, tuple):
                raise RegistrationError(f"AddressLauncher.{name}: got {value!r}, expected a tuple")
        for number in (*self.operands, *strides, self.workspace):
            if not isinstance(number, int) or number < 0:
                raise RegistrationError(f"AddressLauncher: got {number!r}, expected whole numbers from 0")

    def described(self) -> tuple[Any, ...]:
        """Return all of it, as the compiled call cache takes it."""
        return self.launch, self.operands, self.results, self.workspace, self.lse_strides, self.derive

    def on_addresses(self, *given: Tensor) -> tuple[Tensor, ...] | None:
        """Return the results as the compiled call cache has them, by `launch`; None if it can't."""
        if given[0].is_cuda:
            with torch.cuda.device(given[0].device):
                return self._launched(*given)
        return self._launched(*given)

    def _launched(self, *given: Tensor) -> tuple[Tensor, ...] | None:
        tensors, ends = (given[:-2], given[-2:]) if self.derive is not None else (given, ())
        if self.lse_strides is not None:
            lse = with_strides(tensors[LSE], self.lse_strides)
            tensors = *tensors[:LSE], lse, *tensors[LSE + 1 :]
        device = given[0].device
        results = tuple(uninitialized(*one, device) for one in self.results)
        derived = self.derive(*ends) if self.derive is not None else []
        if derived is None:
            return None
        operands = *tensors, *results, *derived
        addresses = (ctypes.c_void_p * len(self.operands))(*(operands[n].data_ptr() for n in self.operands))
        workspace = uninitialized((self.workspace,), (1,), torch.uint8, device)
        stream = stream_of(given[0]) if device.type == "cuda" else 0
        launched = self.launch(ctypes.addressof(addresses), workspace.data_ptr(), stream)
        return results if launched else None

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...] | None:
        """Return the results for these tensors."""
        return self.run(*tensors)


@dataclass(frozen=True, slots=True)
class NativeLauncher:
    """A C function that is given a call's arguments, so that calls with other lengths need no Python.

    `int64_t function(const void* context, const NativeCall* call)` returns 0, or anything else where it has
    done nothing: Python then runs the call. It is called without the interpreter's lock.

    Attributes:
        function: its address.
        context: the address of what calls of this kind have in common.
        run: the launcher as a function of tensors; of packed calls these are followed by both offsets,
            `max_q`, `max_k` and whether every row is known to see a key.
        keep: what keeps the context alive.
    """

    function: int
    context: int
    run: Callable[..., tuple[Tensor, ...] | None]
    keep: object

    def __call__(self, *given: Any) -> tuple[Tensor, ...] | None:
        """Return the results for these arguments."""
        return self.run(*given)
