"""Calls that a kernel declines, and deciding about them once more.

What some packages can run only they know, and only at the call: cuDNN when it builds an execution plan. A
kernel that finds out that it can't run a call which its backend's limits admit *declines* it: it raises
`UnsupportedInputError` before it has done anything. The call is then decided once more without that backend,
whose reason is what the kernel said. A kernel that can't be loaded, compiled or built raises
`BackendUnavailableError` likewise, and its backend is set aside for further calls like this one as well: all
plans are dropped, as those for other lengths would try it again. Any other error may come from a kernel that
was launched: it is counted, and passes through.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import TypeVar

from attnreg.core.contract.backend import Backend
from attnreg.core.contract.spec import AttentionSpec, Direction
from attnreg.core.registry.entry import Entry
from attnreg.errors import UnsupportedInputError

T = TypeVar("T")


class DeclinedError(UnsupportedInputError):
    """A kernel has declined a call.

    Attributes:
        declined: whose kernel it was, and why it can't run the call.
    """

    def __init__(self, backend: str, reason: str) -> None:
        super().__init__(reason)
        self.declined = backend, reason


_declined: ContextVar[tuple[tuple[str, str], ...]] = ContextVar("attnreg_declined", default=())


def declined() -> dict[str, str]:
    """Return which backends have declined the call that is being decided, and why."""
    return dict(_declined.get())


def retry_on_decline(run: Callable[[], T]) -> T:
    """Return what `run` returns, which decides about a call and runs it; once more after each decline."""
    if not _declined.get():
        return _retried(run)
    token = _declined.set(())  # a call that is made inside of another's retry
    try:
        return _retried(run)
    finally:
        _declined.reset(token)


def _retried(run: Callable[[], T]) -> T:
    try:
        return run()
    except DeclinedError as error:
        declined: tuple[tuple[str, str], ...] = (
            error.declined,
        )  # not the error: its frames refer to tensors
    while True:
        token = _declined.set(declined)
        try:
            return run()
        except DeclinedError as error:
            declined = (*declined, error.declined)
        finally:
            _declined.reset(token)


class JudgedEntry(Entry):
    """A backend about whose kernel more is known than its declaration says; it has loaded."""

    def __init__(
        self, name: str, origin: str, backend: Backend | None = None, reasons: tuple[str, ...] = ()
    ) -> None:
        super().__init__(name, origin, backend)
        self._reasons = reasons

    def reasons(self, spec: AttentionSpec, direction: Direction) -> tuple[str, ...]:
        return self._reasons

    def unavailable(self) -> str:
        return ""


def with_reasons(entries: Mapping[str, Entry], declined: Mapping[str, str]) -> Mapping[str, Entry]:
    """Return the backends, with the reasons of those that have declined a call against them."""
    known = {name: (entries.get(name.casefold()), reason) for name, reason in declined.items()}
    judged = {
        name.casefold(): JudgedEntry(entry.name, entry.origin, entry.backend, (reason,))
        for name, (entry, reason) in known.items()
        if entry is not None
    }
    return {**entries, **judged}
