"""`attnreg lock`: which backend runs each kind of recorded calls, as a file that ATTNREG_LOCK enforces."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnreg.core.settings import environment
from attnreg.core.settings.environment import REFERENCE
from attnreg.errors import BackendUnavailableError, InvalidInputError, UnsupportedInputError
from attnreg.tools.cli.options import TRACE, AsJson, check_writable, present_device, valued
from attnreg.tools.cli.output import (
    FAILED,
    USAGE,
    console,
    import_torch,
    print_json,
    stdout_to_stderr,
    table,
)
from attnreg.tools.lines import counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attnreg.core.contract.spec import AttentionSpec, Device, Direction
    from attnreg.core.policy.lockfile import Lockfile, LockfileRow
    from attnreg.core.selection.decision import Decision, Policy
    from attnreg.core.times.traces import Recorded
    from attnreg.tools.cli.lock_ranges import Decided

    # Calls that no backend can run, with the decision: a lockfile has no row for them.
    Refused = list[tuple[AttentionSpec, Decision]]

Trace = Annotated[Path | None, TRACE]
Out = Annotated[Path | None, valued("--out", "FILE", "The lockfile to write.")]
Check = Annotated[Path | None, valued("--check", "LOCK", "Check this lockfile instead of writing one.")]
Where = Annotated[
    str, valued("--device", "DEVICE", "cpu, cuda, cuda:1, or sm_90 without that GPU. Default: the calls'.")
]
Exact = Annotated[
    bool, typer.Option("--exact", help="A row for each call and its lengths, not for its kind.")
]


def lock(
    trace: Trace = None,
    out: Out = None,
    check: Check = None,
    device: Where = "",
    exact: Exact = False,
    as_json: AsJson = False,
) -> None:
    """Write a lockfile: which backend runs each kind of call.

    A kind is all of a recorded call but its lengths. With ATTNREG_LOCK=FILE, or the key lock of a settings
    file, a program runs each call on the backend of the lockfile, or fails and says what differs. --check
    shows in advance what would fail. If the compiled kernel for the CPU is missing, it is compiled first,
    unless ATTNREG_BUILD=off. A lockfile that is in force doesn't count here.

    Example: attnreg lock --from calls.jsonl --out lock.json
    """
    if check is not None:
        if trace is not None or out is not None or exact:
            raise InvalidInputError(
                "--check: got --from, --out or --exact as well, expected it with --device only"
            )
        _show_faults(check, device, as_json)
        return
    if trace is None or out is None:
        missing = "--from" if trace is None else "--out"
        raise InvalidInputError(
            f"{missing}: got none, expected a file: --from TRACE --out LOCK, or --check LOCK"
        )
    with _without_lock():
        file, refused = _lock(trace, out, device, exact)
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


@contextmanager
def _without_lock() -> Iterator[None]:
    """Import torch with no lockfile in force: it may be unreadable, or the file that is to be written."""
    environment.ignores_lock = True
    try:
        import_torch()
        with stdout_to_stderr():
            yield
    finally:
        environment.ignores_lock = False


def _lock(trace: Path, out: Path, device: str, exact: bool) -> tuple[Lockfile, Refused]:
    """Decide which backend runs each call of a trace, and write the lockfile."""
    from attnreg.core import registry
    from attnreg.core.dispatch.state import state
    from attnreg.core.policy.lockfile import FORMAT, Lockfile
    from attnreg.core.times import traces
    from attnreg.core.times.environments import environment
    from attnreg.core.torchlib import building

    check_writable("--out", out, FORMAT)
    if out.exists() and trace.exists() and out.samefile(trace):
        raise InvalidInputError(f"--out: got {out}, expected another file than that of --from")
    recorded = traces.read(trace)
    place = _device(trace, recorded, device)
    if place.type == "cpu":  # a program would compile the kernel some time later, and the lock would be wrong
        building.require_kernel(True)
        with console(stderr=True).status("looking for the compiled kernel, compiling it if it is missing"):
            building.wait_built()
    policy = replace(state().policy, lock=None)
    if policy.batch_invariant and any(
        call.spec.varlen and not call.spec.batch_invariant for call in recorded
    ):
        # Without the policy a packed call's window is simplified by the lengths of its batch.
        raise InvalidInputError(
            f'--from: got {trace}, recorded without policy = "batch_invariant", expected one recorded with '
            "it, as packed calls have other windows then: set ATTNREG_POLICY=batch_invariant for both"
        )
    # Any backend may run empty calls. A row may stand for all batches: then calls that aren't empty decide.
    calls = [
        call._replace(spec=policy.applied_to(replace(call.spec, device=place)))
        for call in sorted(recorded, key=lambda call: call.spec.empty)
    ]
    rows, refused = _rows(calls, policy, exact)
    file = Lockfile(out.absolute(), place.type, environment(place, registry.entries()), tuple(rows))
    file.save()
    return file, refused


def _rows(calls: list[Recorded], policy: Policy, exact: bool) -> tuple[list[LockfileRow], Refused]:
    """Return the rows of each kind of calls for all lengths, and the calls that no backend can run.

    `exact`: a row for each direction of each call.
    """
    from attnreg.core.policy.lockfile import LockfileRow, kind_of
    from attnreg.tools.cli.lock_ranges import Decided

    groups: dict[object, tuple[Direction, list[Decided]]] = {}
    refused: Refused = []
    for call in calls:
        spec = call.spec.of_any_batch() if exact and call.spec.batch_invariant else call.spec
        for decision in _decisions(call.spec, bool(call.backward), policy):
            direction = decision.direction
            if decision.backend is None:
                refused.append((call.spec, decision))
                continue
            # Backwards of one kind of forwards may be of several: some have a gradient of the LSE.
            kind = kind_of(spec, "forward"), spec.window, kind_of(spec, direction)
            _, alike = groups.setdefault((spec if exact else kind, direction), (direction, []))
            alike.append(Decided(spec, decision.backend, decision.source))
    if exact:
        rows = [
            LockfileRow(first.spec, way, first.backend, first.source) for way, (first, *_) in groups.values()
        ]
    else:
        rows = [row for way, alike in groups.values() for row in _rows_of_kind(alike, way, policy)]
    return rows, refused


def _rows_of_kind(calls: list[Decided], direction: Direction, policy: Policy) -> Iterator[LockfileRow]:
    """Yield the rows for a direction of a kind from its recorded calls."""
    from attnreg.core.dispatch.kinds import kind_of
    from attnreg.core.dispatch.state import state
    from attnreg.core.policy.lockfile import LockfileRow
    from attnreg.tools.cli.lock_ranges import narrow, split

    first = calls[0]
    if first.spec.batch_invariant:  # one backend runs all lengths; empty calls may run on any
        yield LockfileRow(first.spec, direction, first.backend, first.source, ())
        return
    kind = kind_of(state(), first.spec, direction)
    for ranges, part in split(calls, kind.cuts):
        row = LockfileRow(part[0].spec, direction, part[0].backend, part[0].source, ())
        runs = partial(_runs, row, _locked_to((row,), row.spec.device, policy))
        for within, locked in narrow(ranges, part, kind.cuts, runs):
            yield replace(row, spec=locked[0].spec, source=locked[0].source, ranges=within)


def _locked_to(rows: tuple[LockfileRow, ...], device: Device, policy: Policy) -> Policy:
    """Return a policy with these rows in force, as if they had been locked here on a device."""
    from attnreg.core import registry
    from attnreg.core.policy.lockfile import Lockfile, LockInForce
    from attnreg.core.times.environments import environment

    here = replace(environment(device, registry.entries()), backends={})
    return replace(
        policy, lock=LockInForce(Lockfile(Path("lock"), device.type, here, rows), registry.entries)
    )


def _runs(row: LockfileRow, policy: Policy, spec: AttentionSpec) -> bool:
    return not _error_of(row, spec, policy)


def _error_of(row: LockfileRow, spec: AttentionSpec, policy: Policy) -> str:
    """Return why a call of a row would be an error while it is in force by `policy`; empty if it wouldn't."""
    from attnreg.core.selection.decision import tied_to

    if spec.dropout > 0.0 and row.direction == "backward":
        policy = policy.with_first(tied_to(row.backend))
    try:
        decision = _decided(spec, row.direction, policy)
    except (BackendUnavailableError, UnsupportedInputError) as error:
        return str(error)
    return "" if decision.backend else f"{decision.refusal or 'no backend can run it'}: {spec}"


