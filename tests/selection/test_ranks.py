"""Promises to the ranks of one job: they choose by the same table, or are told that they don't."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import processes
from support.tuned import asked, point, table

import attnreg
from attnreg import RanksDifferError, _registry
from attnreg.backends.cpu import compiled
from attnreg.contract.spec import Device
from attnreg.selection import ranks
from attnreg.selection.decision import Policy, Preference
from attnreg.selection.lockfile import Lock, Lockfile, Row
from attnreg.tuning.machine import environment
from attnreg.tuning.tables import Named, Tables

CPU = Device("cpu")


class Store(dict):
    """What torch's stores do about one key."""

    def compare_set(self, key, expected, value):
        if expected == "" or self.get(key) == expected:
            self.setdefault(key, value)
        return self[key].encode()


@pytest.fixture
def rank(monkeypatch):
    """Return what makes this process one rank of a job and then another."""
    store = Store()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)

    def become(number):
        monkeypatch.setattr(dist, "get_rank", lambda: number)
        monkeypatch.setattr(ranks, "_store", None)
        monkeypatch.setattr(ranks, "_inherited", None)
        return store

    return become


def chosen_by(*points, name="t.json", preferences=(), disabled=(), lock=None, **changes):
    here = dataclasses.replace(environment(CPU, _registry.entries()), **changes)
    measured = dataclasses.replace(table(*points, name=name), environment=here)
    tables = Tables((Named(measured, "attnreg.toml:3"),), _registry.entries) if points else None
    replaying = None if lock is None else Lock(lock, _registry.entries)
    return Policy(preferences, dict.fromkeys(disabled, "a file"), tables=tables, lock=replaying)


def locked(*backends, path="lock.json"):
    """Return a lockfile with a forward for each of these backends, of another length each."""
    spec = asked()
    rows = (
        Row(dataclasses.replace(spec, max_q=spec.max_q + number), "forward", backend, "a test")
        for number, backend in enumerate(backends)
    )
    return Lockfile(Path(path), "cpu", environment(CPU, _registry.entries()), tuple(rows))


def agree(policy, device=CPU, entries=None):
    ranks.agree(policy, entries or _registry.entries(), device)


def test_ranks_with_the_same_table_agree_wherever_the_file_lies(rank):
    for number in (0, 1):
        store = rank(number)
        agree(chosen_by(point(math=1.0), name=f"{number}.json"))
    assert json.loads(store["attnreg/cpu"])["rank"] == 0


def test_a_table_that_differs_in_one_number_is_an_error_that_names_both_ranks_and_tables(rank):
    rank(0)
    agree(chosen_by(point(math=1.0), name="a.json"))
    rank(1)
    with pytest.raises(RanksDifferError) as error:
        agree(chosen_by(point(math=2.0), name="b.json"))
    told = str(error.value)
    assert re.fullmatch(
        r"rank 1 on \S+ doesn't choose kernels as rank 0 on \S+ does: "
        r"table b\.json \(contents \w{12}\), there a\.json \(contents \w{12}\): ranks that choose "
        r"differently don't agree bitwise; give all of them the same table, lock, packages and settings",
        told,
    )


def test_the_error_comes_again_at_every_call(rank):
    rank(0)
    agree(chosen_by(point(math=1.0)))
    rank(1)
    for _ in range(2):
        with pytest.raises(RanksDifferError):
            agree(chosen_by(point(math=2.0)))


def test_a_table_against_none_is_a_difference_and_the_reason_is_told(rank):
    rank(0)
    agree(chosen_by(point(math=1.0)))
    rank(1)
    with pytest.raises(RanksDifferError, match=r"is refused: measured with .* \(no table\), there t\.json"):
        agree(chosen_by(point(math=1.0), device="another"))
    with pytest.raises(RanksDifferError, match=r'table policy = "order" \(no table\), there t\.json'):
        agree(chosen_by())


def test_a_backend_that_does_not_load_on_one_rank_is_a_difference_without_a_table_too(rank):
    rank(0)
    agree(chosen_by())
    rank(1)
    fewer = {name: entry for name, entry in _registry.entries().items() if name != "cpu"}
    with pytest.raises(RanksDifferError, match=r"does: backends math \S+, there cpu [^,]+, math \S+: ranks"):
        agree(chosen_by(), entries=fewer)


def test_so_is_what_one_ranks_operator_asks_for_but_not_what_its_program_does(rank):
    mine = Preference("register_backend('math')", ("math",), required=False)
    rank(0)
    agree(chosen_by())
    rank(1)
    agree(chosen_by(preferences=(mine,)))
    rank(1)
    with pytest.raises(RanksDifferError, match="does: asked math, there nothing: ranks"):
        agree(chosen_by(preferences=(Preference("ATTNREG_BACKEND", ("math",)), mine)))
    with pytest.raises(RanksDifferError, match="does: asked not cpu, there nothing: ranks"):
        agree(chosen_by(disabled=("cpu",)))


