"""Check, once per process group, that all ranks of a job choose kernels from the same inputs.

A rank that picks another kernel rounds differently, and whatever relies on bitwise equal ranks breaks long
after the choice. So the first rank that runs attention leaves a record of its inputs in the store of the
default process group, and the others compare theirs with it. This is no collective: a rank that runs no
attention keeps no other waiting.

A record has to go with its group, but a store may live longer: torchrun's serves all groups of a job, and
so does one that a program passes to `init_process_group` twice. Hence

- no strong reference to the store outlives a check (see `torchlib.job_store`);
- every rank knows by its id a record that it has seen in an earlier group, and replaces it;
- under torchrun a rank takes its record back when its group is destroyed, for ranks that haven't seen it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import uuid
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

from attnreg.core.contract.spec import Device
from attnreg.core.registry.entry import Entry
from attnreg.core.selection.decision import BATCH_INVARIANT, Policy
from attnreg.core.times.environments import environment
from attnreg.core.torchlib import job_store
from attnreg.core.torchlib.locks import open_after_fork
from attnreg.errors import RanksDifferError

log = logging.getLogger("attnreg")

# TCPStore.compare_set waits for its host without a timeout. The check isn't worth longer, and never waits
# longer than the group's own timeout.
LONGEST_WAIT_S = 60.0
LONGEST_WITHDRAWAL_S = 5.0


class Inputs(NamedTuple):
    """What the choices of a rank depend on, for one kind of device; each field as text.

    Attributes:
        table: digest of the measured table in force, or "no table".
        backends: those that load on that rank, with their versions.
        requested: preferences and disabled backends from the environment and from settings files.
        lock: digest of the lockfile, or "none".
        table_name: name of the table, or why there is none; not compared.
    """

    table: str
    backends: str
    requested: str
    lock: str
    table_name: str

    def differences(self, other: Inputs) -> str:
        """Return how these inputs differ from another rank's, or an empty string."""
        parts = list(zip(self._fields[1:4], self[1:4], other[1:4], strict=True))
        if self.table != other.table:
            mine, theirs = (f"{one.table_name} ({one.table})" for one in (self, other))
            parts.insert(0, ("table", mine, theirs))
        return "; ".join(f"{name} {mine}, there {theirs}" for name, mine, theirs in parts if mine != theirs)


_lock = open_after_fork(threading.RLock())
_compared: set[str] = set()  # kinds of devices, in the group whose store is `_store`
_seen: set[str] = set()  # ids of that group's records
_stale: set[str] = set()  # ids of earlier groups' records
_store: weakref.ref[Any] | None = None


def agree(policy: Policy, entries: Mapping[str, Entry], device: Device) -> None:
    """Compare this rank's inputs with those of the job's other ranks, once per group and kind of device.

    Later changes aren't compared: ranks that run no attention in between couldn't know which change
    of theirs to compare with. Nor is what the program asks for by `register_backend` and on calls: it
    may be meant for one rank.

    If another rank's inputs are different, a `RanksDifferError` names the difference.
    """
    if device.simulated or (store := job_store.default()) is None:
        return
    place, rank = device.name or device.type, job_store.group_of_several().get_rank()
    if _was_compared(store, place):
        return
    inputs = _inputs(policy, entries, device)  # not behind the lock: backends are asked whether they load
    with _lock:
        difference = "" if _was_compared(store, place) else _compare(store, rank, place, inputs)
        if not difference:
            _compared.add(place)
    del store  # the error below keeps this frame alive
    if difference:
        raise RanksDifferError(difference)


def _was_compared(store: Any, place: str) -> bool:
    """Whether this kind of device was compared with that of the other ranks in the group of a store."""
    global _store
    with _lock:
        if _store is None or store is not _store():  # the first call of another group
            _store = weakref.ref(store)
            _stale.update(_seen)
            _seen.clear()
            _compared.clear()
        return place in _compared