def _device(trace: Path, recorded: list[Recorded], named: str) -> Device:
    """Return the device of the lockfile: the named device, else the device of all calls."""
    types = sorted({call.spec.device.type for call in recorded})
    if not types:
        raise InvalidInputError(f"--from: got {trace}, expected a file with at least one recorded call")
    if not named and len(types) > 1:
        raise InvalidInputError(
            f"--from: got calls on {' and '.join(types)}, expected --device as well: "
            "a lockfile is for one device"
        )
    if named:
        return _place(named)
    known = {".".join(map(str, call.spec.device.capability or ())) for call in recorded}
    return _place(types[0], "--from", min(known))


def _place(named: str, option: str = "--device", capability: str = "") -> Device:
    """Return a device of this machine, or a simulated one such as sm_90.

    If there is none, the error names the simulated device of a compute capability such as "9.0".
    """
    from attnreg.core.contract.spec import Device
    from attnreg.core.dispatch import planning

    if re.fullmatch(r"sm_?\d+[af]?", named.strip().lower()):
        return Device.parse(named)
    try:
        return planning.device_of(present_device(named, option))
    except InvalidInputError as error:
        if not capability:
            raise
        arch = f"sm_{capability.replace('.', '')}"
        raise InvalidInputError(f"{error}; --device {arch} needs no GPU") from None


