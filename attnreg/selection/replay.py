"""Deciding by a lockfile: its backend runs the call; whatever would choose another one is an error."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from attnreg.contract.capabilities import one_line
from attnreg.errors import UnsupportedInputError
from attnreg.selection.decision import Decision, Policy, Preference, select

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attnreg.contract.discovery import Entry
    from attnreg.contract.spec import AttentionSpec, Direction
    from attnreg.selection.lockfile import Lock


def replayed(
    lock: Lock,
    spec: AttentionSpec,
    direction: Direction,
    entries: Mapping[str, Entry],
    policy: Policy,
    native: str = "",
) -> Decision:
    """Return the locked decision for one direction of a call.

    Raises:
        UnsupportedInputError: the lock has no row for it, or was made in another environment; its backend
            can't run the call; or a preference would have another backend run it.
    """
    row, name = lock.expected(spec, direction)
    beginning = row.beginning(name)
    # Without a prediction: a table isn't a preference, so it can't contradict the lock.
    selected = select(spec, direction, entries, policy, native)
    if selected.refusal:
        return selected
    if selected.source in {preference.source for preference in policy.preferences}:
        if not _same(selected.backend, row.backend):
            if reasons := selected.rejected.get(row.backend):
                raise _cant_run(beginning, reasons, spec, selected)
            raise UnsupportedInputError(
                f"{beginning}, but {selected.source} would have {selected.backend} run it: {spec}"
            )
        return replace(selected, source=name)
    locked = policy.with_first(Preference(name, (row.backend,), required=False))
    decision = select(spec, direction, entries, locked, native)
    if not _same(decision.backend, row.backend):
        reasons = decision.rejected.get(row.backend, ("no backend of that name is known here",))
        raise _cant_run(beginning, reasons, spec, decision)
    return decision


def _cant_run(
    beginning: str, reasons: tuple[str, ...], spec: AttentionSpec, decision: Decision
) -> UnsupportedInputError:
    return UnsupportedInputError(
        f"{beginning}, which can't run it here ({one_line(reasons)}): {spec}", decision.rejected
    )


def _same(backend: str | None, locked: str) -> bool:
    return backend is not None and backend.casefold() == locked.casefold()
