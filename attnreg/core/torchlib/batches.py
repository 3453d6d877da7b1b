"""Gradients that come as a batch, as by `is_grads_batched` and vmap: their elements are computed in turn."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

TWICE = "trying to differentiate twice what attnreg computes, which has a first derivative alone"

# A batch has no memory for kernels, but torch's dispatcher calls an op once for each of its elements, also
# where they are batches again. So gradients go through an op, as one tensor, and what it calls is here.
_numbers = itertools.count()
_running: dict[int, _Backward] = {}


def is_batch(*grads: Tensor | None) -> bool:
    """Whether a gradient, of any shape and dtype, is a batch, as torch's two kinds of vmap make them."""
    functorch = torch._C._functorch
    return not torch.compiler.is_compiling() and any(
        functorch.is_batchedtensor(x) or functorch.is_legacy_batchedtensor(x) for x in grads if x is not None
    )


def each_of_batch(
    backward: Callable[..., tuple[Tensor | None, ...]],
    grads: Sequence[Tensor | None],
    inputs: Sequence[Tensor | None],
) -> tuple[Tensor | None, ...]:
    """Return the results of a backward, of which some gradient is a batch, as batches.

    Args:
        backward: called with the gradients of an element, of any shapes and floating-point dtypes, or None.
        grads: the gradients.
        inputs: the tensors of any shapes that the results depend on as well. A second derivative is an error.
    """
    number, running = next(_numbers), _Backward(backward, _Form.of(grads))
    _running[number] = running
    # Nothing of each, because an op can't have a list of tensors here.
    nothing = [x.reshape(-1)[:0].double() for x in inputs if x is not None and x.requires_grad]
    try:
        together = _op()(running.inputs.together(grads), torch.cat(nothing or [torch.empty(0)]), number)
    finally:
        del _running[number]
    return running.returned.apart(together)


@dataclass(frozen=True)
class _Form:
    """Shapes and dtypes of tensors, None for one that is missing, and a dtype that holds all numbers."""

    parts: tuple[tuple[torch.Size, torch.dtype] | None, ...] = ()
    dtype: torch.dtype = torch.float32

    @classmethod
    def of(cls, tensors: Sequence[Tensor | None]) -> _Form:
        parts = tuple(None if x is None else (x.shape, x.dtype) for x in tensors)
        dtypes = (part[1] for part in parts if part is not None)
        return cls(parts, functools.reduce(torch.promote_types, dtypes))

    def together(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Return the tensors as one, (numbers,)."""
        return torch.cat([x.reshape(-1).to(self.dtype) for x in tensors if x is not None])

    def apart(self, together: Tensor) -> tuple[Tensor | None, ...]:
        """Return what `together` was made of."""
        sizes = [math.prod(part[0]) for part in self.parts if part is not None]
        pieces = iter(together.split(sizes))  # type: ignore[no-untyped-call]
        return tuple(
            None if part is None else next(pieces).reshape(part[0]).to(part[1]) for part in self.parts
        )


@dataclass
class _Backward:
    """A backward that the op calls: its function, and the forms of what it is given and returns."""

    function: Callable[..., tuple[Tensor | None, ...]]
    inputs: _Form
    returned: _Form = field(default_factory=_Form)


@functools.cache
def _op() -> Any:
    @torch.library.custom_op("attnreg::_each_of_batch", mutates_args=())
    def each(grads: Tensor, _inputs: Tensor, number: int) -> Tensor:
        running = _running[number]
        with torch.no_grad():
            results = running.function(*running.inputs.apart(grads))
        running.returned = _Form.of(results)
        return running.returned.together(results)

    def refuse(_ctx: Any, *_: Tensor) -> NoReturn:
        raise RuntimeError(TWICE)

    each.register_autograd(refuse)
    return each