def place() -> str:
    """Return which rank of a job this is, as the beginning of a reason that is true of it alone; or ''."""
    distributed = job_store.group_of_several()
    if distributed is None:
        return ""
    return f"on rank {distributed.get_rank()} (ranks that choose differently don't agree bitwise): "


def _inputs(policy: Policy, entries: Mapping[str, Entry], device: Device) -> Inputs:
    shared = {name: entry for name, entry in entries.items() if not entry.own}
    loading = environment(device, shared).backends
    requested = [" ".join(one.names) for one in policy.preferences if one.required and one.applies_to(device)]
    requested += [f"not {name}" for name in sorted(policy.disabled)]
    requested += ['policy = "adaptive"'] if policy.adaptive is not None else []
    requested += [BATCH_INVARIANT] if policy.batch_invariant else []
    table, table_name = _table(policy, device)
    return Inputs(
        table,
        ", ".join(f"{name} {loading[name] or ''}".strip() for name in sorted(loading)) or "none",
        ", ".join(requested) or "nothing",
        "none" if policy.lock is None else f"contents {policy.lock.digest}",
        table_name,
    )


def _table(policy: Policy, device: Device) -> tuple[str, str]:
    if policy.tables is None:
        return "no table", BATCH_INVARIANT if policy.batch_invariant else 'policy = "order"'
    return policy.tables.identity(device)


def _compare(store: Any, rank: int, place: str, inputs: Inputs) -> str:
    """Return the sentence that says how this rank differs from the first one; empty if it doesn't."""
    host, key = socket.gethostname(), f"attnreg/{place}"
    mine = json.dumps({"id": uuid.uuid4().hex, "rank": rank, "host": host, "inputs": inputs})
    found: list[str] = []
    try:
        group_timeout = store.timeout.total_seconds() if hasattr(store, "timeout") else LONGEST_WAIT_S
        job_store.within(
            min(group_timeout, LONGEST_WAIT_S), lambda: found.append(_first_record(store, key, mine))
        )
        first = json.loads(found[0])
        _seen.add(first["id"])
        different = inputs.differences(Inputs(*first["inputs"]))
    except Exception as error:  # noqa: BLE001 - a store that is gone, stalled or can't compare, another attnreg
        with contextlib.suppress(Exception):  # a log handler that raises must not fail a call
            log.warning("this job's ranks can't compare what their choices of kernels depend on: %s", error)
        return ""
    if found[0] == mine:
        _withdraw_with_group(store, place, mine)
    if not different:
        return ""
    return (
        f"rank {rank} on {host} doesn't choose kernels as rank {first['rank']} on "
        f"{first['host']} does: {different}: ranks that choose differently don't agree bitwise; give all "
        "of them the same table, lock, packages and settings"
    )


def _first_record(store: Any, key: str, mine: str) -> str:
    """Leave a record unless another rank of the group has left one; return the one that is there then."""
    first: str = store.compare_set(key, "", mine).decode()
    if json.loads(first).get("id") in _stale:
        # Two ranks may both find it: the second gets the record of the first.
        first = store.compare_set(key, first, mine).decode()
    return first


def _withdraw_with_group(store: Any, place: str, mine: str) -> None:
    """Take the record back when torch drops its reference to the store, which is when the group ends.

    Only under torchrun, whose agent outlives its workers: elsewhere rank 0 serves the store, and may be gone.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    from torch.distributed.distributed_c10d import PrefixStore

    # Another reference to the same connection, which goes with torch's own.
    alias, owner = PrefixStore("attnreg", store), os.getpid()

    def withdraw(alias: Any) -> None:
        if os.getpid() == owner:
            with contextlib.suppress(Exception):
                # An empty value counts as none, and another rank's record stays.
                job_store.within(LONGEST_WITHDRAWAL_S, lambda: alias.compare_set(place, mine, ""))

    weakref.finalize(store, withdraw, alias).atexit = False
