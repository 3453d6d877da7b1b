"""What `tune` does: which calls, on which backends, into which table, and what came of it."""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from attnreg import planning
from attnreg.cli.output import heading, table
from attnreg.cli.parsing import spec_of
from attnreg.cli.verdicts import candidates
from attnreg.cli.warmup import pairs
from attnreg.discovery import Direction
from attnreg.errors import BackendUnavailableError, ConfigError, InvalidInputError, did_you_mean
from attnreg.tuning import traces
from attnreg.tuning.checks import Checks
from attnreg.tuning.grids import grid
from attnreg.tuning.kinds import kind_of, size_of, work
from attnreg.tuning.machine import environment, file_name
from attnreg.tuning.session import Session, kept
from attnreg.tuning.table import Table, check_writable, load
from attnreg.tuning.timing import timer_for

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch
    from rich.console import Console

    from attnreg.spec import AttentionSpec, Device
    from attnreg.tuning.points import Front, Measured, Point

__all__ = ["begun", "given", "measure_fronts", "show", "summary", "wanted"]

log = logging.getLogger("attnreg")

GRIDS = ("quick", "full")

DIRECTIONS = get_args(Direction)

# On a GPU the reference would take longer than all others together, and comes last anyway.
REFERENCE = "math"


def given(
    queries: list[str],
    keys: list[str],
    place: torch.device,
    dtypes: tuple[str, ...],
    window: str,
    causal: bool,
    head_dim_v: int | None,
    **facts: Any,
) -> list[AttentionSpec]:
    """Return the calls that the options spell out."""
    return [
        spec_of(*shapes, str(place), name, window, causal, head_dim_v, **facts)
        for shapes in pairs(queries, keys)
        for name in dtypes or ("bf16",)
    ]


def wanted(
    asked: list[AttentionSpec],
    trace: Path | None,
    name: str,
    place: torch.device,
    backward: bool,
    out: Path | None = None,
) -> list[AttentionSpec]:
    """Return the calls to measure, the most valuable first: given ones, recorded ones, then a grid.

    Raises:
        ConfigError: the trace can't be read.
        InvalidInputError: there is no such grid, or nothing to measure.
    """
    if trace is not None and trace.exists() and out is not None and out.exists() and trace.samefile(out):
        raise InvalidInputError(f"--out: got {out}, expected another file than that of --from")
    if name and name not in GRIDS:
        raise InvalidInputError(
            f"--grid: got {name!r}, expected {' or '.join(GRIDS)}{did_you_mean(name, GRIDS)}"
        )
    device = planning.device_of(place)
    found = list(asked)
    found += _recorded(trace, device) if trace is not None else []
    if name or not found:
        found += grid(name or "quick", device)
    if not backward:
        found = [replace(spec, needs_backward=False) for spec in found]
    return list(dict.fromkeys(found))


def begun(out: Path | None, place: torch.device, asked: tuple[str, ...], fresh: bool) -> Session:
    """Return a session with what its table has already; the file is known to be writable.

    Raises:
        ConfigError: the file can't be written, is no table, or one of another environment.
        UnknownBackendError: no backend has one of the names.
        BackendUnavailableError: one that was asked for can't be measured here, or none can.
    """
    from attnreg import _registry

    device = planning.device_of(place)
    verdicts = candidates(asked, place, files=False)
    if asked and (against := next((one for one in verdicts if one.reason), None)):
        raise BackendUnavailableError(f"--backend: {against.entry.name} {against.reason}")
    entries = [one.entry for one in verdicts if not one.reason]
    if not asked and place.type == "cuda" and len(entries) > 1:
        entries = [entry for entry in entries if entry.name != REFERENCE]
    if not entries:
        raise BackendUnavailableError(f"no backend can be measured on {place}")
    here = environment(device, _registry.entries())
    file = (out or Path(file_name(here.device))).absolute()
    try:
        check_writable(file)
    except ConfigError as error:
        raise ConfigError(f"--out: {error}") from None
    if fresh and file.exists():
        load(file)  # what isn't a table of this kind is somebody's, and not to be written over
    known = Table(here, ()) if fresh else kept(file, here)
    points = {point.place: point for point in known.points}
    return Session(file, here, entries, place, Checks(place), timer_for(place), points, known.fronts)


