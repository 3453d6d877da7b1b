"""Ranks of one job choose by the same table, or say at the first call that they don't.

A rank that picks another kernel rounds otherwise, and what relies on ranks that agree bitwise breaks
long after the choice. So each rank tells what it chooses by where the job's ranks find each other, the
store of the default process group: the first to come leaves it there, the others compare. That is no
collective, so a rank that runs no attention keeps nobody waiting.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from attnreg.errors import RanksDifferError
from attnreg.torchlib.locks import open_after_fork

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attnreg.contract.discovery import Entry
    from attnreg.contract.spec import Device
    from attnreg.selection.decision import Policy

__all__ = ["agree"]

log = logging.getLogger("attnreg")


class Standing(NamedTuple):
    """What a rank chooses by on one kind of device; each field in words.

    Attributes:
        table: what tells the contents of the one in force from others; or that there is none.
        backends: those that load on that rank, with their versions.
        asked: what its operator asks for: orders of settings files and the environment, and what is disabled.
        lock: what tells the contents of its lockfile from others; or that there is none.
        named: what the table is called, or why there is none; no difference.
    """

    table: str
    backends: str
    asked: str
    lock: str
    named: str

    def differences(self, other: Standing) -> str:
        """Return in what another rank's differs, a part for each."""
        parts = list(zip(self._fields[1:4], self[1:4], other[1:4], strict=True))
        if self.table != other.table:
            parts.insert(0, ("table", f"{self.named} ({self.table})", f"{other.named} ({other.table})"))
        return "; ".join(f"{name} {mine}, there {theirs}" for name, mine, theirs in parts if mine != theirs)


_lock = open_after_fork(threading.Lock())
_compared: set[str] = set()
_store: Any = None
_inherited: Any = None


def agree(policy: Policy, entries: Mapping[str, Entry], device: Device) -> None:
    """Compare with the other ranks of the job, if there is one; once for each kind of device.

    What changes later isn't compared: ranks that run no attention in between couldn't know which change
    of theirs to compare with. Nor is what the program asks for by `register_backend` and on calls: it
    may mean one rank.

    Raises:
        RanksDifferError: another rank chooses otherwise; says in what.
    """
    global _store
    # Whoever has initialised it has imported it.
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return
    if device.simulated or distributed.get_world_size() < 2:
        return
    store = distributed.distributed_c10d._get_default_store()
    if store is _inherited:
        return  # a forked child's would talk over its parent's connection
    place = device.name or device.type
    with _lock:
        if store is not _store:
            _store = store
            _compared.clear()
        if place in _compared:
            return
        _compare(store, distributed.get_rank(), f"attnreg/{place}", _standing(policy, entries, device))
        _compared.add(place)


def _leave_the_parents_store() -> None:
    global _inherited
    distributed = sys.modules.get("torch.distributed")
    with contextlib.suppress(Exception):
        if distributed is not None and distributed.is_initialized():
            _inherited = distributed.distributed_c10d._get_default_store()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_the_parents_store)


def _standing(policy: Policy, entries: Mapping[str, Entry], device: Device) -> Standing:
    from attnreg.tuning.machine import environment

    shared = {name: entry for name, entry in entries.items() if not entry.own}
    loading = environment(device, shared).backends
    asked = [" ".join(one.names) for one in policy.preferences if one.required and one.governs(device)]
    asked += [f"not {name}" for name in sorted(policy.disabled)]
    table, named = _table(policy, device)
    return Standing(
        table,
        ", ".join(f"{name} {loading[name] or ''}".strip() for name in sorted(loading)) or "none",
        ", ".join(asked) or "nothing",
        "none" if policy.lock is None else f"contents {policy.lock.file.digest}",
        named,
    )


def _table(policy: Policy, device: Device) -> tuple[str, str]:
    if policy.tables is None:
        return "no table", 'policy = "order"'
    report = policy.tables.report(device)
    if report.in_force is None:
        return "no table", "; ".join(report.refused) or "the default order"
    routers = ", compiled routers" if policy.tables.compiled else ""  # by their times it is looked up
    return f"contents {report.in_force.digest}{routers}", report.in_force.table.name


def _compare(store: Any, rank: int, place: str, standing: Standing) -> None:
    mine = {"rank": rank, "host": socket.gethostname(), "standing": standing}
    try:
        # Sets the value if there is none, and returns the one that is there then.
        first = json.loads(store.compare_set(place, "", json.dumps(mine)))
        different = standing.differences(Standing(*first["standing"]))
    except Exception as error:  # noqa: BLE001 - a store that can't compare, one that is gone, another attnreg
        with contextlib.suppress(Exception):  # a handler that raises is no reason to fail a call
            log.warning("this job's ranks can't compare by what they choose kernels: %s", error)
        return
    if different:
        raise RanksDifferError(
            f"rank {rank} on {mine['host']} doesn't choose kernels as rank {first['rank']} on "
            f"{first['host']} does: {different}: ranks that choose differently don't agree bitwise; give all "
            "of them the same table, lock, packages and settings"
        )
