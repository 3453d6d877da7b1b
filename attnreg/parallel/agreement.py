"""The check that all ranks of a group are about to run the same distributed call, of the same batch.

What differs would make them wait for each other for ever, or send rows of wrong sizes or of another batch. So
the ranks exchange a few lines of text before the first call of each kind, and where the batch is another than
that of the call before; on the CPU: no GPU is waited for.
"""

from __future__ import annotations

import weakref
from typing import Any, NoReturn

import torch._C._distributed_c10d as torch_dist
import torch.distributed as dist

from attnreg.errors import AttnregError, RanksDifferError

_cpu_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

# For each group: how many batches its ranks have compared, and the number of the one used last, 0 for none.
_counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_last: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


class BatchAgreement:
    """Whether a group's calls are of one batch, on this rank and so on all of them.

    A batch gets a number when ranks compare it for the first time, so it is the same on all ranks. Ranks that
    use batches in different orders compare different numbers, or some of them wait for the others in vain.
    """

    def __init__(self, group: Any) -> None:
        self._group, self._number = group, 0

    @property
    def holds(self) -> bool:
        """Whether ranks needn't compare: their call before was of this batch, too."""
        is_last = 0 < self._number == _last.get(self._group)
        # As torch itself compares all that ranks do with TORCH_DISTRIBUTED_DEBUG=DETAIL.
        return is_last and torch_dist.get_debug_level() != torch_dist.DebugLevel.DETAIL

    def compare(self, mine: dict[str, str], can: bool = True) -> bool:
        """Compare the batch and what else has to be the same; returns whether all ranks can do what is next.

        Raises `RanksDifferError` on every rank, as `agree`.
        """
        name = f"number {self._number} of those compared before" if self._number else "a new one"
        all_can = agree(self._group, mine | {"batch": name}, can)
        if not self._number:
            self._number = _counts[self._group] = _counts.get(self._group, 0) + 1
        _last[self._group] = self._number
        return all_can


def agree(group: Any, mine: dict[str, str], can: bool = True) -> bool:
    """Compare what is to be the same on all ranks of a group; all of them call this.

    Returns whether all of them can do what they agree on. Raises `RanksDifferError`, on every rank, if
    something differs; it says what, and what two ranks have.
    """
    _last[group] = 0  # unless they agree, they compare before the next call, whatever it is
    all_ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(all_ranks, (mine, can), group=_on_cpu(group))
    for name in all_ranks[0][0]:
        values = [texts.get(name, "nothing") for texts, _ in all_ranks]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            raise RanksDifferError(
                f"context parallel: ranks differ in {name}: rank 0 has {values[0]}, rank {other} has "
                f"{values[other]}; expected the same on all {len(values)} ranks of the group"
            )
    return all(one for _, one in all_ranks)


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
    """Return a group of the same ranks that communicates on the CPU.

    It isn't the group itself, even if that could: ranks of which some compare and others go on would receive
    each other's messages, and gloo takes those that are too short.
    """
    if group not in _cpu_groups:
        ranks = dist.get_process_group_ranks(group)
        # Unless it is told, the new group would wait for gloo's 30 minutes.
        timeout = group._get_backend(group._device_types[0]).options._timeout
        _cpu_groups[group] = dist.new_group(ranks, timeout, "gloo", use_local_synchronization=True)
    return _cpu_groups[group]
