"""The check that all ranks of a group are about to run the same distributed call.

What differs would make them wait for each other for ever, or send rows of wrong sizes. So before the first
call of each kind the ranks exchange a few lines of text, on the CPU: no GPU is waited for.
"""

from __future__ import annotations

import weakref
from typing import Any, NoReturn

import torch.distributed as dist

from attnreg.errors import AttnregError, RanksDifferError

_cpu_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def agree(group: Any, mine: dict[str, str]) -> None:
    """Compare what is to be the same on all ranks of a group; all of them call this.

    Raises `RanksDifferError`, on every rank, if something is not; it says what, and what two ranks have.
    """
    all_ranks: list[dict[str, str]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(all_ranks, mine, group=_on_cpu(group))
    for name in all_ranks[0]:
        values = [one.get(name, "nothing") for one in all_ranks]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            raise RanksDifferError(
                f"context parallel: ranks differ in {name}: rank 0 has {values[0]}, rank {other} has "
                f"{values[other]}; expected the same on all {len(values)} ranks of the group"
            )


def refuse(group: Any, problem: Exception) -> NoReturn:
    """Raise what is wrong on this rank, once the others, which wait for it in `agree`, know of it."""
    # The first line alone: further ones may be of this rank's rows.
    said = str(problem).partition("\n")[0]
    said = said if isinstance(problem, AttnregError) else f"{type(problem).__name__}: {said}"
    try:
        agree(group, {"arguments": said})
    except RanksDifferError as error:
        raise error from problem
    except RuntimeError as error:  # the others don't come, until the group's timeout or as they have ended
        raise problem from error
    raise problem


def _on_cpu(group: Any) -> Any:
    """Return a group of the same ranks that communicates on the CPU: the group itself if it can."""
    if "cpu" in dist.get_backend_config(group):
        return group
    if group not in _cpu_groups:
        ranks = dist.get_process_group_ranks(group)
        _cpu_groups[group] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return _cpu_groups[group]
