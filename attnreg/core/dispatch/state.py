"""What decisions are made from, as one value that is replaced whole when any of it changes; and plans."""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from copy import copy
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from attnreg.core import registry
from attnreg.core.contract.backend import Call, Launcher
from attnreg.core.contract.capabilities import one_line
from attnreg.core.contract.lengths import Cut, Lengths, steps_of
from attnreg.core.contract.options import OPTIONS
from attnreg.core.contract.spec import AttentionSpec, Direction
from attnreg.core.dispatch import counters, stats_file, trace
from attnreg.core.dispatch.declined import DeclinedError
from attnreg.core.policy import current as policy
from attnreg.core.policy import ranks
from attnreg.core.registry.entry import Entry
from attnreg.core.selection.decision import Decision, Policy
from attnreg.core.selection.protocols import Turn
from attnreg.core.torchlib.isolation import raise_if_of_program
from attnreg.errors import AttnregError, BackendUnavailableError, RegistrationError, UnsupportedInputError

log = logging.getLogger("attnreg")

# Past this many plans all are dropped: where lengths count exactly, each new one has a plan.
MOST_PLANS = 4096
# So many shapes of a kind are decided exactly before the times of further shapes count what building takes.
FEW_SHAPES = 8


class Plan(NamedTuple):
    """What the look-up of a call returns: which kernel runs it, and what is done with each run.

    Attributes:
        backend: the name of the backend that runs the call.
        kernel: its function; None where the router is to call torch's own kernel of the op.
        is_native: whether torch's own kernel runs.
        counters: what to add to once it has run. The first is the counter of the backend's calls.
        is_checked: whether its results were checked against the contract; if not, `kernel` checks them.
        counts: says whether `kernel` can be given what results are rescaled for (`Option.rescales`); None if
            it can't.
        specialize: the backend's `Kernels.specialize` for this direction; None if it has none.
        kind: the kind of calls that the plan belongs to.
        key: what the plan is kept under: its class of lengths, and what else of the lengths counts there.
        set_aside: the backend's `Entry.set_aside` for this call.
        turn: what times the call, where backends take turns (`policy = "adaptive"`).
    """

    backend: str
    kernel: Any
    is_native: bool
    counters: tuple[counters.Counter, ...]
    is_checked: bool = True
    counts: Callable[[], bool] | None = None
    specialize: Callable[[tuple[Tensor, ...], Call], Launcher | None] | None = None
    kind: CallKind | None = None
    key: tuple[object, ...] = ()
    set_aside: Callable[..., str] | None = None
    turn: Turn | None = None

    def run(self, *inputs: Any) -> Any:
        """Run the kernel and count the call.

        If the kernel declines it, drops the plan, so that calls like it are decided anew.
        """
        try:
            results = self.kernel(*inputs)
        except BaseException as error:
            reason = self.decline_reason(error)
            if reason is None:
                raise
            if self.kind is not None:
                self.kind.details[self.key[:1]] = Detail.EXACT
                self.kind.plans.pop(self.key, None)
            raise DeclinedError(self.backend, reason) from error
        counters.count(self.counters)
        return results

    def decline_reason(self, error: BaseException) -> str | None:
        """Return why an error of the kernel, or of a launcher, declines the call; None if it doesn't.

        Counts it as a failure unless the kernel declines, and sets the backend aside where it says so. Raises
        RegistrationError in the place of one that would end the program, such as SystemExit.
        """
        if not isinstance(error, Exception):
            raise_if_of_program(error)
            got = f"raised {type(error).__name__}: {error}, expected results or an Exception"
            fault = RegistrationError(f"{self.backend} breaks the contract in its {self.direction}: {got}")
            counters.failed(self.counters[0], fault)
            raise fault from error
        if isinstance(error, UnsupportedInputError):
            # The refusal of a call that the kernel itself makes has a table under its headline.
            reason = str(error).partition("\n")[0] if error.rejected else str(error)
            counters.declined(self.counters[0], reason)
            return reason
        if not isinstance(error, BackendUnavailableError):
            counters.failed(self.counters[0], error)
            return None
        # The next plan's decision logs the reason, and what runs instead.
        counters.failed(self.counters[0], error, logging.DEBUG)
        reason = one_line([f"{ranks.place()}{error}"])
        if self.set_aside is not None:
            reason = self.set_aside(reason)
            registry.changed()
        return reason

    def count_bad_launcher(self, error: BaseException) -> None:
        """Count an error of `specialize`, or of what it has returned; the call itself has run.

        Raises an error again that was the program's.
        """
        raise_if_of_program(error)
        fault = f"{self.backend} offers no launcher: {type(error).__name__}: {error}"
        counters.failed(self.counters[0], RegistrationError(fault))

    @property
    def direction(self) -> Direction:
        """The direction that its kernel runs."""
        return self.counters[0].call[1] if self.counters[0].call else "forward"

    def decline_reason_of_counting(self, error: BaseException) -> str | None:
        """Do what `decline_reason` does for a kernel that was to count options: it goes on without them.

        Results are rescaled for the options then.
        """
        if not isinstance(error, (UnsupportedInputError, BackendUnavailableError)):
            return self.decline_reason(error)
        names = ", ".join(row.label for row in OPTIONS if row.rescales)
        log.info("%s doesn't count %s, its results are rescaled: %s", self.backend, names, error)
        if isinstance(error, BackendUnavailableError) and self.set_aside is not None:
            counters.failed(self.counters[0], error, logging.DEBUG)
            self.set_aside(one_line([str(error)]), counting=True)
            registry.changed()
        else:
            state().keep_without_counting(self)
        return str(error)


