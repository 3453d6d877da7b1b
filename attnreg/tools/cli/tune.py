"""`attnreg tune`: measure what each backend costs here, and save a table by which attnreg chooses."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnreg.errors import InvalidInputError, did_you_mean
from attnreg.tools.cli import options, output
from attnreg.tools.lines import counted

if TYPE_CHECKING:
    import torch

    from attnreg.core.contract.spec import AttentionSpec, Device
    from attnreg.core.times.points import Front, Point
    from attnreg.tools.tuning.session import Session

GRIDS = ("quick", "full")


def tune(
    grid: Annotated[
        str, options.valued("--grid", "NAME", "quick or full. Without calls: quick, with --budget then full.")
    ] = "",
    q: Annotated[
        list[str],
        options.valued("--q", "B,S,H,D", "A call: batch, length, heads, head dim. Repeat for several calls."),
    ] = [],  # noqa: B006 - typer makes a new list for each call
    kv: options.Keys = [],  # noqa: B006
    trace: Annotated[Path | None, options.TRACE] = None,
    budget: options.Budget = "",
    out: Annotated[
        Path | None, options.valued("--out", "FILE", "The table to write. Default: named after the device.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin a new table in place of the file's.")] = False,
    device: options.DeviceHere = "",
    dtype: options.Dtypes = [],  # noqa: B006
    causal: options.Causal = False,
    window: options.Window = "-1,-1",
    varlen: options.Varlen = False,
    head_dim_v: options.ValueDim = None,
    sinks: options.Sinks = False,
    deterministic: options.Deterministic = False,
    backward: options.Backward = True,
    backend: options.Backends = [],  # noqa: B006
    as_json: options.AsJson = False,
) -> None:
    """Measure the backends here and save a table to choose by.

    Each backend is checked against float64 first; one that is wrong is never chosen. The table is saved
    after every call: a run that is stopped keeps what it has. To use the table, name it in a settings
    file: tuned = "FILE".

    Example: attnreg tune --grid quick --budget 5m --out here.json
    """
    described: dict[str, object] = {
        "--dtype": dtype, "--causal": causal, "--window": window != "-1,-1", "--varlen": varlen,
        "--head-dim-v": head_dim_v, "--sinks": sinks, "--deterministic": deterministic,
    }  # fmt: skip
    began = time.monotonic()
    output.import_torch()
    place, longest = options.present_device(device), options.seconds(budget)
    with output.stdout_to_stderr():
        _check_described({name: bool(value) for name, value in described.items()}, bool(q))
        from_options = options.specs_of(
            q, kv, str(place), dtype, window, causal, head_dim_v,
            varlen=varlen, sinks=sinks, deterministic=deterministic, needs_backward=backward,
        )  # fmt: skip
        if trace and out and trace.exists() and out.exists() and trace.samefile(out):
            raise InvalidInputError(f"--out: got {out}, expected another file than that of --from")
        specs = _specs(from_options, trace, grid, place, backward)
        is_more = budget and not (grid or from_options or trace)
        in_order = _specs(specs, None, "full", place, backward) if is_more else specs
        session = _session(out, place, options.names("--backend", backend), fresh)
        end, problem = _run(session, specs, in_order, began + longest)
    if as_json:
        output.print_json(_data(session, specs, end))
    else:
        _print(session, specs, end)
    if problem:
        typer.echo(f"attnreg: {problem}", err=True)
    if end == "interrupted":
        raise typer.Exit(output.INTERRUPTED)
    if problem or not session.points:
        raise typer.Exit(output.FAILED)


def _check_described(is_given: dict[str, bool], any_call: bool) -> None:
    """Check that options which describe a call come with a call, and --sinks with a packed call."""
    if not any_call and (unused := [name for name, is_used in is_given.items() if is_used]):
        raise InvalidInputError(f"{' and '.join(unused)}: got no --q, expected the call that it describes")
    if is_given["--sinks"] and not is_given["--varlen"]:
        raise InvalidInputError("--sinks: got no --varlen, expected both: only packed calls have sinks")
    if is_given["--sinks"] and is_given["--deterministic"]:
        raise InvalidInputError("--sinks: got --deterministic, expected one: no kernel is given sinks then")


def _specs(
    from_options: list[AttentionSpec], trace: Path | None, name: str, place: torch.device, backward: bool
) -> list[AttentionSpec]:
    """Return the calls to measure, the most valuable first: of the options, of the recording, of the grid."""
    from attnreg.core.dispatch import planning
    from attnreg.tools.tuning.workload import grid

    if name and name not in GRIDS:
        raise InvalidInputError(
            f"--grid: got {name!r}, expected {' or '.join(GRIDS)}{did_you_mean(name, GRIDS)}"
        )
    device = planning.device_of(place)
    specs = [*from_options, *(_recorded(trace, device) if trace is not None else [])]
    if name or not specs:
        specs += grid(name or "quick", device)
    if not backward:
        specs = [replace(spec, needs_backward=False) for spec in specs]
    return list(dict.fromkeys(specs))


def _recorded(trace: Path, device: Device) -> list[AttentionSpec]:
    """Return the calls of a trace as if they were made on this device, the most work first."""
    from attnreg.core.times.kinds import kind_of, size_of, work

    weights: dict[AttentionSpec, float] = {}
    for call in options.recorded_on(trace, device.type):
        spec = replace(call.spec, device=device, capturing=False, needs_backward=call.backward > 0)
        spec = replace(spec, batch_invariant=False)  # times never decide about such calls
        # A backward has five matrix products where a forward has two.
        cost = work(kind_of(spec, "forward"), size_of(spec)) * (call.forward + 2.5 * call.backward)
        weights[spec] = weights.get(spec, 0.0) + cost
    return sorted(weights, key=weights.__getitem__, reverse=True)


def _session(out: Path | None, place: torch.device, named: tuple[str, ...], fresh: bool) -> Session:
    """Return a session that starts from the points its table has, once the file is known to be writable."""
    from attnreg.core import registry
    from attnreg.core.dispatch import planning
    from attnreg.core.times.environments import environment
    from attnreg.core.times.table import Table, load
    from attnreg.core.times.tables import file_name
    from attnreg.tools.measure import timing
    from attnreg.tools.tuning.checks import Checks
    from attnreg.tools.tuning.session import Session, kept

    entries = options.measurable(named, place, files=False)
    here = environment(planning.device_of(place), registry.entries())
    file = (out or Path(file_name(here.device))).absolute()
    options.check_writable("--out", file)
    replaced = load(file) if fresh and file.exists() else None  # raises unless it is a table
    known = Table(here, ()) if fresh else kept(file, here)
    points = {point.place: point for point in known.points}
    timer = timing.timer_for(place)
    return Session(file, here, entries, place, Checks(place), timer, points, known.fronts, replaced)


def _run(
    session: Session, specs: list[AttentionSpec], in_order: list[AttentionSpec], deadline: float
) -> tuple[str, str]:
    """Measure behind a progress bar, `specs` first; return how it ended, and the problem if there is one."""
    from attnreg.tools.bench import fronts
    from attnreg.tools.bench.ahead import compile_ahead
    from attnreg.tools.tuning.checks import DeviceLostError

    done, hurried = 0, deadline < inf
    try:
        with output.progress(len(specs), "compiling") as update:
            todo = [spec for spec in specs if session.todo(spec)]
            compile_ahead(
                [*todo, *fronts.specs(session, hurried)],
                session.entries,
                deadline - time.monotonic(),
                lambda going_on: session.prepare(todo, going_on),
            )
            update(description="host time per call")
            fronts.measure(session, hurried)
            for done, spec in enumerate(session.run(in_order, deadline - time.monotonic()), 1):
                what = f"{spec.max_q} x {spec.max_k}, head dim {spec.head_dim}"
                update(completed=min(done, len(specs)), description=what)
    except KeyboardInterrupt:
        return "interrupted", ""
    except DeviceLostError as error:
        return "stopped", f"{error}; what was measured before is in {session.out}"
    if done >= len(specs):
        return "finished", ""
    nothing = "the time was spent before any call was measured; give --budget more time"
    return "budget spent", "" if session.points else nothing


def _data(session: Session, specs: list[AttentionSpec], end: str) -> dict[str, Any]:
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
        "refused": session.refusals(specs),
        "skipped": [{"call": str(spec), "reason": reason} for spec, reason in session.skipped],
        "table_points": len(session.points),
    }


def _print(session: Session, specs: list[AttentionSpec], end: str) -> None:
    measured_points = sorted(session.fresh, key=lambda point: (str(point.kind), point.size))
    names = list(dict.fromkeys(entry.name for entry in session.entries))
    for kind, points in groupby(measured_points, key=lambda point: point.kind):
        rows = (_row(point, names) for point in points)
        output.table(str(kind), rows, ("call", *names, "fastest"), right=len(names) + 1)
    if session.fronts:
        headers = ("backend", "front", "routers", "call", "forward", "backward", "forward alone")
        output.table("Host time per call, µs", host_rows(session.fronts), headers, right=3)
    if failures := {
        (name, measured.trouble)
        for point in measured_points
        for name, measured in point.backends.items()
        if measured.trouble
    }:
        title = "Wrong or failed, and so never chosen for these calls"
        output.table(title, sorted(failures), ("backend", "why"))
    if session.skipped:
        output.table(
            "Not measured", ((str(spec), reason) for spec, reason in session.skipped), ("call", "why")
        )
    data = _data(session, specs, end)
    if data["refused"]:
        output.table("Refused, shown as -", data["refused"].items(), ("backend", "why"))
    left = f"{data['left']} of {data['calls']} calls are left"
    if unmeasured := len({spec for spec, _ in session.skipped}.intersection(specs)):
        left = f"{unmeasured} of {data['calls']} calls can't be measured, {data['left']} are left"
    summary = {
        "end": end,
        "measured": f"{counted(data['measured'], 'point')}; {left}",
        "table": f"{session.out}, {counted(data['table_points'], 'point')}",
    }
    output.table("Summary", summary.items())


def host_rows(fronts: Iterable[Front]) -> list[tuple[str, ...]]:
    """Return a row for each backend, front, kind of router and call, with the host time of each direction."""
    from attnreg.tools.bench.fronts import MEASURED

    taken = {front.place: f"{front.host_us:.1f}" for front in fronts}
    return [
        (
            name,
            "varlen_attn" if varlen else "SDPA",
            "compiled" if compiled else "Python",
            shape,
            *(
                taken.get((name, varlen, direction, compiled, recorded, shape), "-")
                for direction, recorded in MEASURED
            ),
        )
        for name, varlen, compiled, shape in dict.fromkeys(
            (*place[:2], place[3], place[5]) for place in taken
        )
    ]


def _row(point: Point, names: list[str]) -> Iterator[str]:
    timed = {
        name: max(measured.gpu_us, measured.host_us)
        for name, measured in point.backends.items()
        if measured.gpu_us is not None
    }
    yield str(point.size)
    for name in names:
        measured = point.backends.get(name)
        untimed = "-" if measured is None else "wrong" if measured.wrong else "failed"
        yield f"{timed[name]:.1f} µs" if name in timed else untimed
    yield min(timed, key=timed.__getitem__, default="-")
