"""Choices that hold for some calls only, and how a forward tells them to its backward.

A `Pin` is such a choice. Each gets a small number, because the only way from an aten op's forward
to its backward is a saved tensor: `stamp` hides the number in where a tensor begins in its storage,
which costs no kernel, no host sync, and survives autograd, CUDA graphs and, for scalars, torch.compile;
a larger tensor Inductor may lay out anew.
"""

from __future__ import annotations

import threading
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Any

import torch

from attnreg import _registry
from attnreg.selection.decision import Preference
from attnreg.torchlib.locks import open_after_fork

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = [
    "KNOWN",
    "NOTHING",
    "OWN",
    "UNKNOWN",
    "Own",
    "Pin",
    "current",
    "enter",
    "exclusive",
    "leave",
    "on_first_choice",
    "pin",
    "read_stamp",
    "restamp",
    "stamp",
    "variable",
]


class Pin:
    """A choice that leads all others for the calls it is given to.

    Attributes:
        preference: the backends it puts first; None if it only says that attnreg serves the call.
        number: its place in the list of all pins.
        no_gradient: why a backward of this call would be wrong; empty if it is right.
    """

    __slots__ = ("no_gradient", "number", "preference")

    def __init__(self, number: int, preference: Preference | None, no_gradient: str = "") -> None:
        self.number = number
        self.preference = preference
        self.no_gradient = no_gradient

    def __repr__(self) -> str:
        return f"Pin({self.number}, {self.preference!r}, {self.no_gradient!r})"


_lock = open_after_fork(threading.Lock())
_pins: list[Pin] = []
_known: dict[tuple[Preference | None, str], Pin] = {}
_told: list[Callable[[ContextVar[Pin | None]], object]] = []


def pin(preference: Preference | None, no_gradient: str = "") -> Pin:
    """Return the one pin for that choice."""
    found = _known.get((preference, no_gradient))
    if found is None:
        with _lock:
            found = _known.get((preference, no_gradient))
            if found is None:
                found = Pin(len(_pins) + 1, preference, no_gradient)
                _pins.append(found)
                if preference is not None:
                    _tell()  # before another thread can find it
                _known[preference, no_gradient] = found
    return found


def on_first_choice(tell: Callable[[ContextVar[Pin | None]], object]) -> None:
    """Have a function told of the context variable before it can hold a choice of backends."""
    with _lock:
        _told.append(tell)
        if any(pin.preference is not None for pin in _pins):
            _tell()


def _tell() -> None:
    while _told:
        _told.pop()(variable)


# Announced to compiled routers: a call of attnreg's own front that may have come before, one that has not,
# or that none is about to come.
KNOWN, UNKNOWN, NOTHING = 1, -1, 0

# attnreg's own front serves its calls also where nothing is registered and torch's are left alone.
OWN = pin(None)


class Own(Pin):
    """`OWN` for one call: with how that is known again, and what it came down to the last time.

    Attributes:
        known_as: everything that decides, first what tells tensors apart.
        rest, options: what the front gives the op after the tensors, and by keyword.
        express: what it came down to; None before that is known. See `aten.express`.
    """

    __slots__ = ("express", "known_as", "options", "rest")

    def __init__(self, known_as: tuple[object, ...]) -> None:
        super().__init__(OWN.number, None)
        self.known_as = known_as
        self.rest: tuple[Any, ...] = ()
        self.options: dict[str, Any] = {}
        self.express: Any = None


variable: ContextVar[Pin | None] = ContextVar("attnreg_pin", default=None)
current = variable.get


def exclusive(name: str, source: str = "") -> Pin:
    """Return the pin that obeys or refuses: `backend=` on a call.

    Raises:
        UnknownBackendError: no backend has that name.
        BackendUnavailableError: it can't load here.
    """
    entry = _registry.find(name)
    entry.kernels()
    return pin(Preference(source or f"backend={entry.name!r}", (entry.name,), exclusive=True))


def enter(pin: Pin | None) -> Token[Pin | None]:
    """Make a pin hold in this thread or task until `leave`."""
    return variable.set(pin)


def leave(token: Token[Pin | None]) -> None:
    """End what `enter` began."""
    variable.reset(token)


# A stamped tensor begins `ALIGNED * number` elements into its storage and is followed by `GUARD`
# elements: sixteen bytes for kernels that want their pointers aligned, and a length that no slice
# of an ordinary tensor is likely to have.
ALIGNED, GUARD = 4, 13


def stamp(pin: Pin | None, beside: Tensor) -> Tensor:
    """Return a uint64 scalar that carries a pin, for the aten op outputs that are free to."""
    if pin is None:
        return beside.new_empty((), dtype=torch.uint64)
    base = beside.new_empty(ALIGNED * pin.number + 1 + GUARD, dtype=torch.uint64)
    return base.as_strided((), (), ALIGNED * pin.number)


def restamp(tensor: Tensor, pin: Pin) -> Tensor:
    """Return a copy of a tensor that carries a pin; same shape, strides and values."""
    # The span of the strides, not the element count: the copy keeps the layout that torch expects.
    extent = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = ALIGNED * pin.number
    base = tensor.new_empty(start + max(extent, 0) + GUARD)
    return base.as_strided(tensor.shape, tensor.stride(), start).copy_(tensor)


def read_stamp(tensor: Tensor) -> Pin | None:
    """Return the pin that a tensor carries, or None; looks at no element."""
    start = tensor.storage_offset()
    if start == 0 or start % ALIGNED or start // ALIGNED > len(_pins):
        return None
    extent = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    stored = tensor.untyped_storage().nbytes() // tensor.element_size()
    return _pins[start // ALIGNED - 1] if stored == start + max(extent, 0) + GUARD else None