class Detail(enum.IntEnum):
    """How much of the lengths of a class a decision depends on: nothing, their size, or all.

    `SHAPES` is all, because times chose a backend that builds something for each shape, or may do so for
    other lengths.
    """

    CLASS = 0
    STEPS = 1
    EXACT = 2
    SHAPES = 3


# Where times decide about further lengths.
BY_TIMES = (Detail.STEPS, Detail.SHAPES)


class FurtherSteps(Protocol):
    """What decides about further steps of a class of lengths, or about further shapes: `steps.Steps`."""

    def plan_for(self, lengths: Lengths) -> Plan | None:
        """Return the plan for lengths in such a step; None if it has to be decided in full."""

    def __call__(self, *lengths: int) -> tuple[counters.Counter, ...] | None:
        """Return that plan's counters."""


class CallKind:
    """One kind of calls: its classes of lengths, and the plans made so far.

    Attributes:
        cuts: where decisions about this kind change with lengths.
        plans: by class of lengths, followed by what else of the lengths counts in that class.
        details: what counts in a class, where that isn't the class alone: steps where measured times decide,
            which change smoothly with lengths, and the lengths themselves where no cut says what counts.
        shapes: the keys of shapes that have a plan of their own, in classes of which each shape counts, and
            of shapes for which a backend has built something while backends take turns. A program that
            brings more than `FEW_SHAPES` is likely to bring ever new shapes.
        brings_new_shapes: whether more have come. What a backend builds for a shape counts in full then.
        steps: by class of lengths, what decides about further steps, for as long as steps count there.
        looks_at_lengths: by class of lengths and number of loaded backends, whether decisions by times look
            at a length that no cut names.
    """

    __slots__ = ("brings_new_shapes", "cuts", "details", "looks_at_lengths", "plans", "shapes", "steps")

    def __init__(self, cuts: Iterable[Cut] = ()) -> None:
        self.cuts = tuple(dict.fromkeys(cuts))
        self.plans: dict[tuple[object, ...], Plan] = {}
        self.details: dict[tuple[object, ...], Detail] = {}
        self.shapes, self.brings_new_shapes = set[tuple[object, ...]](), False
        self.steps: dict[tuple[object, ...], FurtherSteps] = {}
        self.looks_at_lengths: dict[tuple[tuple[object, ...], int], bool] = {}

    def key(self, lengths: Lengths) -> tuple[object, ...]:
        """Return what the plan of a call of this kind is kept under."""
        place = (tuple([cut.is_reached(lengths) for cut in self.cuts]),)
        detail = self.details.get(place) if self.details else None
        return place if detail is None else _detailed(place, detail, lengths)

    def detail_of(self, key: tuple[object, ...]) -> Detail:
        """Return what counts in the class of a plan's key; it may have been more when the key was made."""
        before = key[1] if len(key) > 1 and isinstance(key[1], Detail) else Detail.CLASS
        return max(self.details.get(key[:1], Detail.CLASS), before)

    def refine(self, key: tuple[object, ...], detail: Detail, lengths: Lengths) -> tuple[object, ...]:
        """Have more of the lengths count in a key's class, unless it does; return the key of the lengths.

        Another thread may forget the details meanwhile. The key has as much as was asked for all the same: a
        plan made for these lengths must not be kept for the whole class.
        """
        detail = max(detail, self.detail_of(key))
        if detail is Detail.CLASS:
            return key[:1]
        self.details[key[:1]] = detail
        return _detailed(key[:1], detail, lengths)

    def key_of_shape(self, lengths: Lengths) -> tuple[object, ...]:
        """Return the key of the plan of a shape, in a class of which each shape counts."""
        return _detailed(self.key(lengths)[:1], Detail.SHAPES, lengths)

    def note_shape(self, key: tuple[object, ...]) -> None:
        """Count a shape by its key; past `FEW_SHAPES` none, so that the set stays small in a long program."""
        if len(self.shapes) < FEW_SHAPES:
            self.shapes.add(key)

    def leave_shapes(self, lengths: Lengths, builders: Collection[str]) -> bool:
        """Count shapes no more if another one has come after `FEW_SHAPES`; return whether that was now.

        If `builders` run none, and times alone decide, each plan serves its step of lengths: the cost of
        building only makes the builders dearer. Else plans are forgotten.
        """
        if self.brings_new_shapes or len(self.shapes) < FEW_SHAPES:
            return False
        if self.key_of_shape(lengths) in self.shapes:
            return False
        self.brings_new_shapes = True
        plans = list(self.plans.values())
        self.forget()
        if builders and any(plan.backend.casefold() in builders for plan in plans):
            return True
        for plan in plans:
            place, detail, of_shape = plan.key[:1], plan.key[1:2], plan.key[2:]
            if detail == (Detail.SHAPES,) and place in self.steps:
                key = self.refine(place, Detail.STEPS, Lengths(*of_shape[0]))  # type: ignore[misc]
                self.plans.setdefault(key, plan._replace(key=key))
        return True

    def forget(self) -> None:
        """Forget all plans, and what counts in each class."""
        self.plans, self.details = {}, {}
        registry.forget_calls()

    def steps_of(self, key: tuple[object, ...]) -> FurtherSteps | None:
        """Return what decides about further steps, or shapes, of a key's class; None unless these count."""
        return self.steps.get(key[:1]) if self.detail_of(key) in BY_TIMES else None

    def plan_alike(
        self, key: tuple[object, ...], backend: str, counted: tuple[counters.Counter, ...], is_native: bool
    ) -> Plan | None:
        """Return a plan of a key's class with such a choice, under the key; None if there is none.

        See `steps`: what it has of the calls holds for all steps of the class.
        """
        for plan in list(self.plans.values()):
            choice = plan.backend, plan.counters, plan.is_native
            if plan.key[:2] == key[:2] and choice == (backend, counted, is_native):
                return plan._replace(key=key)
        return None


