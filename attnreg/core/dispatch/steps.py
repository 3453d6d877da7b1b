"""Deciding about further steps of lengths where times decide.

All else about a decision is the same for a class of lengths (see `kinds`): which backends can run the calls,
how they rank, what is adapted. So only the times of a further step are looked up. If a step of the class has
made the same choice, its plan serves. Its results were checked, and its fallbacks were logged.
"""

from __future__ import annotations

from collections.abc import Callable

from attnreg.core.contract.lengths import Lengths
from attnreg.core.contract.spec import AttentionSpec, Direction
from attnreg.core.dispatch import counters
from attnreg.core.dispatch.kinds import builders
from attnreg.core.dispatch.state import BY_TIMES, CallKind, Plan, State
from attnreg.core.selection.decision import Ranking
from attnreg.core.selection.protocols import Times
from attnreg.core.torchlib.frames import leave_module_uncompiled


class Steps:
    """How steps of lengths in one class of a kind of calls are decided.

    Args:
        now: the state that the kind belongs to.
        kind: the kind of calls.
        spec, direction: a call of the class.
        ranking: the backends for it.
        times: what predicts the times.
        is_native: whether torch's own kernel runs a call of a spec and a chosen backend.
    """

    __slots__ = ("_building", "_direction", "_is_native", "_kind", "_now", "_ranking", "_spec", "_times")

    def __init__(
        self,
        now: State,
        kind: CallKind,
        spec: AttentionSpec,
        direction: Direction,
        ranking: Ranking,
        times: Times,
        is_native: Callable[[AttentionSpec, str], bool],
    ) -> None:
        self._now, self._kind, self._spec, self._direction = now, kind, spec.of(direction), direction
        self._ranking, self._times, self._is_native = ranking, times, is_native
        # The backends that build something for each shape.
        self._building = builders(now.entries, spec)

    def plan_for(self, lengths: Lengths) -> Plan | None:
        """Return the plan for lengths, which is kept for their step.

        A step with a plan keeps it: the call cache also asks because an entry was dropped, and for other
        strides. As long as each shape counts, it has a plan of its own. None if the lengths have to be
        decided in full. There may be no times, or no backend that may run the call. No step of the class may
        have made the choice yet. Or it is a backend that builds something for each shape.
        """
        kind = self._kind
        kind.leave_shapes(lengths, self._building)
        key = kind.key(lengths)
        if kind.detail_of(key) not in BY_TIMES:
            return None
        if (known := kind.plans.get(key)) is not None:
            return known
        counted_builds = self._building if kind.brings_new_shapes else frozenset[str]()
        spec = self._spec.but(**lengths._asdict())
        prediction = self._times.predict(spec, self._direction, counted_builds)
        if prediction is None:
            return None
        decision = self._ranking.decision(prediction, complete=False)
        if decision.backend is None or decision.backend.casefold() in self._building:
            return None
        counted, _ = counters.for_decision(decision)
        plan = kind.plan_alike(key, decision.backend, counted, self._is_native(spec, decision.backend))
        if plan is not None:
            self._now.keep(plan)
        return plan

    def __call__(self, *lengths: int) -> tuple[counters.Counter, ...] | None:
        """Return the counters of that plan, by which the call cache finds what runs it; else None."""
        plan = self.plan_for(Lengths(*lengths))
        return None if plan is None else plan.counters


leave_module_uncompiled(__name__)
