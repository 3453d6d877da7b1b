"""Promises to the ranks of one job, in two processes and over torch's own stores."""

import dataclasses
import json
import signal
import time

import pytest
import torch
import torch.distributed as dist
from support.processes import Forked
from support.tuned import point, spec_with, table

from attnreg.backends.cpu import compiled
from attnreg.core import registry
from attnreg.core.contract.spec import Device
from attnreg.core.times.environments import environment

CPU = Device("cpu")

# Runs what it is sent, a line each, and replies with a line.
RANK = """
import datetime, logging, os, sys
import torch
import torch.distributed as dist
import attnreg

rank, port = int(sys.argv[1]), sys.argv[2]
# Torch was loaded before the fork, and has read the variable then.
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
logging.basicConfig(stream=sys.stderr)
q, k, v = torch.randn(3, 16, 2, 8).unbind()
ends = torch.tensor([0, 16], dtype=torch.int32)

def join(seconds=20):
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2,
        timeout=datetime.timedelta(seconds=seconds),
    )
    return "joined"

def leave():
    dist.destroy_process_group()
    return "left"

def attend():
    attnreg.reset_stats()
    attnreg.varlen_attn(q, k, v, ends, ends, 16, 16)
    return "ran " + " ".join(attnreg.stats().calls)

def configure(file):
    attnreg.configure(file)
    return "configured"

for line in sys.stdin:
    try:
        print(eval(line), flush=True)
    except Exception as error:
        print(f"{type(error).__name__}: {error}".splitlines()[0], flush=True)
"""

HOST = """
import sys
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


def under_torchrun(port):
    """Return what torchrun tells the ranks: its agent serves the store there."""
    return {
        "TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


def start(script, *arguments, **variables):
    threads = str(torch.get_num_threads())
    return Forked(script, *arguments, ATTNREG_ROUTERS="python", OMP_NUM_THREADS=threads, **variables)


class Job:
    """Two ranks; `job("attend()")` has both run it at the same time and returns their replies."""

    def __init__(self, port, **variables):
        self.ranks = [start(RANK, str(number), str(port), **variables) for number in (0, 1)]

    def __call__(self, *commands):
        commands = commands * 2 if len(commands) == 1 else commands
        for process, command in zip(self.ranks, commands, strict=True):
            if command:
                print(command, file=process.stdin, flush=True)
        return [
            process.stdout.readline().strip()
            for process, command in zip(self.ranks, commands, strict=True)
            if command
        ]

    def stop(self):
        for process in self.ranks:
            process.kill()


@pytest.fixture
def start_job():
    """Return what starts a job; it is stopped after the test."""
    jobs = []

    def begin(port, **variables):
        jobs.append(Job(port, **variables))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.stop()


@pytest.fixture
def job(start_job):
    """Return a job whose rank 0 serves the store, as without torchrun."""
    return start_job(new_store().port)  # unused again


def new_store():
    return dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def records(store):
    """Return the ranks whose records are in the store."""
    keys = [key for key in store.list_keys() if "attnreg" in key]
    return [json.loads(text)["rank"] for text in map(store.get, keys) if text]


def forget_addresses(store):
    """Delete what gloo has left: a rank of the next group may read an old address and not connect."""
    for key in store.list_keys():
        if "attnreg" not in key:
            store.delete_key(key)


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """Write settings files: `alike` for both ranks, and a table for each rank that differs in a number."""
    # The tables are to be in force in processes without a compiled kernel, whatever is compiled here.
    monkeypatch.setattr(compiled, "load", lambda: None)
    spec = spec_with(16, dtype="float32", heads_q=2, heads_k=2, head_dim=8, head_dim_v=8, varlen=True)
    for name, took in (("alike", 1.0), ("own0", 2.0), ("own1", 3.0)):
        measured = table(point(spec, math=took, cpu=9.0), name=f"{name}.json")
        here = environment(CPU, registry.entries())
        dataclasses.replace(measured, environment=here).save(tmp_path / f"{name}.json")
        (tmp_path / f"{name}.toml").write_text(f'tuned = "{name}.json"\n')

    def use(name):
        return f"configure({str(tmp_path / name) + '.toml'!r})"

    return use


def differing(replies):
    return sum(reply.startswith("RanksDifferError: rank ") for reply in replies)


def test_groups_follow_each_other_in_one_process_and_each_compares_its_ranks(job, settings):
    for name, differ in (("alike", 0), ("own{}", 1), ("alike", 0)):
        assert job(*(settings(name.format(number)) for number in (0, 1))) == ["configured"] * 2
        assert job("join()") == ["joined"] * 2
        replies = job("attend()")
        assert differing(replies) == differ, replies
        assert replies.count("ran math") == 2 - differ
        assert job("leave()") == ["left"] * 2


def test_under_torchrun_a_group_does_not_compare_with_the_one_before(start_job, settings):
    agent = new_store()  # that of torchrun's agent outlives the groups of its workers
    job = start_job(agent.port, **under_torchrun(agent.port))
    job("join()")
    # Rank 0 runs no attention in the first group, so it can't know the record by its id.
    assert job("", "attend()") == ["ran cpu"]
    assert records(agent) == [1]
    assert job("leave()") == ["left"] * 2
    assert records(agent) == []
    forget_addresses(agent)
    job(settings("alike"))
    assert job("join()") == ["joined"] * 2
    assert job("attend()", "") == ["ran math"]
    assert job("", "attend()") == ["ran math"]
    assert job("leave()") == ["left"] * 2
    forget_addresses(agent)
    job(settings("own0"), settings("own1"))
    assert job("join()") == ["joined"] * 2
    assert differing(job("attend()")) == 1


@pytest.mark.slow
def test_a_stalled_host_of_the_store_holds_a_call_up_no_longer_than_the_groups_timeout(start_job):
    host = start(HOST)
    try:
        port = int(host.stdout.readline())
        job = start_job(port, **under_torchrun(port))
        assert job("join(2)") == ["joined"] * 2
        host.send_signal(signal.SIGSTOP)
        started = time.monotonic()
        assert job("attend()") == ["ran cpu"] * 2
        assert time.monotonic() - started < 10
        host.send_signal(signal.SIGCONT)
        for process in job.ranks:
            assert "the process group's store doesn't respond within 2 s" in process.kill()
    finally:
        host.kill()
