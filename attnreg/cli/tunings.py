"""What `tune` does: which calls, on which backends, into which table."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnreg import aten
from attnreg.cli.parsing import spec_of
from attnreg.cli.verdicts import candidates
from attnreg.cli.warmup import pairs
from attnreg.dispatch import planning
from attnreg.errors import BackendUnavailableError, ConfigError, InvalidInputError, did_you_mean
from attnreg.measure.timing import timer_for
from attnreg.torchlib import captured
from attnreg.tuning import traces
from attnreg.tuning.checks import Checks
from attnreg.tuning.grids import grid
from attnreg.tuning.kinds import kind_of, size_of, work
from attnreg.tuning.machine import environment, file_name
from attnreg.tuning.session import Session, kept
from attnreg.tuning.table import Table, check_writable, load

if TYPE_CHECKING:
    import torch

    from attnreg.contract.spec import AttentionSpec, Device

__all__ = ["begun", "given", "measure_fronts", "wanted"]

log = logging.getLogger("attnreg")

GRIDS = ("quick", "full")

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
    if session.device.type != "cuda":
        return
    aten.usable()  # puts the routers in: then it is known whether they are compiled
    known = {front.backend for front in session.fronts if front.compiled or not captured.compiled}
    names = [entry.name for entry in session.entries if entry.name not in known]
    if not names:
        return
    from attnreg.bench.fronts import host_costs

    session.add_fronts(host_costs(session.device, names))


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
