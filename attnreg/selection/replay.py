"""Deciding by a lock: what it says leads, and whatever would have another backend run is an error."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from attnreg.errors import UnsupportedInputError
from attnreg.selection.decision import Decision, Policy, Preference, select

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attnreg.contract.discovery import Entry
    from attnreg.contract.spec import AttentionSpec, Direction
    from attnreg.selection.lockfile import Lock

__all__ = ["replayed"]


def replayed(
    lock: Lock,
    spec: AttentionSpec,
    direction: Direction,
    entries: Mapping[str, Entry],
    policy: Policy,
    native: str = "",
) -> Decision:
    """Return the decision that a lock has for one direction of a call.

    Raises:
        UnsupportedInputError: the lock has none, it was made where something was different, its backend
            can't run the call, or somebody asks for another.
    """
    row, name = lock.expected(spec, direction)
    told = row.says(name)
    # Without what a table predicts: a table asks for nothing.
    asked = select(spec, direction, entries, policy, native)
    if asked.refusal:
        return asked
    if asked.source in {preference.source for preference in policy.preferences}:
        if not _same(asked.backend, row.backend):
            if reasons := asked.rejected.get(row.backend):
                raise _cant_run(told, reasons, spec, asked)
            raise UnsupportedInputError(
                f"{told}, but {asked.source} would have {asked.backend} run it: {spec}"
            )
        return replace(asked, source=name)
    led = policy.led_by(Preference(name, (row.backend,), required=False))
    decision = select(spec, direction, entries, led, native)
    if not _same(decision.backend, row.backend):
        reasons = decision.rejected.get(row.backend, ("no backend of that name is known here",))
        raise _cant_run(told, reasons, spec, decision)
    return decision


def _cant_run(
    told: str, reasons: tuple[str, ...], spec: AttentionSpec, decision: Decision
) -> UnsupportedInputError:
    return UnsupportedInputError(
        f"{told}, which can't run it here ({'; '.join(reasons)}): {spec}", decision.rejected
    )


def _same(backend: str | None, locked: str) -> bool:
    return backend is not None and backend.casefold() == locked.casefold()
