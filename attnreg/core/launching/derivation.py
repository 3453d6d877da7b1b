"""What a launch reads of offsets, derived once for all launches with them.

The call cache reads these tuples by place (`dispatch/csrc/derivation.h`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class OffsetsKernel(NamedTuple):
    """A kernel on the GPU that writes what a launch reads of new offsets; the call cache launches it.

    Its arguments have eight bytes each: the address of the tensor, the addresses of both offsets, their
    strides, the number of sequences, the tensor's width, then `words`.

    Attributes:
        launch, function: the address of cuLaunchKernel, and the function's handle.
        threads: the threads of a block. All blocks together have at least the width.
        rows, width: the size of the tensor, int64 (rows, width). A width of 0 is the number of sequences.
        words: the further arguments.
        places: where in the tensor a launch reads, in bytes, as `Derivation.derive` returns them.
    """

    launch: int
    function: int
    threads: int
    rows: int
    width: int
    words: tuple[int, ...]
    places: tuple[int, ...]


class Derivation(NamedTuple):
    """What derives of offsets what a launch reads of them.

    Attributes:
        derive: `derive(cu_seqlens_q, cu_seqlens_k)` returns a tensor, and the places in it, in bytes, where
            the launch reads. It returns None if it can't run any more. `offsets.derived_from` keeps the
            tensor. While offsets and tensor exist unchanged, it is called again only after `offsets.TRUSTED`
            seconds. A third argument is a tensor that `kernel` has written for these offsets. Launches have
            read it for `TRUSTED` seconds, and the device has to compare it.
        kernel: the kernel that writes the same, which the call cache launches for new offsets. If it is None,
            `derive` is called for them.
    """

    derive: Callable[..., tuple[Tensor, tuple[int, ...]] | None]
    kernel: OffsetsKernel | None = None
