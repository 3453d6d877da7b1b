"""The check that all ranks of a group are about to run the same distributed call, of the same batch.

Ranks with different calls would wait for each other for ever, or send rows of wrong sizes or of another
batch. So ranks exchange a few lines of text before the first call of each kind, and whenever the batch
changes. The exchange runs on the CPU: no rank waits for a GPU.
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

# By group: how many batches its ranks have compared, and the number of the batch used last, 0 for none.
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
        """Whether ranks needn't compare, because their previous call was of this batch, too."""
        is_last = 0 < self._number == _last.get(self._group)
        # With TORCH_DISTRIBUTED_DEBUG=DETAIL torch compares every collective, so ranks always compare here,
        # too.
        return is_last and torch_dist.get_debug_level() != torch_dist.DebugLevel.DETAIL

    def compare(self, mine: dict[str, str], extra: Any = None) -> list[Any]:
        """Compare the batch and `mine`, by `agree`; return each rank's `extra`."""
        name = f"number {self._number} of those compared before" if self._number else "a new one"
        extras = agree(self._group, mine | {"batch": name}, extra)
        if not self._number:
            self._number = _counts[self._group] = _counts.get(self._group, 0) + 1
        _last[self._group] = self._number
        return extras


class _Problem(NamedTuple):
    """An error on a rank, as text.

    Attributes:
        mistake: the first line without addresses of objects: equal for equal mistakes, whatever a rank's
            rows.
        text: the whole message.
    """

    mistake: str
    text: str

    @classmethod
    def of(cls, error: Exception) -> _Problem:
        text = str(error) if isinstance(error, AttnregError) else f"{type(error).__name__}: {error}"
        return cls(re.sub(r" at 0x[0-9a-fA-F]+", "", text.partition("\n")[0]), text)


def agree(group: Any, mine: dict[str, str], extra: Any = None, problem: _Problem | None = None) -> list[Any]:
    """Compare `mine` over all ranks of a group, which all call this; return each rank's `extra`.

    Raises:
        RanksDifferError: on every rank, if `mine` differs, or if ranks have different problems or only some
            have one. The message has the values of two ranks.
    """
    _last[group] = 0  # ranks that don't agree compare before their next call, of whatever batch
    try:
        all_ranks = _gathered(group, (mine, extra, problem))
    except RuntimeError as lost:
        if problem is not None:
            raise  # this rank's own problem is more informative
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
    return [extra for _, extra, _ in all_ranks]


def _check_problems(problems: list[_Problem | None]) -> None:
    messages: dict[str, str] = {}
    for rank, problem in enumerate(problems):
        if problem is not None:
            messages.setdefault(problem.mistake, f"rank {rank}'s call is wrong: {problem.text}")
    if len(messages) > 1 or (messages and None in problems):
        raise RanksDifferError("context parallel: " + "\n".join(list(messages.values())[:2]))


def _gathered(group: Any, mine: Any) -> list[Any]:
    """Return each rank's `mine`."""

    def gather() -> list[Any]:
        all_ranks: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(all_ranks, mine, group=_on_cpu(group))
        return all_ranks

    if is_plain():
        return gather()
    # Function transforms and modes, in which a call is wrong, apply to one thread: another is free of them.
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(gather).result()


def refuse(group: Any, error: Exception) -> NoReturn:
    """Raise this rank's error, after sending it to the other ranks, which wait in `agree`."""
    try:
        agree(group, {}, problem=_Problem.of(error))
    except RanksDifferError as all_know:
        raise all_know from error
    except RuntimeError as lost:  # the other ranks have ended, or the group's timeout is over
        raise error from lost
    raise error


def _on_cpu(group: Any) -> Any:
    """Return a group of the same ranks that communicates on the CPU.

    It is never the group itself, even if this communicates on the CPU. Some ranks may compare while others
    go on, and would receive each other's messages; gloo accepts messages that are too short.
    """
    if group not in _cpu_groups:
        ranks = dist.get_process_group_ranks(group)
        # Without a timeout of its own the new group would wait for gloo's 30 minutes.
        timeout = group._get_backend(group._device_types[0]).options._timeout
        _cpu_groups[group] = dist.new_group(ranks, timeout, "gloo", use_local_synchronization=True)
    return _cpu_groups[group]
