"""What a call of the package comes to, without its Python: tensors to allocate, kernels to launch."""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch

from attnreg.torchlib.layout import uninitialized

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

__all__ = ["Allocation", "Recipe", "pick"]

# Slot, size, stride and dtype.
Allocation = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]


@dataclass(frozen=True, slots=True)
class Recipe:
    """A call as it was seen.

    Its slots are what launches are given: the inputs first, then everything else in the order in
    which it came up.

    Attributes:
        device: where the tensors are; has to be the current device.
        rest: the slots after the inputs: constants, and None where a tensor or a tuple comes in.
        allocations: the tensors to allocate.
        zeroed: the slots of those that start as zeros.
        tuples: slot, maker and contents of each tuple with a tensor in it.
        launches: compiled functions, each with the function that picks its arguments out of the slots.
        results: picks the results.
    """

    device: torch.device
    rest: tuple[object, ...]
    allocations: tuple[Allocation, ...]
    zeroed: tuple[int, ...]
    tuples: tuple[tuple[int, Callable[[Any], object], Callable[[Any], Any]], ...]
    launches: tuple[tuple[Callable[..., object], Callable[[Any], Any]], ...]
    results: Callable[[Any], tuple[Tensor, ...]]

    def again(self, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        """Do the call again, on the current stream."""
        return self.launched(self.allocated(inputs))

    def allocated(self, inputs: Sequence[Tensor | None]) -> list[Any]:
        """Return the slots with all that has to be in them before the first launch, tuples aside."""
        slots: list[Any] = [*inputs, *self.rest]
        for slot, size, stride, dtype in self.allocations:
            slots[slot] = uninitialized(size, stride, dtype, self.device)
        for slot in self.zeroed:
            slots[slot].zero_()
        return slots

    def launched(self, slots: list[Any]) -> tuple[Tensor, ...]:
        """Launch the kernels and return the results."""
        for slot, make, contents in self.tuples:
            slots[slot] = make(contents(slots))
        for function, arguments in self.launches:
            function(*arguments(slots))
        return self.results(slots)


def pick(slots: Sequence[int]) -> Callable[[Any], Any]:
    """Return the function that picks these slots, as a tuple."""
    if len(slots) > 1:
        return itemgetter(*slots)
    return lambda given: tuple(given[slot] for slot in slots)
