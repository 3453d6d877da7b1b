"""The check that all ranks of a group are about to run the same distributed call, of the same batch.

What differs would make them wait for each other for ever, or send rows of wrong sizes or of another batch. So
the ranks exchange a few lines of text before the first call of each kind, and where the batch is another than
that of the call before; on the CPU: no GPU is waited for.
"""

from __future__ import annotations

import re
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, NoReturn

import torch._C._distributed_c10d as torch_dist
import torch.distributed as dist

from attnreg.core.torchlib.modes import is_plain
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

    def compare(self, mine: dict[str, str], said: Any = None) -> list[Any]:
        """Compare the batch and what else has to be the same, as `agree`."""
        name = f"number {self._number} of those compared before" if self._number else "a new one"
        all_said = agree(self._group, mine | {"batch": name}, said)
        if not self._number:
            self._number = _counts[self._group] = _counts.get(self._group, 0) + 1
        _last[self._group] = self._number
        return all_said


class _Problem(NamedTuple):
    """What is wrong on a rank.

    Attributes:
        mistake: the same for the same mistake: no address of an object, and no reasons of a rank's own rows.
        text: all of it.
    """

    mistake: str
    text: str

    @classmethod
    def of(cls, error: Exception) -> _Problem:
        text = str(error) if isinstance(error, AttnregError) else f"{type(error).__name__}: {error}"
        return cls(re.sub(r" at 0x[0-9a-fA-F]+", "", text.partition("\n")[0]), text)


def agree(group: Any, mine: dict[str, str], said: Any = None, problem: _Problem | None = None) -> list[Any]:
    """Compare what is to be the same on all ranks of a group; all of them call this.

    Returns what each rank says besides. Raises `RanksDifferError`, on every rank, if something differs, or if
    something is wrong on some ranks, or not the same on all; it says what two ranks have.
    """
    _last[group] = 0  # unless they agree, they compare before the next call, whatever it is
    try:
        all_ranks = _gathered(group, (mine, said, problem))
    except RuntimeError as lost:
        if problem is not None:
            raise  # what is wrong here says more
        raise RanksDifferError(
            f"context parallel: this rank compares its {mine.get('call', 'call')} with the others', and not "
            f"all came: they do something else, have ended, or need longer than the group's timeout ({lost})"
        ) from lost
    _check_problems([problem for _, _, problem in all_ranks])
    for name in dict.fromkeys(name for texts, _, _ in all_ranks for name in texts):
        values = [texts.get(name, "nothing") for texts, _, _ in all_ranks]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            raise RanksDifferError(
                f"context parallel: ranks differ in {name}: rank 0 has {values[0]}, rank {other} has "
                f"{values[other]}; expected the same on all {len(values)} ranks of the group"
            )
    return [said for _, said, _ in all_ranks]


def _check_problems(problems: list[_Problem | None]) -> None:
    found: dict[str, str] = {}
    for rank, problem in enumerate(problems):
        if problem is not None:
            found.setdefault(problem.mistake, f"rank {rank}'s call is wrong: {problem.text}")
    if len(found) > 1 or (found and None in problems):
        raise RanksDifferError("context parallel: " + "\n".join(list(found.values())[:2]))


def _gathered(group: Any, mine: Any) -> list[Any]:
    """Return what each rank gives."""

    def gather() -> list[Any]:
        all_ranks: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(all_ranks, mine, group=_on_cpu(group))
        return all_ranks

    if is_plain():
        return gather()
    # Function transforms and modes, in which a call is wrong, are of one thread.
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(gather).result()


def refuse(group: Any, error: Exception) -> NoReturn:
    """Raise what is wrong on this rank, once the others, which wait for it in `agree`, know of it."""
    try:
        agree(group, {}, problem=_Problem.of(error))
    except RanksDifferError as all_know:
        raise all_know from error
    except RuntimeError as lost:  # the others don't come, until the group's timeout or as they have ended
        raise error from lost
    raise error


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
