"""What decisions are made from, as one value that is replaced whole when any of it changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnreg import _registry, policy
from attnreg.errors import AttnregError
from attnreg.selection import Policy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attnreg.discovery import Entry
    from attnreg.planning import Plan

__all__ = ["State", "state"]


class State:
    """The backends, what was asked for, and the plans made from both.

    Attributes:
        generation: the registry's when this was made.
        entries: every known backend by its name in lower case.
        plans: the decisions made so far; they go with the state, so none outlives a change.
        active: whether anything was asked for; if not, torch's own entry points are left alone.
    """

    __slots__ = ("_error", "_policy", "active", "entries", "generation", "plans")

    def __init__(self) -> None:
        self.generation = _registry.generation
        self.entries: Mapping[str, Entry] = _registry.entries()
        self.plans: dict[tuple[object, ...], Plan] = {}
        self.active = policy.is_active()
        self._policy = Policy()
        self._error: AttnregError | None = None
        try:
            self._policy = policy.current()
        except AttnregError as error:
            self._error = error

    @property
    def policy(self) -> Policy:
        """What was asked for.

        Raises:
            ConfigError: the environment or a settings file can't be read: an error of every call
                that they would have governed, until they are mended and read again.
        """
        if self._error is not None:
            raise self._error
        return self._policy


_state: State | None = None


def state() -> State:
    """Return the current state, made anew after a change."""
    global _state
    now = _state
    if now is None or now.generation is not _registry.generation:
        now = _state = State()
    return now
