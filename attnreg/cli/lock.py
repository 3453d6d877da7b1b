"""`attnreg lock`: which backend runs each recorded call, as a file that ATTNREG_LOCK enforces."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from attnreg.cli.errors import FAILED, import_torch
from attnreg.cli.options import AsJson, present_device
from attnreg.cli.output import console, counted, heading, print_json, stdout_to_stderr, table
from attnreg.errors import BackendUnavailableError, ConfigError, InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from attnreg.contract.spec import AttentionSpec, Device, Direction
    from attnreg.selection.decision import Decision, Policy
    from attnreg.selection.lockfile import Lockfile
    from attnreg.tuning.traces import Recorded

Trace = Annotated[
    Path, typer.Option("--from", metavar="FILE", help="Calls recorded by attnreg.record or ATTNREG_RECORD.")
]
Out = Annotated[Path, typer.Option("--out", metavar="FILE", help="The lockfile to write.")]
Where = Annotated[
    str,
    typer.Option("--device", metavar="DEVICE", help="cpu, cuda or cuda:1. Default: that of the calls."),
]


def lock(trace: Trace, out: Out, device: Where = "", as_json: AsJson = False) -> None:
    """Write a lockfile: which backend runs each recorded call.

    With ATTNREG_LOCK=FILE a program runs each call on the backend of the lockfile, or fails and says
    what differs. An ATTNREG_LOCK that is set already has no influence on the new file.

    Example: attnreg lock --from calls.jsonl --out lock.json
    """
    from attnreg.selection.lockfile import VARIABLE

    in_force = os.environ.pop(VARIABLE, None)  # may be unreadable: perhaps it is the file to be written
    try:
        import_torch()
        with stdout_to_stderr():
            result = _lock(trace, out, device)
    finally:
        if in_force is not None:
            os.environ[VARIABLE] = in_force
    if as_json:
        print_json(result.to_dict())
    else:
        _print(console(), result)
    if result.refused:
        raise typer.Exit(FAILED)


class Result(NamedTuple):
    """What was locked.

    Attributes:
        file: the lockfile, as it was written.
        refused: calls that no backend can run, with the decision; the file has no row for them.
    """

    file: Lockfile
    refused: tuple[tuple[AttentionSpec, Decision], ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the same as plain data."""
        return {
            "out": str(self.file.path),
            "device": self.file.device,
            "rows": [row.to_dict() for row in self.file.rows],
            "refused": [
                {"call": str(spec), "direction": one.direction, "reasons": one.rejected, "why": one.refusal}
                for spec, one in self.refused
            ],
        }


def _lock(trace: Path, out: Path, device: str) -> Result:
    """Decide which backend runs each call of a trace, and write the lockfile."""
    from attnreg import _registry
    from attnreg.dispatch.state import state
    from attnreg.selection.lockfile import FORMAT, Lockfile, Row
    from attnreg.tuning import traces
    from attnreg.tuning.machine import environment
    from attnreg.tuning.table import check_writable

    try:
        check_writable(out, FORMAT)
    except ConfigError as error:
        raise ConfigError(f"--out: {error}") from None
    if out.exists() and trace.exists() and out.samefile(trace):
        raise InvalidInputError(f"--out: got {out}, expected another file than that of --from")
    recorded = traces.read(trace)
    place = _device(trace, recorded, device)
    policy = replace(state().policy, lock=None)
    rows: dict[Row, None] = {}
    refused = []
    for one in recorded:
        spec = replace(one.spec, device=place)
        for decision in _decisions(spec, one, policy):
            if decision.backend is None:
                refused.append((spec, decision))
            else:
                rows[Row(spec, decision.direction, decision.backend, decision.source)] = None
    here = environment(place, _registry.entries())
    file = Lockfile(out.absolute(), place.type, here, tuple(rows))
    file.save()
    return Result(file, tuple(refused))


def _device(trace: Path, recorded: list[Recorded], named: str) -> Device:
    """Return the device of the lockfile: the one that is named, else the one of all calls."""
    from attnreg.dispatch import planning

    types = sorted({one.spec.device.type for one in recorded})
    if not types:
        raise InvalidInputError(f"--from: got {trace}, expected a file with at least one recorded call")
    if not named and len(types) > 1:
        raise InvalidInputError(
            f"--from: got calls on {' and '.join(types)}, expected --device as well: "
            "a lockfile is for one device"
        )
    return planning.device_of(present_device("--device" if named else "--from", named or types[0]))


def _decisions(spec: AttentionSpec, one: Recorded, policy: Policy) -> Iterator[Decision]:
    """Yield the decision for each direction of a call."""
    from attnreg.selection.decision import tied_to

    forward = _decided(spec, "forward", policy)
    yield forward
    if spec.needs_backward or one.backward:
        if spec.dropout > 0.0 and forward.backend is not None:
            # Only the backend of the forward can draw the same dropout mask again.
            policy = policy.with_first(tied_to(forward.backend))
        yield _decided(spec, "backward", policy)


def _decided(spec: AttentionSpec, direction: Direction, policy: Policy) -> Decision:
    """Return a decision for a backend that really loads."""
    from attnreg.dispatch import planning
    from attnreg.dispatch.state import state

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


def _print(place: Console, result: Result) -> None:
    counts = Counter((row.backend, row.direction, row.source) for row in result.file.rows)
    heading(place, "Locked")
    table(
        place,
        ("backend", "direction", "calls", "decided by"),
        ((backend, direction, str(n), source) for (backend, direction, source), n in counts.items()),
    )
    if result.refused:
        heading(place, "No backend can run")
        table(place, ("direction", "call"), ((one.direction, str(spec)) for spec, one in result.refused))
    heading(place, "Summary")
    table(place, ("", ""), [("lockfile", f"{result.file.path}, {counted(len(result.file.rows), 'row')}")])
