"""What decisions are made from, as one value that is replaced whole when any of it changes."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

from attnreg import _registry
from attnreg.dispatch import counters, trace
from attnreg.dispatch.declined import Declined, DeclinedError
from attnreg.errors import AttnregError, UnsupportedInputError
from attnreg.selection import policy
from attnreg.selection.decision import Policy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from attnreg.contract.backend import Call
    from attnreg.contract.discovery import Entry
    from attnreg.contract.launchers import Launcher

# Training on ragged batches has new lengths at every step; past this many plans all are dropped.
MOST_PLANS = 4096


class Plan(NamedTuple):
    """What a decision comes down to.

    Attributes:
        backend: the name of the backend that runs the call.
        kernel: its function.
        is_native: whether that is torch's own kernel of the op; then the router calls that, and not `kernel`.
        counters: what to add to once it has run.
        is_checked: whether its results were checked against the contract; if not, `kernel` checks them.
        specialize: the backend's `Kernels.specialize` for this direction; None if it has none.
        key: what the plan is kept under.
    """

    backend: str
    kernel: Callable[..., Any]
    is_native: bool
    counters: tuple[counters.Counter, ...]
    is_checked: bool = True
    specialize: Callable[[tuple[Tensor, ...], Call], Launcher | None] | None = None
    key: tuple[object, ...] = ()

    def run(self, *inputs: Any) -> Any:
        """Run the kernel and count the call.

        Raises:
            DeclinedError: the kernel can't run this call. The plan is dropped, so that calls like it are
                decided anew.
        """
        try:
            results = self.kernel(*inputs)
        except UnsupportedInputError as error:
            state().plans.pop(self.key, None)
            # The refusal of a call that the kernel itself makes has a table under its headline.
            reason = str(error).partition("\n")[0] if error.rejected else str(error)
            raise DeclinedError(Declined(self.key, self.backend, reason)) from error
        counters.count(self.counters)
        return results


class State:
    """The backends, what was asked for, and the plans made from both.

    Attributes:
        generation: the registry's when this was made.
        entries: every known backend by its name in lower case.
        plans: the plans made so far; they go with the state, so none outlives a change.
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
            trace.follow(policy.sources().environment.record)
        except AttnregError as error:
            self._error = copy(error)

    def keep(self, plan: Plan) -> None:
        """Keep a plan under its key."""
        if len(self.plans) >= MOST_PLANS:
            self.plans.clear()
        self.plans[plan.key] = plan

    @property
    def policy(self) -> Policy:
        """What was asked for.

        Raises:
            ConfigError: the environment or a settings file can't be read: an error of every call that it
                would have had a say in, until it is mended and read again.
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
