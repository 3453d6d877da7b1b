"""`context_parallel`: its arguments checked, and on every rank an error if they are wrong on one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from attnreg.core.varlen.plans import window
from attnreg.errors import InvalidInputError
from attnreg.parallel.agreement import refuse
from attnreg.parallel.balance import spread_documents
from attnreg.parallel.context import ContextParallel
from attnreg.parallel.estimates import Rates
from attnreg.parallel.layout import Layout
from attnreg.parallel.methods import check_asked

__all__ = ["context_parallel"]


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
        how: as of `spread_documents`, if `batch` is no layout; "contiguous" unless given.
        is_causal, window_size, width: what "balanced" counts by, as of `spread_documents`; refused with any
            other `how`. They don't reach the calls, each of which takes its own mask: at the first call with
            another one than was given here rank 0 logs a warning, as ranks may then have unequal work.
        method: "all_to_all", "all_gather" or "ring", or "auto": the fastest by an estimate.
        rates: what the estimate assumes of the machine. Unless given, the ranks of a group on GPUs measure
            link and matrix product before their first call, with 192 MiB of memory.
        memory: how many bytes a call may take on a rank besides its inputs and results, for "auto"; unless
            given an eighth of the GPU's memory, of the rank that has the least, and any number on a CPU.

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
    try:
        check_asked(method, rates, memory)
        options = {"how": how, "is_causal": is_causal, "window_size": window_size, "width": width}
        layout = _layout(batch, dist.get_world_size(found), method, options)
    except Exception as error:  # noqa: BLE001 - the other ranks wait for this one, whatever it raises
        refuse(found, error)
    is_given = is_causal is not None or window_size is not None
    balanced_for = window(window_size, is_causal is not False) if is_given else None
    return ContextParallel(found, layout, method, rates, memory, balanced_for)


def _layout(
    batch: Layout | Sequence[int] | Tensor, ranks: int, method: str, options: dict[str, Any]
) -> Layout:
    given = {name: got for name, got in options.items() if got is not None}
    if not isinstance(batch, Layout):
        how = given.setdefault("how", "contiguous")
        for name in [name for name in given if name != "how" and how in ("contiguous", "zigzag")]:
            raise InvalidInputError(
                f"{name}: got {given[name]!r} with how={how!r}, expected none: 'balanced' alone counts by "
                "it, and calls take their own mask"
            )
        return spread_documents(batch, ranks, method=method, **given)
    for name, got in given.items():
        raise InvalidInputError(f"{name}: got {got!r} with a Layout, expected none: the layout says it")
    if batch.ranks != ranks:
        raise InvalidInputError(
            f"batch: got a layout for {batch.ranks} ranks, expected {ranks}: the group has so many"
        )
    return batch
