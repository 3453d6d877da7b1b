"""Promises to the ranks of one job: they choose kernels from the same inputs, or the call is an error.

Here one process plays both ranks over a fake store; `test_rank_processes.py` has real ones.
"""

import dataclasses
import json
import re
import threading
import weakref
from pathlib import Path

import pytest
import torch.distributed as dist
from support.tuned import point, spec_with, table

import attnreg
from attnreg import RanksDifferError
from attnreg.core import registry
from attnreg.core.contract.spec import Device
from attnreg.core.policy import ranks
from attnreg.core.policy.lockfile import Lockfile, LockfileRow, LockInForce
from attnreg.core.selection.decision import Policy, Preference
from attnreg.core.times.environments import environment
from attnreg.core.times.tables import Named, NamedTables
from attnreg.core.torchlib import job_store

CPU = Device("cpu")


class Store(dict):
    """A store of torch's, as far as `agree` uses one."""

    def compare_set(self, key, expected, value):
        if self.get(key, "") == expected:
            self[key] = value
        return self.get(key, expected).encode()


@pytest.fixture
def rank(monkeypatch):
    """Return what makes this process one rank of a job and then another."""
    store = Store()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)

    def become(number):
        monkeypatch.setattr(dist, "get_rank", lambda: number)
        for name in ("_compared", "_seen", "_stale"):
            monkeypatch.setattr(ranks, name, set())
        monkeypatch.setattr(job_store, "_inherited", None)
        monkeypatch.setattr(ranks, "_store", None)
        return store

    return become


def chosen_by(*points, name="t.json", preferences=(), disabled=(), lock=None, **changes):
    here = dataclasses.replace(environment(CPU, registry.entries()), **changes)
    measured = dataclasses.replace(table(*points, name=name), environment=here)
    tables = NamedTables((Named(measured, "attnreg.toml:3"),), registry.entries) if points else None
    replaying = None if lock is None else LockInForce(lock, registry.entries)
    return Policy(preferences, dict.fromkeys(disabled, "a file"), tables=tables, lock=replaying)


def locked(*backends, path="lock.json"):
    """Return a lockfile with a forward for each of these backends, of another length each."""
    spec = spec_with()
    rows = (
        LockfileRow(dataclasses.replace(spec, max_q=spec.max_q + number), "forward", backend, "a test")
        for number, backend in enumerate(backends)
    )
    return Lockfile(Path(path), "cpu", environment(CPU, registry.entries()), tuple(rows))


def agree(policy, device=CPU, entries=None):
    ranks.agree(policy, entries or registry.entries(), device)


@pytest.fixture
def first_rank(rank):
    """Have rank 0 choose by a policy, and be rank 1 from then on."""

    def chooses_by(policy):
        store = rank(0)
        agree(policy)
        rank(1)
        return store

    return chooses_by


def test_ranks_with_the_same_table_agree_wherever_the_file_lies(rank):
    for number in (0, 1):
        store = rank(number)
        agree(chosen_by(point(math=1.0), name=f"{number}.json"))
    assert json.loads(store["attnreg/cpu"])["rank"] == 0


def test_a_table_that_differs_in_one_number_is_an_error_of_every_call_that_names_both(first_rank):
    first_rank(chosen_by(point(math=1.0), name="a.json"))
    for _ in range(2):
        with pytest.raises(RanksDifferError) as error:
            agree(chosen_by(point(math=2.0), name="b.json"))
        assert re.fullmatch(
            r"rank 1 on \S+ doesn't choose kernels as rank 0 on \S+ does: "
            r"table b\.json \(contents \w{12}\), there a\.json \(contents \w{12}\): ranks that choose "
            r"differently don't agree bitwise; give all of them the same table, lock, packages and settings",
            str(error.value),
        )


def test_a_table_against_none_is_a_difference_and_the_error_has_the_reason(first_rank):
    first_rank(chosen_by(point(math=1.0)))
    with pytest.raises(RanksDifferError, match=r"is refused: measured with .* \(no table\), there t\.json"):
        agree(chosen_by(point(math=1.0), device="another"))
    with pytest.raises(RanksDifferError, match=r'table policy = "order" \(no table\), there t\.json'):
        agree(chosen_by())


def test_a_backend_that_does_not_load_on_one_rank_is_a_difference_without_a_table_too(first_rank):
    first_rank(chosen_by())
    fewer = {name: entry for name, entry in registry.entries().items() if name != "cpu"}
    with pytest.raises(RanksDifferError, match=r"does: backends math \S+, there cpu [^,]+, math \S+: ranks"):
        agree(chosen_by(), entries=fewer)


