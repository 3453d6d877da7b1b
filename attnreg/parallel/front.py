"""`context_parallel`: it checks its arguments, and raises on every rank if they are wrong on any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from attnreg.core.torchlib.frames import leave_module_uncompiled
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
        group: the ranks: a process group, or a `DeviceMesh` of one dimension, such as `mesh["cp"]`.
        batch: a `Layout`, or the offsets (documents + 1,), integers: each document's begin in the whole
            batch, and the batch's end.
        how: as for `spread_documents`; by default "contiguous". An error if `batch` is a layout.
        is_causal, window_size, width: the mask and the width that "balanced" counts by, as for
            `spread_documents`. An error with any other `how`. Calls have masks of their own. If a call's
            window differs from `window_size`, ranks may have unequal work, and rank 0 logs a warning once.
        method: "all_to_all", "all_gather" or "ring", or "auto": the fastest by an estimate.
        rates: what the estimate assumes of the machine. By default the ranks of a group on GPUs measure link
            and matrix product before their first call, with 192 MiB of memory.
        memory: for "auto": the most bytes that a call may need on a rank besides its inputs and results. The
            default is an eighth of the memory of the smallest GPU, and no limit on a CPU.

    Raises:
        RanksDifferError: an argument is wrong on some ranks. The other ranks raise it in their first call.
        InvalidInputError: an argument is wrong on every rank, or the group is wrong.
    """
    process_group: Any = group
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names = group.mesh_dim_names or ()
            raise InvalidInputError(f"group: got a mesh of dimensions {names}, expected one, as mesh['cp']")
        is_here = group.get_coordinate() is not None
        process_group = group.get_group() if is_here else dist.GroupMember.NON_GROUP_MEMBER
    if not isinstance(process_group, dist.ProcessGroup):
        if process_group is dist.GroupMember.NON_GROUP_MEMBER:
            raise InvalidInputError(
                "group: got one that this process isn't in, expected one that it is a rank of"
            )
        expected = "a process group (torch.distributed.group.WORLD is one after init_process_group) or a mesh"
        raise InvalidInputError(f"group: got {process_group!r}, expected {expected}")
    try:
        check_asked(method, rates, memory)
        options = {"how": how, "is_causal": is_causal, "window_size": window_size, "width": width}
        layout = _layout(batch, dist.get_world_size(process_group), method, options)
    except Exception as error:  # noqa: BLE001 - the other ranks wait for this one, whatever it raises
        refuse(process_group, error)
    is_given = is_causal is not None or window_size is not None
    balanced_for = window(window_size, is_causal is not False) if is_given else None
    return ContextParallel(process_group, layout, method, rates, memory, balanced_for)


def _layout(
    batch: Layout | Sequence[int] | Tensor, ranks: int, method: str, options: dict[str, Any]
) -> Layout:
    options = {name: got for name, got in options.items() if got is not None}
    if not isinstance(batch, Layout):
        how = options.setdefault("how", "contiguous")
        for name in [name for name in options if name != "how" and how in ("contiguous", "zigzag")]:
            raise InvalidInputError(
                f"{name}: got {options[name]!r} with how={how!r}, expected none: 'balanced' alone counts by "
                "it, and calls take their own mask"
            )
        return spread_documents(batch, ranks, method=method, **options)
    for name, got in options.items():
        raise InvalidInputError(f"{name}: got {got!r} with a Layout, expected none: the layout says it")
    if batch.ranks != ranks:
        raise InvalidInputError(
            f"batch: got a layout for {batch.ranks} ranks, expected {ranks}: the group has so many"
        )
    return batch


leave_module_uncompiled(__name__)
