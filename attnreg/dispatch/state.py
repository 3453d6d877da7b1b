"""What decisions are made from, as one value that is replaced whole when any of it changes."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any

from attnreg import _registry
from attnreg.dispatch import trace
from attnreg.errors import AttnregError
from attnreg.selection import policy
from attnreg.selection.decision import Policy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attnreg.contract.discovery import Entry
    from attnreg.dispatch.counters import Counter
    from attnreg.dispatch.scope import Own

__all__ = ["State", "state"]

# Training on ragged batches meets new lengths at every step; past this many the plans start anew.
MOST_PLANS = 4096


class State:
    """The backends, what was asked for, and the plans made from both.

    Attributes:
        generation: the registry's when this was made.
        entries: every known backend by its name in lower case.
        plans: the decisions made so far; they go with the state, so none outlives a change.
        known: what answers dense calls that came before, by a shorter key, and the counters of that.
        express: what packed calls of attnreg's own front came down to, by their arguments.
        backwards: what their backwards came down to, by theirs.
        returns: the same by the tensors that the forwards send them.
        active: whether anything was asked for; if not, torch's own entry points are left alone.
    """

    __slots__ = (
        "_error", "_policy", "active", "backwards", "entries", "express", "generation", "known", "plans",
        "returns",
    )  # fmt: skip

    def __init__(self) -> None:
        self.generation = _registry.generation
        self.entries: Mapping[str, Entry] = _registry.entries()
        self.plans: dict[tuple[object, ...], Any] = {}
        self.known: dict[tuple[object, ...], tuple[Any, tuple[Counter, ...]]] = {}
        self.express: dict[tuple[object, ...], Own] = {}
        self.backwards: dict[tuple[object, ...], Any] = {}
        self.returns: dict[int, Any] = {}
        self.active = policy.is_active()
        self._policy = Policy()
        self._error: AttnregError | None = None
        try:
            self._policy = policy.current()
            trace.follow(policy.sources().environment.record)
        except AttnregError as error:
            self._error = copy(error)

    def keep(self, look_up: tuple[object, ...], plan: Any) -> None:
        """Keep a plan under what its call is looked up by."""
        if len(self.plans) >= MOST_PLANS:
            self.plans.clear()
        self.plans[look_up] = plan

    def remember(self, known_as: tuple[object, ...], answer: Any, counters: tuple[Counter, ...]) -> None:
        """Keep what answers a dense call under its shorter key."""
        if len(self.known) >= MOST_PLANS:
            self.known.clear()
        self.known[known_as] = answer, counters

    def recognise(self, known_as: tuple[object, ...], own: Own) -> None:
        """Keep what a packed call came down to under its arguments."""
        if len(self.express) >= MOST_PLANS:
            self.express.clear()
            self.returns.clear()
        self.express[known_as] = own

    def recognise_backward(self, known_as: tuple[object, ...], express: object) -> None:
        """Keep what the backward of a packed call came down to under its arguments."""
        if len(self.backwards) >= MOST_PLANS:
            self.backwards.clear()
        self.backwards[known_as] = express

    @property
    def policy(self) -> Policy:
        """What was asked for.

        Raises:
            ConfigError: the environment or a settings file can't be read: an error of every call
                that they would have governed, until they are mended and read again.
        """
        if self._error is not None:
            raise copy(self._error)  # what is raised holds the tensors of its frames
        return self._policy


_state: State | None = None


def state() -> State:
    """Return the current state, made anew after a change."""
    global _state
    now = _state
    if now is None or now.generation is not _registry.generation:
        now = _state = State()
    return now
