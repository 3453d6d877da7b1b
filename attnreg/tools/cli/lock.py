"""`attnreg lock`: which backend runs each recorded call, as a file that ATTNREG_LOCK enforces."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnreg.errors import BackendUnavailableError, InvalidInputError
from attnreg.tools.cli.options import TRACE, AsJson, check_writable, present_device, valued
from attnreg.tools.cli.output import FAILED, counted, import_torch, print_json, stdout_to_stderr, table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attnreg.core.contract.spec import AttentionSpec, Device, Direction
    from attnreg.core.policy.lockfile import Lockfile
    from attnreg.core.selection.decision import Decision, Policy
    from attnreg.core.times.traces import Recorded

    # Calls that no backend can run, with the decision: a lockfile has no row for them.
    Refused = list[tuple[AttentionSpec, Decision]]

Trace = Annotated[Path, TRACE]
Out = Annotated[Path, valued("--out", "FILE", "The lockfile to write.")]
Where = Annotated[str, valued("--device", "DEVICE", "cpu, cuda or cuda:1. Default: that of the calls.")]


def lock(trace: Trace, out: Out, device: Where = "", as_json: AsJson = False) -> None:
    """Write a lockfile: which backend runs each recorded call.

    With ATTNREG_LOCK=FILE a program runs each call on the backend of the lockfile, or fails and says
    what differs. An ATTNREG_LOCK that is set already has no influence on the new file.

    Example: attnreg lock --from calls.jsonl --out lock.json
    """
    from attnreg.core.policy.lockfile import VARIABLE

    in_force = os.environ.pop(VARIABLE, None)  # may be unreadable: perhaps it is the file to be written
    try:
        import_torch()
        with stdout_to_stderr():
            file, refused = _lock(trace, out, device)
    finally:
        if in_force is not None:
            os.environ[VARIABLE] = in_force
    if as_json:
        rows = [row.to_dict() for row in file.rows]
        left = [
            {
                "call": str(spec),
                "direction": decision.direction,
                "reasons": decision.rejected,
                "why": decision.refusal,
            }
            for spec, decision in refused
        ]
        print_json({"out": str(file.path), "device": file.device, "rows": rows, "refused": left})
    else:
        _print(file, refused)
    if refused:
        raise typer.Exit(FAILED)


def _lock(trace: Path, out: Path, device: str) -> tuple[Lockfile, Refused]:
    """Decide which backend runs each call of a trace, and write the lockfile."""
    from attnreg.core import registry
    from attnreg.core.dispatch.state import state
    from attnreg.core.policy.lockfile import FORMAT, Lockfile, LockfileRow
    from attnreg.core.times import traces
    from attnreg.core.times.environments import environment

    check_writable("--out", out, FORMAT)
    if out.exists() and trace.exists() and out.samefile(trace):
        raise InvalidInputError(f"--out: got {out}, expected another file than that of --from")
    recorded = traces.read(trace)
    place = _device(trace, recorded, device)
    policy = replace(state().policy, lock=None)
    if policy.batch_invariant and any(
        call.spec.varlen and not call.spec.batch_invariant for call in recorded
    ):
        # Without the policy a packed call's window is simplified by the lengths of its batch.
        raise InvalidInputError(
            f'--from: got {trace}, recorded without policy = "batch_invariant", expected one recorded with '
            "it, as packed calls have other windows then: set ATTNREG_POLICY=batch_invariant for both"
        )
    rows: dict[tuple[AttentionSpec, Direction], LockfileRow] = {}
    refused = []
    # Any backend may run empty calls. A row may stand for all batches: then calls that aren't empty decide.
    for call in sorted(recorded, key=lambda call: call.spec.empty):
        spec = policy.applied_to(replace(call.spec, device=place))
        for decision in _decisions(spec, call, policy):
            if decision.backend is None:
                refused.append((spec, decision))
            else:
                held = spec.of_any_batch() if spec.batch_invariant else spec
                row = LockfileRow(held, decision.direction, decision.backend, decision.source)
                rows.setdefault((held, decision.direction), row)
    locked = tuple(rows.values())
    file = Lockfile(out.absolute(), place.type, environment(place, registry.entries()), locked)
    file.save()
    return file, refused


def _device(trace: Path, recorded: list[Recorded], named: str) -> Device:
    """Return the device of the lockfile: the one that is named, else the one of all calls."""
    from attnreg.core.dispatch import planning

    types = sorted({call.spec.device.type for call in recorded})
    if not types:
        raise InvalidInputError(f"--from: got {trace}, expected a file with at least one recorded call")
    if named:
        return planning.device_of(present_device(named))
    if len(types) > 1:
        raise InvalidInputError(
            f"--from: got calls on {' and '.join(types)}, expected --device as well: "
            "a lockfile is for one device"
        )
    return planning.device_of(present_device(types[0], "--from"))


def _decisions(spec: AttentionSpec, call: Recorded, policy: Policy) -> Iterator[Decision]:
    from attnreg.core.selection.decision import tied_to

    forward = _decided(spec, "forward", policy)
    yield forward
    if spec.needs_backward or call.backward:
        if spec.dropout > 0.0 and forward.backend is not None:
            # Only the backend of the forward can draw the same dropout mask again.
            policy = policy.with_first(tied_to(forward.backend))
        yield _decided(spec, "backward", policy)


def _decided(spec: AttentionSpec, direction: Direction, policy: Policy) -> Decision:
    """Return a decision for a backend that really loads."""
    from attnreg.core.dispatch import planning
    from attnreg.core.dispatch.state import state

    while True:
        entries = state().entries
        decision = planning.decide(spec, direction, entries, policy)
        if decision.backend is None:
            return decision
        try:
            entries[decision.backend.casefold()].kernel(direction)
        except BackendUnavailableError:
            continue  # the failure is kept: the next decision rejects this backend
        return decision


def _print(file: Lockfile, refused: Refused) -> None:
    counts = Counter((row.backend, row.direction, row.source) for row in file.rows)
    rows = ((backend, direction, str(n), source) for (backend, direction, source), n in counts.items())
    table("Locked", rows, ("backend", "direction", "calls", "decided by"))
    if refused:
        calls = ((decision.direction, str(spec)) for spec, decision in refused)
        table("No backend can run", calls, ("direction", "call"))
    table("Summary", [("lockfile", f"{file.path}, {counted(len(file.rows), 'row')}")])
