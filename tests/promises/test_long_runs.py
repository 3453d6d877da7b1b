"""Promises that only a long run can break: threads, many shapes, many installs. All of them are slow."""

import itertools
import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import attnreg
from attnreg.core import aten

pytestmark = pytest.mark.slow

OFFSETS = torch.tensor([0, 3, 8], dtype=torch.int32)


class Marked:
    """A backend whose results are a number: whoever calls it sees which one ran, and in which direction."""

    def __init__(self, fake, number):
        self.number, self.name = number, f"number {number}"
        kernels = attnreg.Kernels(self.forward, self.backward)
        self.backend = fake(self.name, load=lambda: kernels).backend

    def forward(self, query, key, value, call):
        lse = query.new_zeros(query.shape[:-1], dtype=torch.float32).transpose(-1, -2).contiguous()
        return torch.full_like(value, self.number), lse

    def backward(self, grad_out, query, key, value, out, lse, call):
        return tuple(torch.full_like(x, self.number) for x in (query, key, value))


def calls(query, key, value, backend):
    """Yield the output of each kind of call."""
    dense = (x[None].transpose(1, 2) for x in (query, key, value))
    yield F.scaled_dot_product_attention(*dense)
    yield attnreg.varlen_attn(query, key, value, OFFSETS, OFFSETS, 5, 5)
    yield attnreg.varlen_attn(query, key, value, OFFSETS, OFFSETS, 5, 5, backend=backend)


def attend(one, needs_grad):
    query, key, value = (torch.randn(8, 2, 16, requires_grad=needs_grad) for _ in range(3))
    with attnreg.use_backend(one.name):
        outs = list(calls(query, key, value, one.name))
    for out in outs:  # the backward belongs to its forward's scope, which has ended
        assert out.unique().tolist() == [one.number]
        if needs_grad:
            (grad,) = torch.autograd.grad(out.sum(), query)
            assert grad.unique().tolist() == [one.number]


def test_threads_keep_their_scopes_while_settings_change(fake, routers, hasty):
    """A minute of eight threads; the ninth registers, configures and reads everything."""
    marked = [Marked(fake, number) for number in range(1, 10)]
    kept = [attnreg.register_backend(one.backend) for one in marked]
    errors, rounds, end = [], [0] * 8, time.monotonic() + 60

    def work(place):
        try:
            while time.monotonic() < end and not errors:
                attend(marked[place], needs_grad=rounds[place] % 2 == 0)
                rounds[place] += 1
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=work, args=(place,)) for place in range(8)]
    for thread in threads:
        thread.start()
    changes = 0
    while time.monotonic() < end and not errors:
        with attnreg.register_backend(marked[changes % 9].name):
            attnreg.configure({"devices": {"cpu": {"order": [marked[-1].name]}}})
            attnreg.stats()
            attnreg.reload()
        attnreg.configure({"strict": changes % 2 == 0})
        changes += 1
    for thread in threads:
        thread.join()
    for handle in kept:
        handle.remove()
    assert not errors
    assert min(rounds) > 20
    assert changes > 20


def megabytes():
    """Return how much memory the process has at this moment."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / 2**20


def test_a_hundred_thousand_shapes_take_no_more_memory_than_twenty_thousand(routers, one_thread):
    sizes = itertools.product(range(1, 11), range(1, 1001), range(1, 11))
    after = {}
    with attnreg.register_backend("math"):
        for number, (heads, length, dim) in enumerate(sizes, start=1):
            query, key = torch.ones(1, heads, 1, dim), torch.ones(1, heads, length, dim)
            F.scaled_dot_product_attention(query, key, key)
            if number % 20_000 == 0:
                after[number] = megabytes()
    assert attnreg.stats().calls["math"]["forward"] == 100_000
    assert after[100_000] - after[20_000] < 20, after


def test_twenty_thousand_calls_of_ever_new_lengths_take_no_more_memory_than_four_thousand():
    script = Path(attnreg.__file__).parents[1] / "benchmarks" / "fresh_memory.py"
    command = [sys.executable, str(script), "--device", "cpu", "--calls", "20000"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "   20,000 calls: " in done.stdout


def test_a_thousand_installs_leave_the_op_and_the_memory_as_they_were():
    inputs = torch.randn(3, 1, 2, 8, 16)
    expected = F.scaled_dot_product_attention(*inputs)
    was_installed = aten.installed()
    after = {}
    for number in range(1, 1001):
        attnreg.install()
        assert torch.allclose(F.scaled_dot_product_attention(*inputs), expected)
        attnreg.uninstall()
        assert torch.equal(F.scaled_dot_product_attention(*inputs), expected)
        after[number] = megabytes()
    assert attnreg.stats().calls == {"cpu": {"forward": 1000, "backward": 0}}
    assert after[1000] - after[200] < 20
    if was_installed:
        aten.ensure()