def measure_fronts(session: Session) -> None:
    """Measure what the host takes for calls on a GPU, of each backend whose table doesn't say so."""
    known = {front.backend for front in session.fronts}
    names = [entry.name for entry in session.entries if entry.name not in known]
    if session.device.type != "cuda" or not names:
        return
    from attnreg.bench.fronts import host_costs

    session.add_fronts(host_costs(session.device, names))


def summary(session: Session, specs: list[AttentionSpec], end: str) -> dict[str, Any]:
    """Return what came of a session as plain data."""
    skipped = {spec for spec, _ in session.skipped}
    left = sum(bool(session.todo(spec)) for spec in specs if spec not in skipped)
    return {
        "device": session.environment.device,
        "out": str(session.out),
        "end": end,
        "calls": len(specs),
        "left": left,
        "measured": len(session.fresh),
        "points": [point.to_dict() for point in session.fresh],
        "fronts": [front.to_dict() for front in session.fronts],
        "skipped": [{"call": str(spec), "reason": reason} for spec, reason in session.skipped],
        "table_points": len(session.points),
    }


def show(place: Console, session: Session, specs: list[AttentionSpec], end: str) -> None:
    """Print what was measured, what was wrong, and where it is."""
    found = sorted(session.fresh, key=lambda point: (str(point.kind), point.size))
    for kind, points in groupby(found, key=lambda point: point.kind):
        heading(place, str(kind))
        names = list(dict.fromkeys(entry.name for entry in session.entries))
        rows = list(points)
        table(place, ("call", *names, "fastest"), (_row(point, names) for point in rows), right=len(names))
    if session.fronts:
        heading(place, "What a call takes the host, µs")
        table(place, ("backend", "front", "forward", "backward"), _host(session.fronts), right=2)
    troubles = {(name, one.trouble) for point in found for name, one in point.backends.items() if one.trouble}
    if troubles:
        heading(place, "Never chosen for these")
        table(place, ("backend", "why"), sorted(troubles))
    told = summary(session, specs, end)
    if session.skipped:
        heading(place, "Not measured")
        table(place, ("call", "why"), ((str(spec), reason) for spec, reason in session.skipped))
    heading(place, "In sum")
    rows_of = (
        ("end", end),
        ("measured", f"{told['measured']} points; {told['left']} of {told['calls']} calls are left"),
        ("table", f"{session.out}, {told['table_points']} points"),
    )
    table(place, ("", ""), rows_of)


def _host(fronts: Iterable[Front]) -> list[tuple[str, ...]]:
    taken = {one[:3]: f"{one.host_us:.1f}" for one in fronts}
    return [
        (
            name,
            "varlen_attn" if varlen else "SDPA",
            *(taken.get((name, varlen, one), "-") for one in DIRECTIONS),
        )
        for name, varlen in dict.fromkeys(place[:2] for place in taken)
    ]


def _row(point: Point, names: list[str]) -> Iterator[str]:
    timed = {
        name: max(one.gpu_us, one.host_us) for name, one in point.backends.items() if one.gpu_us is not None
    }
    yield str(point.size)
    yield from (_cell(point.backends.get(name)) for name in names)
    yield min(timed, key=timed.__getitem__, default="-")


def _cell(found: Measured | None) -> str:
    if found is None:
        return "-"
    if found.gpu_us is None:
        return "wrong" if found.wrong else "failed"
    return f"{max(found.gpu_us, found.host_us):.1f} µs"


def _recorded(trace: Path, device: Device) -> list[AttentionSpec]:
    """Return the calls of a trace as if they were made here, those that took the most first."""
    weights: dict[AttentionSpec, float] = {}
    recorded = traces.read(trace)
    here = [one for one in recorded if one.spec.device.type == device.type]
    elsewhere = " and ".join(sorted({one.spec.device.type for one in recorded} - {device.type}))
    if elsewhere and not here:
        raise InvalidInputError(
            f"--from: got calls on {elsewhere}, expected some on {device.type}, which --device sets"
        )
    if elsewhere:
        left_out = len(recorded) - len(here)
        log.warning("--from: %d calls on %s are left out: this is %s", left_out, elsewhere, device.type)
    for one in here:
        spec = replace(one.spec, device=device, capturing=False, needs_backward=one.backward > 0)
        cost = work(kind_of(spec, "forward"), size_of(spec)) * (one.forward + 2.5 * one.backward)
        weights[spec] = weights.get(spec, 0.0) + cost
    if not weights:
        raise InvalidInputError(f"--from: got {trace}, expected a file with at least one recorded call")
    return sorted(weights, key=weights.__getitem__, reverse=True)
