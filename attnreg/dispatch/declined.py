"""Declined calls: a kernel finds out that it can't run a call which its backend's limits admit.

What some packages can run only they know, and only at the call: cuDNN when it builds a plan. Such a kernel
raises `UnsupportedInputError` before it has done anything. The call is then decided once more without that
backend, whose reason is what the kernel said.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from attnreg.errors import UnsupportedInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

T = TypeVar("T")


class Declined(NamedTuple):
    """One decline.

    Attributes:
        key: what the call's plan is kept under.
        backend: whose kernel it was.
        reason: why the kernel can't run the call.
    """

    key: tuple[object, ...]
    backend: str
    reason: str


class DeclinedError(UnsupportedInputError):
    """A kernel has declined a call."""

    def __init__(self, declined: Declined) -> None:
        super().__init__(declined.reason)
        self.declined = declined


_so_far: ContextVar[tuple[Declined, ...]] = ContextVar("attnreg_declined", default=())


def reasons(key: tuple[object, ...]) -> Mapping[str, str]:
    """Return which backends have declined the call that is being decided, and why."""
    return {one.backend: one.reason for one in _so_far.get() if one.key == key}


def retry_on_decline(run: Callable[[], T]) -> T:
    """Return what `run` returns, which decides about a call and runs its plan; once more after each decline.

    Raises:
        UnsupportedInputError: no backend is left that can run the call, or none may.
    """
    try:
        return run()
    except DeclinedError as error:
        declined = (*_so_far.get(), error.declined)  # not the error, which holds the tensors of its frames
    while True:
        token = _so_far.set(declined)
        try:
            return run()
        except DeclinedError as error:
            declined = (*declined, error.declined)
        finally:
            _so_far.reset(token)
