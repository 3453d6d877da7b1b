"""`context_parallel`: what a program makes once for each packed batch, and the calls spread by it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from attnreg.dispatch import scope
from attnreg.errors import InvalidInputError, UnsupportedInputError
from attnreg.parallel.agreement import agree, refuse
from attnreg.parallel.balance import spread_documents
from attnreg.parallel.by_heads import AttentionByHeads, WholeBatch
from attnreg.parallel.by_heads import Work as WorkByHeads
from attnreg.parallel.calls import (
    Arguments,
    Kind,
    check_kernels,
    check_longest,
    check_offsets,
    check_refused,
    check_tensors,
    check_tokens,
    kind_of,
    texts,
    texts_of_layout,
)
from attnreg.parallel.estimates import ALL_GATHER, ALL_TO_ALL, Rates
from attnreg.parallel.layout import Layout
from attnreg.parallel.parts import on_device, prepared
from attnreg.parallel.steps import Needs, gathering, rotating
from attnreg.parallel.stepwise import Options, StepwiseAttention, Work
from attnreg.parallel.ways import check_asked, choose
from attnreg.torchlib.modes import autocast, is_transformed
from attnreg.varlen import front, plans

__all__ = ["ContextParallel", "context_parallel"]

# So many offsets aren't read once more: a program that makes new ones for each call has no use for them.
MOST_OFFSETS = 16


def context_parallel(
    group: dist.ProcessGroup | DeviceMesh,
    batch: Layout | Sequence[int] | Tensor,
    how: str | None = None,
    *,
    is_causal: bool | None = None,
    method: str = "auto",
    rates: Rates | None = None,
    memory: int | None = None,
) -> ContextParallel:
    """Spread a packed batch over the ranks of a group; all of them call this with the same batch.

    Args:
        group: the ranks; of a `DeviceMesh` one dimension, such as `mesh["cp"]`.
        batch: where each document begins in the whole batch, and the end of the last; or a `Layout`.
        how, is_causal: as of `spread_documents`, if `batch` is no layout: "contiguous" and True unless given.
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
        layout = _layout(batch, dist.get_world_size(found), how, is_causal)
    except Exception as error:  # noqa: BLE001 - the other ranks wait for this one, whatever it raises
        refuse(found, error)
    return ContextParallel(found, layout, method, rates, memory)


def _layout(
    batch: Layout | Sequence[int] | Tensor, ranks: int, how: str | None, is_causal: bool | None
) -> Layout:
    if not isinstance(batch, Layout):
        how, is_causal = "contiguous" if how is None else how, True if is_causal is None else is_causal
        return spread_documents(batch, ranks, how, is_causal=is_causal)
    for name, got in (("how", how), ("is_causal", is_causal)):
        if got is not None:
            raise InvalidInputError(f"{name}: got {got!r} with a Layout, expected none: the layout says it")
    if batch.ranks != ranks:
        raise InvalidInputError(
            f"batch: got a layout for {batch.ranks} ranks, expected {ranks}: the group has so many"
        )
    return batch