def _decisions(spec: AttentionSpec, has_backward: bool, policy: Policy) -> Iterator[Decision]:
    from attnreg.core.selection.decision import tied_to

    forward = _decided(spec, "forward", policy)
    yield forward
    if spec.needs_backward or has_backward:
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
        if decision.backend is None or spec.device.simulated:
            return decision
        try:
            entries[decision.backend.casefold()].kernel(direction)
        except BackendUnavailableError:
            continue  # the failure is kept: the next decision rejects this backend
        return decision


def _print(file: Lockfile, refused: Refused) -> None:
    counts = Counter(
        (
            row.backend,
            row.direction,
            "exact" if row.ranges is None else ", ".join(map(str, row.ranges)),
            row.source,
        )
        for row in file.rows
    )
    rows = (
        (backend, direction, str(n), lengths or "any", source)
        for (backend, direction, lengths, source), n in counts.items()
    )
    table("Locked", rows, ("backend", "direction", "rows", "lengths", "decided by"))
    for row in {(row.direction, row.spec.varlen): row for row in file.rows if _is_fallback(row)}.values():
        which = f"{'packed' if row.spec.varlen else 'dense'} {row.direction}s"
        why = "as no other backend can run some"
        typer.echo(f"Note: {which} are locked to the reference, {REFERENCE}, {why}: {row.spec}\n")
    if refused:
        calls = ((decision.direction, str(spec)) for spec, decision in refused)
        table("No backend can run", calls, ("direction", "call"))
    table("Summary", [("lockfile", f"{file.path}, {counted(len(file.rows), 'row')}")])


def _is_fallback(row: LockfileRow) -> bool:
    """Whether a row is for the reference though nothing asked for it: no other backend could run the call."""
    return row.backend.casefold() == REFERENCE and row.source.startswith("default order")


def _show_faults(path: Path, device: str, as_json: bool) -> None:
    """Print all faults of a lockfile on a device; exit code 2 if there are any."""
    with _without_lock():
        file, place, faults = _faults(path, device)
    if as_json:
        print_json({"lock": str(file.path), "device": str(place), "rows": len(file.rows), "faults": faults})
    else:
        told = (
            counted(len(faults), "fault") if faults else f"right on {place}, {counted(len(file.rows), 'row')}"
        )
        table("Checked", [(str(file.path), told)])
        if faults:  # lines stay whole, so that a search finds them
            typer.echo("\n".join(["Faults", *(f"  {line}" for line in faults), ""]))
    if faults:
        raise typer.Exit(USAGE)


def _faults(path: Path, device: str) -> tuple[Lockfile, Device, list[str]]:
    """Return a lockfile, the device that it is checked for, and all faults of it there."""
    from attnreg.core import registry
    from attnreg.core.dispatch.state import state
    from attnreg.core.policy.lockfile import LockInForce, load

    file = load(path)
    place = (
        _place(device)
        if device
        else _place(file.device, f"{path}: device", file.environment.compute_capability)
    )
    if place.type != file.device:
        again = f": lock again with `--device {device}`" if device else ""
        return file, place, [f"locked on {file.device}, here it is {place.type}{again}"]
    backends = dict.fromkeys(row.backend for row in file.rows)
    in_force = LockInForce(file, registry.entries)
    faults = [differs for name in backends if (differs := in_force.differences(place, name))]
    # Differences are faults already.
    policy = _locked_to(file.rows, place, state().policy)
    faults += (fault for row in file.rows if (fault := _fault_of(row, place, policy)))
    return file, place, list(dict.fromkeys(faults))


def _fault_of(row: LockfileRow, place: Device, policy: Policy) -> str:
    """Return the first error of a call of a row here: its example, or a call at an end of its ranges."""
    from attnreg.core.dispatch.kinds import kind_of
    from attnreg.core.dispatch.state import state
    from attnreg.tools.cli.lock_ranges import with_other_lengths

    calls = [replace(row.spec, device=place)]
    if row.ranges is not None and not row.spec.batch_invariant:
        cuts = kind_of(state(), calls[0], row.direction).cuts
        cuts += tuple(cut for length_range in row.ranges for cut in length_range.cuts)
        calls += filter(row.includes, with_other_lengths(calls[0], cuts))
    return next(filter(None, (_error_of(row, call, policy) for call in calls)), "")
