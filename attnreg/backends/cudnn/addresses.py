"""Running a plan on addresses, below what the frontend's `execute` finds out about tensors.

It looks at every tensor that it is given, which costs the host as much as cuDNN's launch. What it calls then
has no promise to stay: where a release has it otherwise, plans are run by `execute` alone.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["ByAddress", "by_address"]

# How the frontend's function is described that takes addresses.
SIGNATURE = "(self, user_ptrs_array: int, n_user: int, workspace: int, handle: int, plan_index: int"

log = logging.getLogger("attnreg")


class ByAddress(NamedTuple):
    """How a graph is run on addresses.

    Attributes:
        run: `run(addresses, workspace, handle)`, all of them numbers; the last is a handle's
            `backend_handle`.
        order: the places of the tensors, as the graph's `uids` have them, in the order of the addresses.
    """

    run: Callable[[int, int, int], None]
    order: tuple[int, ...]


def by_address(graph: Any, uids: Sequence[int], handle: Any) -> ByAddress | None:
    """Return how to run a built graph on addresses; None where this release doesn't do it as 1.32 does.

    Args:
        graph: of the frontend's.
        uids: of the tensors that it is run on.
        handle: one of those that it will be run with.
    """
    try:
        if graph.selected_engine is not None:
            return None  # not cuDNN's own: written in Python
        lowered, index = graph._lowered_graph, graph.plans[graph._plan_index].cpp_index
        execute = lowered._execute_with_raw_ptrs
        if SIGNATURE not in execute.__doc__ or not isinstance(handle.backend_handle, int):
            raise TypeError(f"_execute_with_raw_ptrs is another: {execute.__doc__}")
        lowered._prepare_variant_pack_template()
        expected = lowered._get_variant_pack_uids_sorted()
    except Exception as error:  # noqa: BLE001 - it isn't needed
        log.debug("a plan of cuDNN's isn't run on addresses: %s: %s", type(error).__name__, error)
        return None
    ordered = sorted(uids)
    if ordered != list(expected):
        log.debug("a plan of cuDNN's isn't run on addresses: it reads %s, expected %s", expected, ordered)
        return None
    count, index = len(ordered), -1 if index is None else index

    def run(addresses: int, workspace: int, handle: int) -> None:
        execute(addresses, count, workspace, handle, index)

    return ByAddress(run, tuple(uids.index(uid) for uid in ordered))
