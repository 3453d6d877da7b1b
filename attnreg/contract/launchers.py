"""Kernels that are run on addresses: what compiled routers need no Python objects of tensors for."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from attnreg.contract.offsets import stream_of
from attnreg.errors import RegistrationError
from attnreg.torchlib.layout import fresh, lying

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["AddressCall", "Allocation"]

# Size, strides and dtype.
Allocation = tuple[tuple[int, ...], tuple[int, ...], "torch.dtype"]


@dataclass(frozen=True, slots=True)
class AddressCall:
    """A kernel with all but its tensors settled, which is told where they lie and no more.

    What a backend returns from `Kernels.again` where such a kernel is all there is to it: compiled routers
    allocate what it needs and hand it the addresses. Tensors are numbered: those that the call is given,
    offsets aside; the results; what is derived from offsets.

    Attributes:
        run: does it with tensors, as `Kernels.again` has it, where routers are written in Python.
        launch: `launch(addresses, workspace, stream)` runs the kernel. The first is where the pointers lie,
            the second where the workspace does (0 if there is none), the third a CUDA stream of the tensors'
            device, which is the current one. Returns False if it can't after all, and has done nothing then.
        operands: the numbers of the tensors that it is given the addresses of.
        results: what to allocate for its results.
        workspace: how many bytes it needs beside those.
        lse_strides: how the LSE has to lie that a backward is given, which is copied otherwise; None if it is
            taken as it comes.
        derive: `derive(cu_seqlens_q, cu_seqlens_k)` returns what else it reads of packed calls, or None if
            the kernel can't be run after all. It isn't asked again while the offsets exist unchanged and the
            tensors are kept by whoever derived them (`packed.derived_from` does). None for dense calls.
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
                raise RegistrationError(f"AddressCall.{name}: got {value!r}, expected a tuple")
        for number in (*self.operands, *strides, self.workspace):
            if not isinstance(number, int) or number < 0:
                raise RegistrationError(f"AddressCall: got {number!r}, expected whole numbers from 0")

    def described(self) -> tuple[Any, ...]:
        """Return all of it, as a compiled router takes it."""
        return self.launch, self.operands, self.results, self.workspace, self.lse_strides, self.derive

    def on_addresses(self, *given: Tensor) -> tuple[Tensor, ...] | None:
        """Return the results for these tensors as compiled routers do, by `launch`; None if it can't."""
        if given[0].is_cuda:
            with torch.cuda.device(given[0].device):
                return self._launched(*given)
        return self._launched(*given)

    def _launched(self, *given: Tensor) -> tuple[Tensor, ...] | None:
        tensors, ends = (given[:-2], given[-2:]) if self.derive is not None else (given, ())
        if self.lse_strides is not None:
            tensors = *tensors[:-1], lying(tensors[-1], self.lse_strides)
        device = given[0].device
        results = tuple(fresh(*one, device) for one in self.results)
        derived = self.derive(*ends) if self.derive is not None else []
        if derived is None:
            return None
        operands = *tensors, *results, *derived
        addresses = (ctypes.c_void_p * len(self.operands))(*(operands[n].data_ptr() for n in self.operands))
        workspace = fresh((self.workspace,), (1,), torch.uint8, device)
        stream = stream_of(given[0]) if device.type == "cuda" else 0
        launched = self.launch(ctypes.addressof(addresses), workspace.data_ptr(), stream)
        return results if launched else None

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...] | None:
        """Return the results for these tensors."""
        return self.run(*tensors)
