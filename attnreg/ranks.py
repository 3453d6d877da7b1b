"""Ranks of one job choose by the same table, or say at the first call that they don't.

A rank that picks another kernel rounds otherwise, and what relies on ranks that agree bitwise breaks
long after the choice. So each rank tells what it chooses by where the job's ranks find each other, the
store of the default process group: the first to come leaves it there, the others compare. That is no
collective, so a rank that runs no attention keeps nobody waiting.
"""

from __future__ import annotations

import json
import logging
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from attnreg.errors import RanksDifferError
from attnreg.locks import open_after_fork

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attnreg.discovery import Entry
    from attnreg.spec import Device
    from attnreg.tuning.tables import Tables

__all__ = ["agree"]

log = logging.getLogger("attnreg")


class Standing(NamedTuple):
    """What a rank chooses by on one kind of device.

    Attributes:
        by: the table in words, or why there is none.
        digest: of the table; empty for none.
        missing: the measured backends that don't load on that rank.
    """

    by: str
    digest: str = ""
    missing: tuple[str, ...] = ()

    def chooses_like(self, other: Standing) -> bool:
        """Whether both pick the same kernel for every call."""
        return (self.digest, self.missing) == (other.digest, other.missing)

    def __str__(self) -> str:
        parts = [f"contents {self.digest}"] if self.digest else []
        parts += [f"without {' and '.join(self.missing)}"] if self.missing else []
        return f"{self.by} ({', '.join(parts)})" if parts else self.by


class _Job:
    """What this process has told its job so far; one for each store."""

    def __init__(self, store: Any, rank: int) -> None:
        self.store = store
        self.rank = rank
        self.told: dict[str, list[Standing]] = {}


_lock = open_after_fork(threading.Lock())
_job: _Job | None = None


def agree(tables: Tables | None, entries: Mapping[str, Entry], device: Device) -> None:
    """Compare with the other ranks of the job, if there is one; asks once for each table in force.

    A change of tables in the middle of a job is compared with the other ranks' change of the same number.

    Raises:
        RanksDifferError: another rank chooses otherwise; says by what each of the two does.
    """
    # Whoever has initialised it has imported it.
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return
    if device.simulated or distributed.get_world_size() < 2:
        return
    standing = _standing(tables, entries, device)
    with _lock:
        job = _joined(distributed)
        told = job.told.setdefault(device.type, [])
        if told and told[-1] == standing:
            return
        _compare(job, f"attnreg/{device.type}/{len(told)}", standing)
        told.append(standing)


def _joined(distributed: Any) -> _Job:
    global _job
    store = distributed.distributed_c10d._get_default_store()
    if _job is None or _job.store is not store:
        _job = _Job(store, distributed.get_rank())
    return _job


def _standing(tables: Tables | None, entries: Mapping[str, Entry], device: Device) -> Standing:
    if tables is None:
        return Standing('policy = "order"')
    report = tables.report(device)
    if report.in_force is None:
        return Standing(f"the default order ({'; '.join(report.refused) or 'there is no table'})")
    from attnreg.tuning.machine import environment

    measured = report.in_force.table.environment.backends
    missing = sorted(set(measured) - set(environment(device, entries).backends))
    return Standing(str(report.in_force), report.in_force.digest, tuple(missing))


def _compare(job: _Job, place: str, standing: Standing) -> None:
    mine = {"rank": job.rank, "host": socket.gethostname(), "standing": standing}
    try:
        # Sets the value if there is none, and returns the one that is there then.
        first = json.loads(job.store.compare_set(place, "", json.dumps(mine)))
    except Exception as error:  # noqa: BLE001 - a store that can't compare, or one whose host is gone
        log.warning("this job's ranks can't compare by what they choose kernels: %s", error)
        return
    by, digest, missing = first["standing"]
    other = Standing(by, digest, tuple(missing))
    if not standing.chooses_like(other):
        raise RanksDifferError(
            f"rank {job.rank} on {mine['host']} chooses kernels by {standing}, rank {first['rank']} on "
            f"{first['host']} by {other}: ranks that choose differently don't agree bitwise; give all of "
            'them the same table and packages, or set policy = "order"'
        )
