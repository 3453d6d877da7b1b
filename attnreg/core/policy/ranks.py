"""Check, once per process group, that all ranks of a job choose kernels from the same inputs.

A rank that chooses another kernel rounds differently, and code that relies on bitwise equal ranks breaks long
after the choice. So the first rank that runs attention writes a record of its inputs to the store of the
default process group, and the other ranks compare their inputs with the record. This is no collective: no
rank waits for a rank that runs no attention.

A record has to end with its group, but a store may outlive the group. torchrun's store serves all groups of a
job. So does a store that a program passes to `init_process_group` twice. Hence:

- No strong reference to the store outlives a check. See `torchlib.job_store`.
- Every rank remembers the ids of records of earlier groups, and replaces such a record.
- Under torchrun a rank removes its record when its group is destroyed, for ranks that haven't seen it.
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
from dataclasses import replace
from typing import Any, NamedTuple

from attnreg.core.contract.spec import Device
from attnreg.core.registry.entry import Entry
from attnreg.core.selection.decision import BATCH_INVARIANT, Policy
from attnreg.core.times.environments import environment
from attnreg.core.torchlib import job_store
from attnreg.core.torchlib.locks import open_after_fork
from attnreg.errors import RanksDifferError

log = logging.getLogger("attnreg")

# TCPStore.compare_set waits for its host without a timeout. The check isn't worth a longer wait, and never
# waits longer than the group's own timeout.
LONGEST_WAIT_S = 60.0
LONGEST_WITHDRAWAL_S = 5.0


class ChoiceInputs(NamedTuple):
    """The inputs of a rank's choices for one kind of device, as text.

    Attributes:
        table: the digest of the measured table in force, or "no table".
        backends: the backends that load on the rank, with their versions.
        requested: preferred and disabled backends of the environment and of settings files.
        lock: the digest of the lockfile, or "none".
        table_name: the table's name, or why there is no table; not compared.
    """

    table: str
    backends: str
    requested: str
    lock: str
    table_name: str

    def differences(self, other: ChoiceInputs) -> str:
        """Return how these inputs differ from another rank's, or an empty string."""
        parts = list(zip(self._fields[1:4], self[1:4], other[1:4], strict=True))
        if self.table != other.table:
            mine, theirs = (f"{inputs.table_name} ({inputs.table})" for inputs in (self, other))
            parts.insert(0, ("table", mine, theirs))
        return "; ".join(f"{name} {mine}, there {theirs}" for name, mine, theirs in parts if mine != theirs)


_lock = open_after_fork(threading.RLock())
_compared: set[str] = set()  # kinds of devices, in the group whose store is `_store`
_seen: set[str] = set()  # ids of that group's records
_stale: set[str] = set()  # ids of earlier groups' records
_store: weakref.ref[Any] | None = None


def agree(policy: Policy, entries: Mapping[str, Entry], device: Device) -> None:
    """Compare this rank's inputs with the other ranks', once for each group and kind of device.

    Later changes aren't compared, because ranks that run no attention in between couldn't know which of their
    changes corresponds. Requests by `register_backend` and on calls aren't compared, because they may be
    meant for a single rank.

    Raises:
        RanksDifferError: another rank has different inputs. The message names the difference.
    """
    if device.simulated or (store := job_store.default()) is None:
        return
    place, rank = device.name or device.type, job_store.group_of_several().get_rank()
    if _was_compared(store, place):
        return
    inputs = _inputs(policy, entries, device)  # outside the lock, because this checks whether backends load
    with _lock:
        difference = "" if _was_compared(store, place) else _compare(store, rank, place, inputs)
        if not difference:
            _compared.add(place)
    del store  # the error below keeps this frame alive
    if difference:
        raise RanksDifferError(difference)


def _was_compared(store: Any, place: str) -> bool:
    """Whether this kind of device was already compared in the group of a store."""
    global _store
    with _lock:
        if _store is None or store is not _store():  # the first call of another group
            _store = weakref.ref(store)
            _stale.update(_seen)
            _seen.clear()
            _compared.clear()
        return place in _compared


def place() -> str:
    """Return the beginning of a reason that holds on this rank of a job alone; empty without a job."""
    distributed = job_store.group_of_several()
    if distributed is None:
        return ""
    return f"on rank {distributed.get_rank()} (ranks that choose differently don't agree bitwise): "


def _inputs(policy: Policy, entries: Mapping[str, Entry], device: Device) -> ChoiceInputs:
    asked = replace(policy, preferences=tuple(each for each in policy.preferences if each.required))
    shared = {
        name: entry
        for name, entry in entries.items()
        if not entry.own and (not entry.on_request or (asked.asks_for(name, device) and entry.open()))
    }
    loading = environment(device, shared).backends
    requested = [
        " ".join(preference.names)
        for preference in policy.preferences
        if preference.required and preference.applies_to(device)
    ]
    requested += [f"not {name}" for name in sorted(policy.disabled)]
    requested += ['policy = "adaptive"'] if policy.adaptive is not None else []
    requested += [BATCH_INVARIANT] if policy.batch_invariant else []
    table, table_name = _table(policy, device)
    return ChoiceInputs(
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


def _compare(store: Any, rank: int, place: str, inputs: ChoiceInputs) -> str:
    """Return a sentence on how this rank differs from the first rank; empty if it doesn't."""
    host, key = socket.gethostname(), f"attnreg/{place}"
    mine = json.dumps({"id": uuid.uuid4().hex, "rank": rank, "host": host, "inputs": inputs})
    records: list[str] = []
    try:
        group_timeout = store.timeout.total_seconds() if hasattr(store, "timeout") else LONGEST_WAIT_S
        job_store.within(
            min(group_timeout, LONGEST_WAIT_S), lambda: records.append(_first_record(store, key, mine))
        )
        first = json.loads(records[0])
        _seen.add(first["id"])
        different = inputs.differences(ChoiceInputs(*first["inputs"]))
    except Exception as error:  # noqa: BLE001 - the store may be gone or stalled, or another version's
        with contextlib.suppress(Exception):  # a log handler that raises must not fail a call
            log.warning("this job's ranks can't compare what their choices of kernels depend on: %s", error)
        return ""
    if records[0] == mine:
        _withdraw_with_group(store, place, mine)
    if not different:
        return ""
    return (
        f"rank {rank} on {host} doesn't choose kernels as rank {first['rank']} on "
        f"{first['host']} does: {different}: ranks that choose differently don't agree bitwise; give all "
        "of them the same table, lock, packages and settings"
    )


def _first_record(store: Any, key: str, mine: str) -> str:
    """Write a record unless the group already has a record; return the group's record."""
    first: str = store.compare_set(key, "", mine).decode()
    if json.loads(first).get("id") in _stale:
        # If two ranks find a stale record, the second gets the first's new record.
        first = store.compare_set(key, first, mine).decode()
    return first


def _withdraw_with_group(store: Any, place: str, mine: str) -> None:
    """Remove the record when torch drops its reference to the store, at the end of the group.

    Only under torchrun, whose agent outlives its workers. Elsewhere rank 0 serves the store, and may have
    ended.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    from torch.distributed.distributed_c10d import PrefixStore

    # Another reference to the same connection; it ends with torch's own reference.
    alias, owner = PrefixStore("attnreg", store), os.getpid()

    def withdraw(alias: Any) -> None:
        if os.getpid() == owner:
            with contextlib.suppress(Exception):
                # An empty value counts as none, and another rank's record stays.
                job_store.within(LONGEST_WITHDRAWAL_S, lambda: alias.compare_set(place, mine, ""))

    weakref.finalize(store, withdraw, alias).atexit = False
