"""`use_backend`: backends that lead inside a `with` block, for one thread or task."""

from __future__ import annotations

from contextlib import ContextDecorator
from contextvars import ContextVar

from attnreg import _registry, aten, scope
from attnreg.errors import InvalidInputError
from attnreg.selection import Preference

__all__ = ["use_backend"]

# What held before each open `use_backend`. Not in the object: a decorator's is shared by all threads.
_outer: ContextVar[tuple[scope.Pin | None, ...]] = ContextVar("attnreg_outer_pins", default=())


class use_backend(ContextDecorator):  # noqa: N801 - a context manager, named as it is used
    """Put backends first inside a `with` block or a decorated function.

    Holds for this thread or task alone, and for the backward of what ran inside it. Names are tried
    in the order given. Activation checkpointing runs a forward again inside the backward, after the
    block has ended: there use `backend=` on the call, or `register_backend`.

        with attnreg.use_backend("math"):
            out = F.scaled_dot_product_attention(query, key, value)

    Raises:
        UnknownBackendError: no backend has one of the names.
        BackendUnavailableError: one of them can't load here.
        RegistrationError: the routers can't be installed.
    """

    def __init__(self, *names: str) -> None:
        if not names:
            raise InvalidInputError("use_backend: got no name, expected at least one backend")
        found = [_registry.find(name) for name in names]
        aten.ensure()
        for entry in found:
            entry.kernels()
        quoted = ", ".join(repr(entry.name) for entry in found)
        self._pin = scope.pin(Preference(f"use_backend({quoted})", tuple(entry.name for entry in found)))

    def __enter__(self) -> None:
        _outer.set((*_outer.get(), scope.current()))
        scope.enter(self._pin)

    def __exit__(self, *exc: object) -> None:
        *further, before = _outer.get()
        _outer.set(tuple(further))
        scope.enter(before)
