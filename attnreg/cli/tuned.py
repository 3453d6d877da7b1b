"""What came of `tune`, as plain data and as tables."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any, get_args

from attnreg.cli.output import heading, table
from attnreg.contract.spec import Direction

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.console import Console

    from attnreg.contract.spec import AttentionSpec
    from attnreg.tuning.points import Front, Measured, Point
    from attnreg.tuning.session import Session

__all__ = ["show", "summary"]

DIRECTIONS = get_args(Direction)


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
        headers = ("backend", "front", "routers", "forward", "backward")
        table(place, headers, _host(session.fronts), right=2)
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
        ("measured", f"{_points(told['measured'])}; {told['left']} of {told['calls']} calls are left"),
        ("table", f"{session.out}, {_points(told['table_points'])}"),
    )
    table(place, ("", ""), rows_of)


def _points(count: int) -> str:
    return f"{count} point{'' if count == 1 else 's'}"


def _host(fronts: Iterable[Front]) -> list[tuple[str, ...]]:
    taken = {one.place: f"{one.host_us:.1f}" for one in fronts}
    return [
        (
            name,
            "varlen_attn" if varlen else "SDPA",
            "compiled" if compiled else "Python",
            *(taken.get((name, varlen, one, compiled), "-") for one in DIRECTIONS),
        )
        for name, varlen, compiled in dict.fromkeys((*place[:2], place[3]) for place in taken)
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
