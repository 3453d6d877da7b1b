"""Kernels that are run on addresses: what compiled routers need no Python objects of tensors for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
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
        derive: `derive(cu_seqlens_q, cu_seqlens_k)` returns what else it reads of packed calls, and whether
            that may be kept for as long as the offsets exist unchanged; or None if the kernel can't be run
            after all. None for dense calls.
    """

    run: Callable[..., tuple[Tensor, ...] | None]
    launch: Callable[[int, int, int], bool]
    operands: tuple[int, ...]
    results: tuple[Allocation, ...]
    workspace: int = 0
    lse_strides: tuple[int, ...] | None = None
    derive: Callable[[Tensor, Tensor], tuple[list[Tensor], bool] | None] | None = None

    def described(self) -> tuple[Any, ...]:
        """Return all of it, as a compiled router takes it."""
        return self.launch, self.operands, self.results, self.workspace, self.lse_strides, self.derive

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...] | None:
        """Return the results for these tensors."""
        return self.run(*tensors)
