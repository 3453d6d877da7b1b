"""Calls that a kernel declines, and deciding about them once more.

Some packages know only at the call what they can run: cuDNN when it builds an execution plan. A kernel that
can't run a call, although its backend's limits admit it, *declines* the call: it raises
`UnsupportedInputError` before it has done anything. The call is then decided once more without that backend;
the kernel's message is the reason.

A kernel that can't be loaded, compiled or built raises `BackendUnavailableError`. Its backend is set aside
for further calls like this one as well, and all plans are dropped: plans for other lengths would try it
again. Any other error may come from a kernel that was launched. It is counted, and passes through.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

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


# The backends that have declined a call, and why.
Declined = Mapping[str, str]
NOBODY: Declined = MappingProxyType({})


def retry_on_decline(run: Callable[[Declined], T]) -> T:
    """Return the result of `run`, which decides about a call and runs it; retry after each decline.

    `run` is called with the backends that have declined the call so far.
    """
    declined: Declined = NOBODY
    while True:
        try:
            return run(declined)
        except DeclinedError as error:
            name, reason = error.declined  # not the error: its frames refer to tensors
        except UnsupportedInputError as error:
            # It says all there is to know; forty lines of attnreg's own frames would hide it.
            raise error.with_traceback(None) from error.__cause__
        declined = {**declined, name: reason}


@dataclass(eq=False)
class JudgedEntry(Entry):
    """A backend about whose kernel more is known than its declaration says; it has loaded."""

    judged: tuple[str, ...] = ()

    def reasons(self, spec: AttentionSpec, direction: Direction) -> tuple[str, ...]:
        return self.judged

    def unavailable(self) -> str:
        return ""


def with_reasons(entries: Mapping[str, Entry], declined: Declined) -> Mapping[str, Entry]:
    """Return the backends; a backend that has declined a call has its reason against the call."""
    known = {name: (entries.get(name.casefold()), reason) for name, reason in declined.items()}
    judged = {
        name.casefold(): JudgedEntry(
            entry.name, entry.origin, entry.backend, installed=entry.installed, judged=(reason,)
        )
        for name, (entry, reason) in known.items()
        if entry is not None
    }
    return {**entries, **judged}