def test_ranks_with_the_same_lock_agree_wherever_it_lies_and_in_whatever_order(rank):
    lock = locked("cpu", "math")
    rank(0)
    agree(chosen_by(lock=lock))
    rank(1)
    agree(chosen_by(lock=dataclasses.replace(lock, path=Path("b.json"), rows=lock.rows[::-1])))


def test_another_lock_or_one_on_one_rank_only_is_a_difference(rank):
    rank(0)
    agree(chosen_by(lock=locked("cpu")))
    rank(1)
    with pytest.raises(RanksDifferError, match=r"does: lock contents \w{12}, there contents \w{12}: ranks"):
        agree(chosen_by(lock=locked("math")))
    with pytest.raises(RanksDifferError, match=r"does: lock none, there contents \w{12}: ranks"):
        agree(chosen_by())
    with pytest.raises(
        RanksDifferError, match="give all of them the same table, lock, packages and settings"
    ):
        agree(chosen_by(point(math=1.0)))


def test_ranks_that_measure_nothing_agree_and_what_changes_later_is_not_compared(rank):
    store = rank(0)
    agree(chosen_by())
    rank(1)
    agree(chosen_by())
    assert list(store) == ["attnreg/cpu"]
    agree(chosen_by(point(math=1.0)))
    assert list(store) == ["attnreg/cpu"]


def test_a_forked_child_leaves_its_parents_store_alone(rank):
    store = rank(0)
    ranks._leave_the_parents_store()
    agree(chosen_by())
    assert store == {}


def test_what_another_attnreg_has_left_there_is_no_error(rank, caplog):
    store = rank(0)
    store["attnreg/cpu"] = json.dumps({"rank": 1, "host": "b", "standing": ["of", "another", "form"]})
    agree(chosen_by())
    assert "can't compare by what they choose kernels" in caplog.text


def test_a_backend_object_that_one_ranks_program_brings_is_no_difference(rank, fake):
    rank(0)
    agree(chosen_by())
    rank(1)
    with attnreg.register_backend(fake("mine").backend):
        agree(chosen_by())


def test_a_store_that_cannot_compare_is_told_and_keeps_nobody_from_running(rank, monkeypatch, caplog):
    rank(0)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", object)
    agree(chosen_by())
    assert "this job's ranks can't compare by what they choose kernels: 'object' object" in caplog.text


def test_a_single_process_asks_no_store(monkeypatch):
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: pytest.fail("asked"))
    agree(chosen_by(point(math=1.0)))


def test_simulated_devices_and_explain_ask_no_store(rank):
    store = rank(0)
    agree(chosen_by(), Device.parse("sm_90"))
    attnreg.explain(asked())
    assert store == {}


RANK = """
import sys
import torch
import torch.distributed as dist

import attnreg

number, store, shared, own = int(sys.argv[1]), *sys.argv[2:]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=2)
q, k, v = torch.randn(3, 16, 2, 8).unbind()
ends = torch.tensor([0, 16], dtype=torch.int32)
for file in (shared, own):
    attnreg.configure(file)
    attnreg.selection.ranks._compared.clear()
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    store.delete_key("attnreg/cpu")
    dist.barrier()
    try:
        attnreg.varlen_attn(q, k, v, ends, ends, 16, 16)
        print("agreed", *attnreg.stats().calls)
    except attnreg.RanksDifferError as error:
        print(error)
    dist.barrier()
dist.destroy_process_group()
"""


def test_two_processes_compare_over_the_jobs_own_store(tmp_path, monkeypatch):
    # The table is to be one of the processes', whatever is compiled for them or here.
    monkeypatch.setattr(compiled, "is_there", lambda: False)
    for name, took in (("shared", 1.0), ("own0", 2.0), ("own1", 3.0)):
        spec = asked(16, dtype="float32", heads_q=2, heads_k=2, head_dim=8, head_dim_v=8, varlen=True)
        measured = table(point(spec, math=took, cpu=9.0), name=f"{name}.json")
        here = environment(CPU, _registry.entries())
        dataclasses.replace(measured, environment=here).save(tmp_path / f"{name}.json")
        (tmp_path / f"{name}.toml").write_text(f'tuned = "{name}.json"\n')
    started = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(number), str(tmp_path / "store"), str(tmp_path / "shared.toml"),
             str(tmp_path / f"own{number}.toml")],
            env=processes.environment(ATTNREG_ROUTERS="python", OMP_NUM_THREADS=str(torch.get_num_threads())),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for number in (0, 1)
    ]  # fmt: skip
    lines = []
    for process in started:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        lines += out.splitlines()
    assert lines.count("agreed math") == 3  # both by the shared table, and the first by its own
    assert sum("doesn't choose kernels as rank" in line for line in lines) == 1
