"""What the tests of measured choice share: points, tables and a clock that only kernels move."""

from __future__ import annotations

import dataclasses
import functools

import torch

from attnreg import AttentionSpec, Device
from attnreg.core.times.kinds import kind_of, size_of
from attnreg.core.times.points import Measured, Point
from attnreg.core.times.table import Environment, Table
from attnreg.tools.measure.timing import Taken, Timer

SPEC = AttentionSpec(
    device=Device("cpu"), dtype="bfloat16", batch=2, max_q=256, max_k=256, heads_q=4, heads_k=4,
    head_dim=64, head_dim_v=64,
)  # fmt: skip


def spec_with(length=None, **changes):
    """Return the spec with changes; with a length for both query and key."""
    lengths = {} if length is None else {"max_q": length, "max_k": length}
    return dataclasses.replace(SPEC, **({"tokens_q": -1, "tokens_k": -1} | lengths | changes))


def took(gpu_us, host_us=0.0, first_call_s=0.0):
    return Measured(gpu_us=gpu_us, host_us=host_us, first_call_s=first_call_s, error=0.5)


def point(spec=SPEC, direction="forward", /, **backends):
    """Return a point: a number stands for microseconds."""
    found = {name: took(one) if isinstance(one, int | float) else one for name, one in backends.items()}
    return Point(kind_of(spec, direction), size_of(spec), found)


def table(*points, name="here.json", fronts=(), **environment):
    return Table(Environment(**({"device": "a test"} | environment)), points, name, fronts)


class Clock(Timer):
    """A timer whose clock only kernels move."""

    def __init__(self):
        self.seconds = 0.0

    def now(self):
        return self.seconds

    def device_and_host(self, run, calls):
        before = self.seconds
        for _ in range(calls):
            run()
        return Taken((self.seconds - before) / calls, 0.0)


def slowed(recorder, clock, seconds):
    """Make a fake backend's kernels take a time on that clock."""

    def run(kernel, *arguments):
        clock.seconds += seconds
        return kernel(*arguments)

    kernels = recorder.backend.load()
    slow = _replacing(run, forward=True)(kernels)
    if kernels.backward:
        slow = _replacing(run, forward=False)(slow)
    return dataclasses.replace(recorder.backend, load=lambda: slow)


CPU = torch.device("cpu")


def altered(alter, forward=True):
    """Alter what kernels return first, in their forward or their backward."""

    def run(kernel, *arguments):
        first, *rest = kernel(*arguments)
        return (alter(first), *rest)

    return _replacing(run, forward)


def off_by(amount, forward=True):
    """Make kernels wrong by so much in their forward or their backward."""
    return altered(lambda first: first + amount, forward)


def watched(note):
    """Have `note` called with the arguments of a forward before it runs."""

    def run(kernel, *arguments):
        note(*arguments)
        return kernel(*arguments)

    return _replacing(run, forward=True)


def raising(error, forward=True):
    def run(*_):
        raise error

    return _replacing(run, forward)


def _replacing(run, forward):
    """Return what replaces the forward or the backward of kernels by `run`, which is given it first."""
    name = "forward" if forward else "backward"
    return lambda kernels: kernels._replace(**{name: functools.partial(run, getattr(kernels, name))})