def test_a_backend_that_one_ranks_environment_asks_for_is_a_difference_and_what_its_program_registers_is_none(
    first_rank, rank, fake
):
    mine = Preference("register_backend('math')", ("math",), required=False)
    first_rank(chosen_by())
    agree(chosen_by(preferences=(mine,)))
    rank(1)
    with attnreg.register_backend(fake("mine").backend):
        agree(chosen_by())
    rank(1)
    with pytest.raises(RanksDifferError, match="does: requested math, there nothing: ranks"):
        agree(chosen_by(preferences=(Preference("ATTNREG_BACKEND", ("math",)), mine)))
    with pytest.raises(RanksDifferError, match="does: requested not cpu, there nothing: ranks"):
        agree(chosen_by(disabled=("cpu",)))


def test_ranks_with_the_same_lock_agree_whatever_its_path_and_order(first_rank):
    lock = locked("cpu", "math")
    first_rank(chosen_by(lock=lock))
    agree(chosen_by(lock=dataclasses.replace(lock, path=Path("b.json"), rows=lock.rows[::-1])))


def test_another_lock_or_one_on_one_rank_only_is_a_difference(first_rank):
    first_rank(chosen_by(lock=locked("cpu")))
    with pytest.raises(RanksDifferError, match=r"does: lock contents \w{12}, there contents \w{12}: ranks"):
        agree(chosen_by(lock=locked("math")))
    with pytest.raises(RanksDifferError, match=r"does: lock none, there contents \w{12}: ranks"):
        agree(chosen_by())


def test_ranks_that_measure_nothing_agree_and_what_changes_later_is_not_compared(first_rank):
    store = first_rank(chosen_by())
    for policy in (chosen_by(), chosen_by(point(math=1.0))):
        agree(policy)
        assert list(store) == ["attnreg/cpu"]


def test_a_forked_child_leaves_its_parents_store_alone(rank):
    store = rank(0)
    job_store._leave_the_parents()
    agree(chosen_by())
    assert store == {}


OTHER_RECORD = {"rank": 1, "host": "b", "inputs": ["of", "another", "form"]}


@pytest.mark.parametrize(
    "store",
    [Store({"attnreg/cpu": json.dumps(OTHER_RECORD)}), type("Other", (), {})()],
    ids=["another attnreg's record", "can't compare"],
)
def test_a_store_that_cannot_be_compared_with_is_logged_and_keeps_no_call_from_running(
    rank, monkeypatch, caplog, store
):
    rank(0)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    agree(chosen_by())
    assert "this job's ranks can't compare what their choices of kernels depend on: " in caplog.text


def test_a_store_that_does_not_respond_is_logged_and_delays_a_call_for_a_bounded_time(
    rank, monkeypatch, caplog
):
    store, wakes = rank(0), threading.Event()
    monkeypatch.setattr(store, "compare_set", lambda *_: wakes.wait(60), raising=False)
    monkeypatch.setattr(ranks, "LONGEST_WAIT_S", 0.05)
    agree(chosen_by())
    agree(chosen_by())  # asks no second time
    wakes.set()
    assert caplog.text.count("the process group's store doesn't respond within 0.05 s") == 1


def test_a_record_of_an_earlier_group_is_replaced_and_one_of_this_group_is_compared(rank, monkeypatch):
    store = rank(0)
    agree(chosen_by())
    next_store = Store(store)  # the next group's: the keys are still there
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: next_store)
    agree(chosen_by(disabled=("cpu",)))
    assert json.loads(next_store["attnreg/cpu"])["inputs"][2] == "not cpu"
    rank(1)
    with pytest.raises(RanksDifferError, match="does: requested nothing, there not cpu"):
        agree(chosen_by())


def test_the_error_holds_no_reference_to_the_store(first_rank):
    held = weakref.ref(first_rank(chosen_by()))
    with pytest.raises(RanksDifferError) as error:
        agree(chosen_by(disabled=("cpu",)))
    frame = error.tb
    while frame is not None:
        assert all(value is not held() for value in frame.tb_frame.f_locals.values())
        frame = frame.tb_next


def test_a_single_process_asks_no_store(monkeypatch):
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: pytest.fail("asked"))
    agree(chosen_by(point(math=1.0)))


def test_simulated_devices_and_explain_ask_no_store(rank):
    store = rank(0)
    agree(chosen_by(), Device.parse("sm_90"))
    attnreg.explain(spec_with())
    assert store == {}
