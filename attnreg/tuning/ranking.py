"""The default order of backends after a table has had its say. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from attnreg.tuning.lookup import Prediction

__all__ = ["LEAD", "reordered", "with_sources"]

# What is faster by less is so by chance, and not worth another kernel's rounding.
LEAD = 0.02


def with_sources(
    order: Sequence[str], able: Collection[str], prediction: Prediction | None, default: str
) -> dict[str, str]:
    """Return the order that holds where nothing is asked for, with who decided each place."""
    if prediction is None:
        return dict.fromkeys(order, default)
    known = {one.backend.casefold() for one in prediction.candidates if one.cost_us is not None}
    return {
        name: prediction.table if name in known else default for name in reordered(order, able, prediction)
    }


def reordered(default: Sequence[str], able: Collection[str], prediction: Prediction) -> list[str]:
    """Return names in lower case, the first choice first.

    The table orders what it has measured, among the places that these have by default: a backend that
    it doesn't know keeps its own. What was wrong or failed comes last of all.
    """
    known = {name: one for name in default if (one := prediction.of(name)) is not None}
    costs = {name: one.cost_us for name, one in known.items() if one.cost_us is not None}
    by_cost = sorted(costs, key=costs.__getitem__)
    best = min((costs[name] for name in costs if name in able), default=0.0)
    # The first by default of those that are as fast as the best, but for chance.
    leader = next((name for name in costs if name in able and costs[name] <= best * (1 + LEAD)), None)
    if leader is not None:
        by_cost.remove(leader)
        by_cost.insert(0, leader)
    in_turn = iter(by_cost)
    kept = [
        next(in_turn) if name in costs else name for name in default if name in costs or name not in known
    ]
    return kept + [name for name in known if name not in costs]