class ContextParallel:
    """A packed batch that is spread over the ranks of a group.

    Inside a `with` block of it every `attnreg.varlen_attn` of the process takes this rank's rows, with the
    offsets of the whole batch, and sees the keys of all ranks. Backward and activation checkpointing run
    forwards once more, so the block has to last until the backward is done.

    Attributes:
        group: the process group.
        rank: this process's rank in it.
        layout: which rank has which tokens.
        method: the way that was asked for, or "auto".
    """

    def __init__(self, group: Any, layout: Layout, method: str, rates: Rates, memory: int | None) -> None:
        self.group, self.layout, self.method = group, layout, method
        self.rank = dist.get_rank(group)
        self._rates, self._memory = rates, memory
        self._agreed: dict[Kind, str] = {}  # and the way that it goes
        self._gathered: set[tuple[object, ...]] = set()  # what of tensors ranks have agreed on
        self._made: dict[tuple[object, ...], Any] = {}
        self._known_offsets: list[tuple[Tensor, int]] = []
        self._before: list[Any] = []

    # The batch

    def shard(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """Return this rank's part of a tensor that has the tokens of the whole batch along `dim`."""
        check_tokens(tensor, dim, self.layout.tokens, "of the whole batch")
        return tensor.index_select(dim, self._rows(self.rank, tensor.device))

    def gather(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """Return the whole batch's tensor from the parts of all ranks, which all call this; no gradient.

        Raises `RanksDifferError`, on every rank, if ranks differ in layout, shape or dtype.
        """
        here, most = self.layout.rows[self.rank], max(self.layout.rows)
        try:
            check_tokens(tensor, dim, here, "of this rank")
            if tensor.requires_grad and torch.is_grad_enabled():
                raise InvalidInputError(
                    "tensor: got one that needs a gradient, expected none: pass tensor.detach()"
                )
        except Exception as error:
            if self._gathered:
                raise
            refuse(self.group, error)
        rows = tensor.movedim(dim, 0)
        kind = tuple(rows.shape[1:]), str(rows.dtype), rows.device.type
        if kind not in self._gathered:
            names = "shape of a row", "dtype", "device"
            agree(self.group, texts_of_layout(self.layout) | dict(zip(names, map(str, kind), strict=True)))
            self._gathered.add(kind)
        padded = rows.new_zeros((most, *rows.shape[1:]))
        padded[:here] = rows
        parts = [torch.empty_like(padded) for _ in range(self.layout.ranks)]
        dist.all_gather(parts, padded, group=self.group)
        whole = rows.new_empty((self.layout.tokens, *rows.shape[1:]))
        for rank, count in enumerate(self.layout.rows):
            whole[self._rows(rank, whole.device)] = parts[rank][:count]
        return whole.movedim(0, dim)

    def positions(self, device: torch.device | str = "cpu") -> Tensor:
        """Return the position of each of this rank's tokens in its document, for rotary embeddings."""
        # A copy, as programs write to it: adding an offset to all is one operation.
        return self._on("positions", device, lambda: self.layout.positions(self.rank)).clone()

    def cu_seq(self, device: torch.device | str = "cpu") -> Tensor:
        """Return the offsets of the whole batch, int32, as `varlen_attn` takes them."""
        made = self._on("cu_seq", device, lambda: torch.tensor(self.layout.cu_seq).int())
        if all(tensor is not made for tensor, _ in self._known_offsets):
            self._known_offsets.append((made, made._version))
        return made

    @functools.cached_property
    def longest(self) -> int:
        """The longest document, in tokens: `max_q` and `max_k` of `varlen_attn`."""
        return max((end - begin for begin, end in itertools.pairwise(self.layout.cu_seq)), default=0)

    def _rows(self, rank: int, device: torch.device) -> Tensor:
        return self._on(f"rows of {rank}", device, lambda: self.layout.index(rank))

    def _on(self, what: str, device: torch.device | str, make: Callable[[], Tensor]) -> Tensor:
        device = torch.device(device)
        tensor: Tensor = self._once((what, device), lambda: on_device(make(), device))
        return tensor

    # Calls

    def __enter__(self) -> Self:
        self._before.append(front.spread_over(self))
        return self

    def __exit__(self, *exc: object) -> None:
        front.spread_over(self._before.pop())

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
                rank alone, if others make one of a kind that all have agreed on.
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
            method = self._agreed.get(kind) or self._choose(kind, query.device)
            work = self._work(method, kind, given, query.device)
            if kind not in self._agreed:
                check_kernels(work.calls(query, key, value), work.options)
                mine = texts(self.layout, kind, query.device, method)
        except Exception as error:
            # Where the others make a call of a kind that is agreed on, they don't wait for this rank's word.
            if kind in self._agreed or (kind is None and self._agreed):
                raise
            refuse(self.group, error)
        if kind not in self._agreed:
            agree(self.group, mine)
            self._agreed[kind] = method
        way: Any = AttentionByHeads if method == ALL_TO_ALL else StepwiseAttention
        out, lse = way.apply(query, key, value, given.sinks, work)
        return out, lse if given.with_lse else None

    def _work(self, method: str, kind: Kind, given: Arguments, device: torch.device) -> Work | WorkByHeads:
        choice = scope.current() if given.backend is None else scope.exclusive(given.backend)
        options = Options(kind.scale, kind.softcap, choice, kind.shape.needs_backward)
        plan = self._plan(method, kind.window, device)
        if method != ALL_TO_ALL:
            return Work(plan, self.group, options)
        return WorkByHeads(plan, kind.window, self.group, options, given.with_lse)

    def _choose(self, kind: Kind, device: torch.device) -> str:
        memory = self._memory
        if memory is None and device.type == "cuda":
            memory = torch.cuda.get_device_properties(device).total_memory // 8
        return choose(self._needs(kind.window), kind.shape, self.method, self._rates, memory).method

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

    def _once(self, what: tuple[object, ...], make: Callable[[], Any]) -> Any:
        if what not in self._made:
            with torch.inference_mode(False):  # what is kept has to serve later calls with gradients, too
                self._made[what] = make()
        return self._made[what]

    def _check_offsets(self, name: str, offsets: Tensor | None) -> None:
        plans.check_tensors(**{name: offsets})
        version = None if offsets is None or offsets.is_inference() else offsets._version
        if not any(known is offsets and seen == version for known, seen in self._known_offsets):
            check_offsets(name, offsets, self.layout)
            if offsets is not None and version is not None:
                self._known_offsets.append((offsets, version))
                del self._known_offsets[:-MOST_OFFSETS]
