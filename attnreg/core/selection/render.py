"""The one renderer of decisions and reasons, for errors, log lines, `explain` and the command line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NoReturn

from attnreg.core.contract.capabilities import one_line
from attnreg.core.contract.options import OPTIONS
from attnreg.core.contract.spec import AttentionSpec, Direction
from attnreg.core.registry.entry import Entry
from attnreg.core.selection.decision import Decision
from attnreg.errors import UnsupportedInputError

__all__ = ["decision_table", "fallback_line", "headline", "one_line", "option_lines", "refuse"]

ELIGIBLE = "could run it"


def decision_table(spec: AttentionSpec, decision: Decision, called: Direction | None = None) -> str:
    """Return a headline, the input line, and one aligned row per backend and reason."""
    lines = headline(spec, decision, called), f"  {spec.of(decision.direction)}", *_rows(decision)
    return "\n".join(lines)


def fallback_line(backend: str, reason: str, instead: str) -> str:
    """Return the log line of a call that a later backend in the order runs."""
    return f"{backend} can't run this call, {instead} runs it: {reason}"


def option_lines(spec: AttentionSpec, decision: Decision, entries: Mapping[str, Entry]) -> Iterator[str]:
    """Yield how a direction that a backend runs has options that its kernel may not know of."""
    direction, name = decision.direction, decision.backend
    if name is None:
        return
    entry = entries.get(name.casefold())
    for adaptation, before in () if entry is None else entry.adaptations(spec, direction):
        yield f"{direction} on {name}: {adaptation.described(before)}"
    for row in (row for row in OPTIONS if row.rescales and row.is_on_in(spec)):
        how = f"results are rescaled for the {row.label}"
        if entry is not None and entry.counts_sinks(spec, direction):
            how = f"{row.label} counted by the kernel, where every row is known to see a key"
            how += " and the program doesn't get the LSE" if direction == "forward" else ""
        yield f"{direction} on {name}: {how}"


def refuse(spec: AttentionSpec, decision: Decision, called: Direction | None = None) -> NoReturn:
    """Raise the error of a call that no backend can or may run: every backend with every reason.

    `called` is the direction that the program calls: of a forward the backward may be decided first.
    """
    raise UnsupportedInputError(decision_table(spec, decision, called), decision.rejected)


def headline(spec: AttentionSpec, decision: Decision, called: Direction | None = None) -> str:
    """Return who runs a direction on which device, and who decided; or that none can, and why.

    `called` is as for `refuse`.
    """
    if decision.backend is not None:
        return f"{decision.direction} on {spec.device}: {decision.backend}, by {decision.source}"
    why = f": {decision.refusal}" if decision.refusal else ""
    if called not in (None, decision.direction):
        why = f", because none can run its {decision.direction}{why}"
    return f"no attention backend can run this {called or decision.direction} on {spec.device}{why}"


def _rows(decision: Decision) -> list[str]:
    width = max(map(len, decision.order), default=0)
    rows = []
    for name in decision.order:
        able = f"runs it, by {decision.source}" if name == decision.backend else ELIGIBLE
        candidate = decision.predicted.of(name) if decision.predicted is not None else None
        if candidate is not None and candidate.trouble:
            able += f", but {candidate.trouble}"
        reasons = decision.rejected.get(name) or (able,)
        for number, reason in enumerate(reasons):
            label = name if number == 0 else ""
            rows.append(f"  {label:<{width}}  {one_line([reason])}")
    return rows