def _detailed(place: tuple[object, ...], detail: Detail, lengths: Lengths) -> tuple[object, ...]:
    """Return the key of a plan for lengths, or for a step of lengths, in a class."""
    return (*place, detail, steps_of(lengths) if detail is Detail.STEPS else lengths)


class State:
    """The backends, what was asked for, and the plans made from both.

    Attributes:
        generation: the registry's when this was made.
        entries: every known backend by its name in lower case.
        kinds: the kinds of calls so far, with their plans; they go with the state, so none outlives a change.
            Kinds that were decided about without a plan are among them.
        declined: by direction and spec which backends have declined such calls, and why.
        decided: what was decided without a plan, by the key of a kind and the key of its lengths.
        active: whether anything was asked for; if not, torch's own kernels run.
        batch_invariant: whether the policy of that name is in force.
    """

    __slots__ = (
        "_error", "_plans", "_policy", "active", "batch_invariant", "decided", "declined", "entries",
        "generation", "kinds",
    )  # fmt: skip

    def __init__(self) -> None:
        policy.is_active()  # reading the settings makes kernels from the hub known, which is a change
        self.generation = registry.generation
        self.entries: Mapping[str, Entry] = registry.entries()
        self.kinds: dict[tuple[object, ...], CallKind] = {}
        self._plans = 0
        self.declined: dict[tuple[Direction, AttentionSpec], dict[str, str]] = {}
        self.decided: dict[tuple[object, ...], tuple[Decision, ...]] = {}
        self.active = policy.is_active()
        self._policy = Policy()
        self._error: AttnregError | None = None
        try:
            self._policy = policy.current()
            trace.follow(policy.sources().environment.record)
            variables = policy.sources().environment
            stats_file.follow(variables.stats, variables.report)
        except AttnregError as error:
            self._error = copy(error)
        self.batch_invariant = self._policy.batch_invariant

    def plans(self) -> list[Plan]:
        """Return all plans."""
        return [plan for kind in list(self.kinds.values()) for plan in list(kind.plans.values())]

    def keep(self, plan: Plan) -> None:
        """Keep a plan under its key."""
        if plan.kind is None:
            return
        self._plans += 1
        if self._plans > MOST_PLANS:
            self._plans = 1
            for kind in list(self.kinds.values()):
                kind.plans = {}
        kind = plan.kind
        # Neither a turn, nor a call in a capture, nor a first call that fails comes here.
        if kind.detail_of(plan.key) is Detail.SHAPES:
            kind.note_shape(plan.key)
        kind.plans[plan.key] = plan

    def keep_kind(self, key: tuple[object, ...], kind: CallKind) -> CallKind:
        """Keep a kind of calls, unless another thread has; return the kept one."""
        if len(self.kinds) >= MOST_PLANS:
            self.kinds.clear()
        return self.kinds.setdefault(key, kind)

    def keep_decided(
        self, kind: tuple[object, ...], key: tuple[object, ...], decisions: tuple[Decision, ...]
    ) -> None:
        """Keep what was decided about lengths of a kind, whose key is `kind`, without a plan."""
        if len(self.decided) >= MOST_PLANS:
            self.decided.clear()
        self.decided[kind, key] = decisions

    def may_load(self, decision: Decision) -> bool:
        """Whether the backend of a decision, if it has one, hasn't turned out not to load since."""
        entry = self.entries.get((decision.backend or "").casefold())
        return entry is None or not entry.unavailable()

    def keep_without_counting(self, plan: Plan) -> None:
        """Have results rescaled for all that the kernel of a plan counted, if the plan is still kept."""
        kept = None if plan.kind is None else plan.kind.plans.get(plan.key)
        if plan.kind is not None and kept is not None and kept.kernel is plan.kernel:
            plan.kind.plans[plan.key] = kept._replace(counts=None)

    def keep_declined(self, direction: Direction, spec: AttentionSpec, declined: Mapping[str, str]) -> None:
        """Keep which backends have declined a call, for `explain`."""
        if len(self.declined) >= MOST_PLANS:
            self.declined.clear()
        self.declined[direction, spec.of(direction)] = dict(declined)

    @property
    def policy(self) -> Policy:
        """What was asked for.

        What can't be read is an error of every call that it would have had a say in, until it is mended and
        read again.
        """
        if self._error is not None:
            raise copy(self._error)  # what is raised keeps the tensors of its frames alive
        return self._policy


_state: State | None = None


def state() -> State:
    """Return the current state, made anew after a change."""
    global _state
    now = _state
    if now is None or now.generation is not registry.generation:
        now = _state = State()
    return now
