"""`attnreg tune --check`: whether a table that somebody else measured can ship with attnreg."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from attnreg.errors import ConfigError
from attnreg.tools.cli import output

if TYPE_CHECKING:
    from attnreg.tools.tuning.review import Loss, Review

MOST_SHOWN = 10  # outliers


def check(file: Path, as_json: bool) -> None:
    """Check a table and print what was found; exits with 1 if it has a problem."""
    from attnreg.core import registry
    from attnreg.core.times.table import load
    from attnreg.core.times.tables import SHIPPED
    from attnreg.tools.tuning.review import Review, review

    with output.stdout_to_stderr():
        entries = registry.entries()
        shipped = {one.name: review(load(one), entries) for one in sorted(SHIPPED.glob("*.json"))}
        facts = {"file": str(file), "device": "", "points": "0"}
        try:
            table = load(file)
        except ConfigError as error:
            found = Review((str(error),))
        else:
            facts |= {"device": table.environment.device, "points": str(len(table.points))}
            found = review(table, entries, shipped.values())
    if as_json:
        others = {name: one.to_dict()["losses"] for name, one in shipped.items()}
        output.print_json({**facts, **found.to_dict(), "shipped": others})
    else:
        _print(facts, found, shipped)
    if found.problems:
        raise typer.Exit(output.FAILED)


def _print(facts: dict[str, Any], found: Review, shipped: dict[str, Review]) -> None:
    losses = [
        (direction, *_row("chosen by the other points", loss))
        for direction, loss in (found.losses or {}).items()
    ]
    for direction, always in (found.always or {}).items():
        losses += [(direction, *_row(f"always {name}", loss)[:-1], "") for name, loss in always.items()]
    for name, one in shipped.items():
        losses += [(direction, *_row(name, loss)) for direction, loss in (one.losses or {}).items()]
    headers = ("direction", "choice", "mean", "worst", "points", "where it is worst")
    output.table("Time over that of the fastest backend", losses, headers)
    if found.outliers:
        rows = [
            (one.backend, f"{one.measured:.1f}", f"{one.predicted:.1f}", one.call)
            for one in found.outliers[:MOST_SHOWN]
        ]
        title = f"Far from what neighbours predict: {output.counted(len(found.outliers), 'time')}, µs"
        output.table(title, rows, ("backend", "measured", "predicted", "call"))
    problems = [("problem", problem) for problem in found.problems] or [("problems", "none")]
    output.table("Summary", [*facts.items(), *problems])


def _row(choice: str, loss: Loss) -> tuple[str, ...]:
    return choice, f"{loss.mean:.3f}", f"{loss.worst:.2f}", str(loss.points), loss.where
