"""The one renderer of decisions: errors, log lines, `explain` and the command line print its text."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from attnreg.errors import UnsupportedInputError

if TYPE_CHECKING:
    from attnreg.selection import Decision
    from attnreg.spec import AttentionSpec

__all__ = ["decision_table", "fallback_line", "refuse"]

ELIGIBLE = "could run it"


def decision_table(spec: AttentionSpec, decision: Decision) -> str:
    """Return a headline, the input line, and one aligned row per backend and reason."""
    return "\n".join((_headline(spec, decision), f"  {spec}", *_rows(decision)))


def fallback_line(backend: str, reason: str, instead: str) -> str:
    """Return the log line of a call that went to another backend than the first in the order."""
    return f"{backend} can't run this call and {instead} does: {reason}"


def refuse(spec: AttentionSpec, decision: Decision) -> NoReturn:
    """Raise the error of a call that no backend can or may run.

    Raises:
        UnsupportedInputError: always; every backend with every reason.
    """
    raise UnsupportedInputError(decision_table(spec, decision), decision.rejected)


def _headline(spec: AttentionSpec, decision: Decision) -> str:
    if decision.backend is not None:
        return f"{decision.direction} on {spec.device}: {decision.backend}, by {decision.source}"
    why = f": {decision.refusal}" if decision.refusal else ""
    return f"no attention backend can run this {decision.direction} on {spec.device}{why}"


def _rows(decision: Decision) -> list[str]:
    width = max(map(len, decision.order), default=0)
    rows = []
    for name in decision.order:
        chosen = f"runs it, by {decision.source}"
        reasons = decision.rejected.get(name) or ((chosen if name == decision.backend else ELIGIBLE),)
        for number, reason in enumerate(reasons):
            label = name if number == 0 else ""
            rows.append(f"  {label:<{width}}  {' '.join(reason.split())}")  # a cause may have several lines
    return rows
