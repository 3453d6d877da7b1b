"""Calls that a kernel declines once it sees them, though its backend's limits admit them.

What some packages can run only they know, and only when they are asked: cuDNN when it plans. Such a kernel
raises `UnsupportedInputError` before it has done anything. The call is then decided once more, without that
backend and with what it said as the reason.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from attnreg.errors import UnsupportedInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["DeclinedError", "Told", "reasons", "served"]

T = TypeVar("T")


class Told(NamedTuple):
    """What a kernel said of a call.

    Attributes:
        look_up: what the call's plan is looked up by.
        backend: whose kernel it is.
        reason: why it can't run the call.
    """

    look_up: tuple[object, ...]
    backend: str
    reason: str


class DeclinedError(UnsupportedInputError):
    """A kernel has declined a call; `told` is what it said."""

    def __init__(self, told: Told) -> None:
        super().__init__(told.reason)
        self.told = told


_under_way: ContextVar[tuple[Told, ...]] = ContextVar("attnreg_declines", default=())


def reasons(look_up: tuple[object, ...]) -> Mapping[str, str]:
    """Return which backends have declined the call that is being decided, and why."""
    return {told.backend: told.reason for told in _under_way.get() if told.look_up == look_up}


def served(run: Callable[[], T]) -> T:
    """Return what `run` returns, which decides about a call and runs its plan; anew after each decline.

    Raises:
        UnsupportedInputError: no backend is left that can run it, or none may.
    """
    try:
        return run()
    except DeclinedError as error:
        declined = (*_under_way.get(), error.told)  # and not the error, which holds the tensors of its frames
    while True:
        token = _under_way.set(declined)
        try:
            return run()
        except DeclinedError as error:
            declined = (*declined, error.told)
        finally:
            _under_way.reset(token)
