"""What `lock` does: which calls, decided by the settings in force, into which file."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from attnreg import _registry
from attnreg.cli.output import heading, table
from attnreg.cli.parsing import present_device
from attnreg.dispatch import planning
from attnreg.dispatch.state import state
from attnreg.errors import BackendUnavailableError, ConfigError, InvalidInputError
from attnreg.selection.decision import tied_to
from attnreg.selection.lockfile import FORMAT, Lockfile, Row
from attnreg.tuning import traces
from attnreg.tuning.machine import environment
from attnreg.tuning.table import check_writable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from rich.console import Console

    from attnreg.contract.spec import AttentionSpec, Device, Direction
    from attnreg.selection.decision import Decision, Policy
    from attnreg.tuning.traces import Recorded

__all__ = ["Locked", "locked", "show"]


class Locked(NamedTuple):
    """What came of it.

    Attributes:
        file: the lockfile, as it was written.
        refused: the decisions about calls that nobody can run; the file has no row for them.
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


def locked(trace: Path, out: Path, device: str) -> Locked:
    """Decide about each call of a trace and write the lockfile.

    Raises:
        ConfigError: the trace can't be read, the lockfile can't be written, or settings are wrong.
        InvalidInputError: there is no such device here, or no call.
        BackendUnavailableError: a backend that settings ask for can't load here.
    """
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
    return Locked(file, tuple(refused))


def _device(trace: Path, recorded: list[Recorded], asked: str) -> Device:
    """Return the one device that a lock is of."""
    types = sorted({one.spec.device.type for one in recorded})
    if not types:
        raise InvalidInputError(f"--from: got {trace}, expected a file with at least one recorded call")
    if not asked and len(types) > 1:
        raise InvalidInputError(
            f"--from: got calls on {' and '.join(types)}, expected --device as well: a lock is of one device"
        )
    return planning.device_of(present_device("--device" if asked else "--from", asked or types[0]))


def _decisions(spec: AttentionSpec, one: Recorded, policy: Policy) -> Iterator[Decision]:
    """Yield the decision about each direction of a call."""
    forward = _decided(spec, "forward", policy)
    yield forward
    if spec.needs_backward or one.backward:
        if spec.dropout > 0.0 and forward.backend is not None:
            policy = policy.led_by(tied_to(forward.backend))
        yield _decided(spec, "backward", policy)


def _decided(spec: AttentionSpec, direction: Direction, policy: Policy) -> Decision:
    """Decide until the chosen backend's package really loads."""
    while True:
        entries = state().entries
        decision = planning.decide(spec, direction, entries, policy)
        if decision.backend is None:
            return decision
        try:
            entries[decision.backend.casefold()].kernel(direction)
        except BackendUnavailableError:
            continue  # from now on it is rejected with the cause
        return decision


def show(place: Console, found: Locked) -> None:
    """Print who runs how many calls, those that nobody can run, and where the file is."""
    counts = Counter((row.backend, row.direction, row.source) for row in found.file.rows)
    heading(place, "Locked")
    table(
        place,
        ("backend", "direction", "calls", "decided by"),
        ((backend, direction, str(n), source) for (backend, direction, source), n in counts.items()),
    )
    if found.refused:
        heading(place, "Nobody can run")
        table(place, ("direction", "call"), ((one.direction, str(spec)) for spec, one in found.refused))
    heading(place, "In sum")
    table(place, ("", ""), [("lockfile", f"{found.file.path}, {len(found.file.rows)} rows")])
