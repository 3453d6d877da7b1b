"""`context_parallel`: what a program makes once for each packed batch, and the calls spread by it."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from attnreg.dispatch import scope
from attnreg.errors import InvalidInputError, UnsupportedInputError
from attnreg.parallel.agreement import refuse
from attnreg.parallel.balance import spread_documents
from attnreg.parallel.batch import SpreadBatch
from attnreg.parallel.by_heads import AttentionByHeads, WholeBatch
from attnreg.parallel.by_heads import Work as WorkByHeads
from attnreg.parallel.calls import (
    Arguments,
    Kind,
    check_longest,
    check_refused,
    check_tensors,
    kind_of,
    problem_of,
    texts,
)
from attnreg.parallel.estimates import ALL_GATHER, ALL_TO_ALL, Rates
from attnreg.parallel.layout import Layout
from attnreg.parallel.methods import Choice, check_asked, check_possible, choose, explain_context_parallel
from attnreg.parallel.needs import Needs
from attnreg.parallel.parts import prepared
from attnreg.parallel.steps import gathering, rotating
from attnreg.parallel.stepwise import Options, StepwiseAttention, Work
from attnreg.torchlib.modes import autocast, is_transformed
from attnreg.varlen.spread import spread_over

__all__ = ["ContextParallel", "context_parallel"]


def context_parallel(
    group: dist.ProcessGroup | DeviceMesh,
    batch: Layout | Sequence[int] | Tensor,
    how: str | None = None,
    *,
    is_causal: bool | None = None,
    window_size: Sequence[int] | None = None,
    width: int | None = None,
    method: str = "auto",
    rates: Rates | None = None,
    memory: int | None = None,
) -> ContextParallel:
    """Spread a packed batch over the ranks of a group; all of them call this with the same batch.

    Args:
        group: the ranks; of a `DeviceMesh` one dimension, such as `mesh["cp"]`.
        batch: where each document begins in the whole batch, and the end of the last; or a `Layout`.
        how, is_causal, window_size, width: as of `spread_documents`, if `batch` is no layout. `how` is
            "contiguous" unless given. "balanced" needs the window of the calls to balance their work.
        method: "all_to_all", "all_gather" or "ring", or "auto": the fastest by an estimate.
        rates: what the estimate assumes of the machine.
        memory: how many bytes a call may take on a rank besides its inputs and results, for "auto"; unless
            given an eighth of the GPU's memory, and any number on a CPU.

    Raises:
        RanksDifferError: an argument is wrong on some ranks; the others get it from their first call.
        InvalidInputError: an argument is wrong on every rank, or the group is.
    """
    found: Any = group
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names = group.mesh_dim_names or ()
            raise InvalidInputError(f"group: got a mesh of dimensions {names}, expected one, as mesh['cp']")
        is_here = group.get_coordinate() is not None
        found = group.get_group() if is_here else dist.GroupMember.NON_GROUP_MEMBER
    if not isinstance(found, dist.ProcessGroup):
        if found is dist.GroupMember.NON_GROUP_MEMBER:
            raise InvalidInputError(
                "group: got one that this process isn't in, expected one that it is a rank of"
            )
        expected = "a process group (torch.distributed.group.WORLD is one after init_process_group) or a mesh"
        raise InvalidInputError(f"group: got {found!r}, expected {expected}")
    rates = Rates() if rates is None else rates
    try:
        check_asked(method, rates, memory)
        options = {"how": how, "is_causal": is_causal, "window_size": window_size, "width": width}
        layout = _layout(batch, dist.get_world_size(found), options)
    except Exception as error:  # noqa: BLE001 - the other ranks wait for this one, whatever it raises
        refuse(found, error)
    return ContextParallel(found, layout, method, rates, memory)


def _layout(batch: Layout | Sequence[int] | Tensor, ranks: int, options: dict[str, Any]) -> Layout:
    given = {name: got for name, got in options.items() if got is not None}
    if not isinstance(batch, Layout):
        return spread_documents(batch, ranks, **{"how": "contiguous"} | given)
    for name, got in given.items():
        raise InvalidInputError(f"{name}: got {got!r} with a Layout, expected none: the layout says it")
    if batch.ranks != ranks:
        raise InvalidInputError(
            f"batch: got a layout for {batch.ranks} ranks, expected {ranks}: the group has so many"
        )
    return batch


class ContextParallel(SpreadBatch):
    """A packed batch that is spread over the ranks of a group.

    Inside a `with` block of it every `attnreg.varlen_attn` of the process takes this rank's rows, with the
    offsets of the whole batch, and sees the keys of all ranks. Backward and activation checkpointing run
    forwards once more, so the block has to last until the backward is done.

    Attributes:
        group: the process group.
        rank: this process's rank in it.
        layout: which rank has which tokens.
        method: the method that was asked for, or "auto".
        taken: how many calls (forwards) went by each method.
    """

    def __init__(self, group: Any, layout: Layout, method: str, rates: Rates, memory: int | None) -> None:
        super().__init__(group, layout)
        self.method, self.taken = method, Counter[str]()
        self._rates, self._memory = rates, memory
        self._agreed: dict[Kind, str] = {}  # and the method that it goes by
        self._before: list[Any] = []

    def __enter__(self) -> Self:
        self._before.append(spread_over(self))
        return self

    def __exit__(self, *exc: object) -> None:
        if not self._before:
            raise InvalidInputError("context: got the end of a `with` block, expected its begin before")
        spread_over(self._before.pop())

    def explain(self, *, device: torch.device | str | None = None, **call: Any) -> Choice:
        """Say which method a call takes here, as `explain_context_parallel` does; no rank waits for others.

        Args:
            device: where the tensors are, whose memory "auto" looks at; the group's own unless given.
            call: those arguments of `explain_context_parallel` that are about the call: heads, head dims,
                dtype, mask, `needs_backward`.
        """
        if device is None:
            is_gpu = torch.cuda.is_available() and "nccl" in dist.get_backend_config(self.group)
            device = "cuda" if is_gpu else "cpu"
        for name in call.keys() & {"method", "rates", "memory"}:
            raise InvalidInputError(
                f"{name}: got {call[name]!r}, expected none: the context has its own; "
                "explain_context_parallel takes any"
            )
        call |= {"method": self.method, "rates": self._rates, "memory": self._most(torch.device(device))}
        return explain_context_parallel(self.layout, **call)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        offsets: dict[str, Tensor | None],
        lengths: dict[str, int],
        arguments: dict[str, Any],
        refused: dict[str, object],
    ) -> tuple[Tensor, Tensor | None]:
        """Return output and, if wanted, LSE of this rank's rows: what `varlen_attn` calls.

        Raises:
            RanksDifferError: on every rank, if ranks make different calls.
            InvalidInputError, UnsupportedInputError: on every rank, if all make the same wrong call; on this
                rank alone, if others make one that isn't compared.
        """
        if is_transformed():  # where other ranks can't be asked, either
            raise UnsupportedInputError(
                "group: got a call in a function transform or in forward-mode AD, expected one outside: "
                "calls spread over ranks have a backward alone"
            )
        kind, given = None, Arguments(**arguments)
        try:
            check_tensors(query, key, value, given, self.layout.rows[self.rank])
            query, key, value = autocast(query, key, value)
            kind = kind_of(query, key, value, given, self.longest)
            check_refused(refused)
            check_longest(lengths, self.longest)
            for name, tensor in offsets.items():
                self._check_offsets(name, tensor)
        except Exception as error:
            # Where the others make a call that isn't compared, they don't wait for this rank's word.
            if self._agreement.holds and (kind in self._agreed or (kind is None and self._agreed)):
                raise
            refuse(self.group, error)
        if kind in self._agreed and self._agreement.holds:
            work = self._work(self._agreed[kind], kind, given, query.device)
        else:
            work = self._compared(kind, given, (query, key, value))
        method = self._agreed[kind]
        self.taken[method] += 1
        function: Any = AttentionByHeads if method == ALL_TO_ALL else StepwiseAttention
        out, lse = function.apply(query, key, value, given.sinks, work)
        return out, lse if given.with_lse else None

    def _compared(
        self, kind: Kind, given: Arguments, tensors: tuple[Tensor, Tensor, Tensor]
    ) -> Work | WorkByHeads:
        """Return the work of a call that the ranks compare before it runs.

        Of the methods that "auto" may take it is the first whose calls kernels can run on all ranks.
        """
        device = tensors[0].device
        for number in itertools.count():
            try:
                methods = [self._agreed[kind]] if kind in self._agreed else self._methods(kind, device)
                work = self._work(methods[number], kind, given, device)
                problem = None if kind in self._agreed else problem_of(work.calls(*tensors), work.options)
                if problem is not None and number + 1 == len(methods):
                    raise problem
                mine = texts(kind, device, methods[number])
            except Exception as error:  # noqa: BLE001 - the other ranks wait for this one, whatever it raises
                refuse(self.group, error)
            if self._compare("forward", mine, problem is None):
                break
        self._agreed[kind] = methods[number]
        return work

    def _methods(self, kind: Kind, device: torch.device) -> list[str]:
        """Return the method of a call, and those that "auto" takes if no kernel can run that one."""
        if self.method != "auto":  # what each would take is of no use
            check_possible(self.method, kind.shape, self.layout.ranks)
            return [self.method]
        needs, memory = self._needs(kind.window), self._most(device)
        choice = choose(needs, kind.shape, self.method, self._rates, memory)
        return [choice.method, *choice.others]

    def _work(self, method: str, kind: Kind, given: Arguments, device: torch.device) -> Work | WorkByHeads:
        choice = scope.current() if given.backend is None else scope.exclusive(given.backend)
        needs_backward = kind.shape.needs_backward
        options = Options(kind.scale, kind.softcap, choice, needs_backward, self._before_backward)
        plan = self._plan(method, kind.window, device)
        if method != ALL_TO_ALL:
            return Work(plan, self.group, options)
        return WorkByHeads(plan, kind.window, self.group, options, given.with_lse)

    def _before_backward(self) -> None:
        if not self._agreement.holds:
            self._compare("backward", {})

    def _most(self, device: torch.device) -> int | None:
        """Return the memory that "auto" may take."""
        if self._memory is None and device.type == "cuda":
            return torch.cuda.get_device_properties(device).total_memory // 8
        return self._memory

    def _needs(self, bound: tuple[int, int]) -> Needs:
        needs: Needs = self._once(("needs", *bound), lambda: Needs(self.layout, *bound))
        return needs

    def _plan(self, method: str, bound: tuple[int, int], device: torch.device) -> Any:
        if method == ALL_TO_ALL:
            return self._once((method, device), lambda: WholeBatch.of(self.layout, self.rank, device))
        steps = gathering if method == ALL_GATHER else rotating
        of_rank = functools.partial(steps, self._needs(bound), self.rank)
        place = self.layout, self.rank, device, method == ALL_GATHER
        return self._once((method, *bound, device), lambda: prepared(of_rank(), *place))
