"""Memory layouts of tensors: alignment for sixteen-byte loads, strides, uninitialized tensors."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

# The allocation function of Inductor's generated code, which takes a third of the time of torch.empty.
_empty_cuda = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)

GRAPH_TREES = "torch._inductor.cudagraph_trees"
# Code that Inductor has generated is run by one of these modules: in this process, or for a package.
INDUCTORS_CODE = frozenset(("torch._inductor.output_code", "torch._inductor.package"))


# The dtype of the largest elements that torch copies; a copy preserves every bit.
LARGE = torch.complex128


def aligned(x: Tensor, repeats: bool = True) -> bool:
    """Return whether sixteen-byte loads along the head dim can read a tensor.

    `x` has at least one dimension, the head dim last, and any dtype of at most 16 bytes. The strides of
    dimensions of size one count, too, because tensor descriptors contain them. With `repeats` a stride may be
    0, as in an expanded tensor.
    """
    return x.data_ptr() % 16 == 0 and _in_steps(x.stride(), 16 // x.element_size(), repeats)


@functools.lru_cache(maxsize=4096)
def _in_steps(strides: tuple[int, ...], width: int, repeats: bool) -> bool:
    *steps, last = strides
    return last == 1 and all(step % width == 0 and (repeats or step) for step in steps)


def readable(x: Tensor, repeats: bool = True) -> Tensor:
    """Return a tensor that sixteen-byte loads along the head dim can read; a copy only where needed.

    The tensor has the shape, dtype and values of `x`. A copy has the original's order of dimensions where
    that is possible, because kernels allocate their results in the layout of their inputs.
    """
    if aligned(x, repeats):
        return x
    copy = torch.empty_like(x)
    if not aligned(copy, repeats):
        copy = torch.empty_like(x, memory_format=torch.contiguous_format)
    return copy.copy_(x)


def copy(to: Tensor, source: Tensor) -> None:
    """Copy `source` to a tensor of the same shape and dtype, in elements of sixteen bytes if possible."""
    to, source = in_large_elements(to, source)
    to.copy_(source)


def in_large_elements(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return views of tensors, of any shape and dtype, in elements of sixteen bytes (`LARGE`).

    Returns the tensors themselves where one of them has no such view: its last stride isn't 1, or its address
    or a stride isn't a multiple of sixteen bytes.

    Where rows aren't adjacent, or are chosen by an index, torch copies one element per thread. So larger
    elements are faster: on an H100 a quarter of 16 heads of 32,768 tokens takes 28 us instead of 51.
    """
    return tuple(x.view(LARGE) for x in tensors) if all(map(_is_large, tensors)) else tensors


def _is_large(x: Tensor) -> bool:
    *steps, last = x.stride() or (0,)
    if last != 1 or x.data_ptr() % LARGE.itemsize:
        return False
    # Sizes of elements are powers of two: all places are multiples of one if none has a lower bit set.
    places = functools.reduce(operator.or_, steps, x.storage_offset() | x.shape[-1])
    return not places * x.element_size() % LARGE.itemsize


def with_strides(x: Tensor, strides: Sequence[int]) -> Tensor:
    """Return a tensor with these strides; a copy only where needed."""
    if x.stride() == tuple(strides):
        return x
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def uninitialized(
    size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return a tensor with uninitialized values; a CUDA device has to be the current one."""
    if device.type == "cuda" and _empty_cuda is not None:
        return _empty_cuda(size, stride, dtype)  # type: ignore[no-any-return]
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def contiguous_strides(size: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of this size."""
    strides, step = [], 1
    for length in reversed(size):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


def stream_of(tensor: Tensor) -> int:
    """Return the current CUDA stream of a tensor's device, as a number."""
    return torch._C._cuda_getCurrentRawStream(tensor.get_device())


def inductor_is_running() -> bool:
    """Whether a caller in this thread is code that Inductor has generated."""
    if INDUCTORS_CODE.isdisjoint(sys.modules):  # a look at each frame of the stack takes 0.2 us
        return False
    frame = sys._getframe(1)
    while frame is not None and not str(frame.f_globals.get("__name__")).startswith("torch._inductor."):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def needs_graph_memory(tensor: Tensor) -> bool:
    """Whether a CUDA graph is being captured, or Inductor's CUDA-graph trees are in use.

    The trees run a function once in the graph's pool before they capture it, and check afterwards that no
    tensor is left in the pool. Each replay returns the same tensors, with new values at the same version.
    """
    if not tensor.is_cuda:
        return False
    return GRAPH_TREES in sys.modules or torch.cuda.is_current_stream_capturing()
