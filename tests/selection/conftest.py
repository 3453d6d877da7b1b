"""Fixtures of the tests of selection."""

import dataclasses

import pytest
from support.known import know
from support.packed_calls import attend

import attnreg
from attnreg.backends import math as math_backend
from attnreg.core import registry
from attnreg.core.times import adaptive, turns


@pytest.fixture
def known(monkeypatch, fake):
    """Know five fakes and math, whatever this installation has."""
    names = ("env", "scoped", "mine", "one", "two")
    backends = [fake(name, devices=("cpu", "cuda")).backend for name in names]
    gpu = fake("gpu", devices=("cuda",), unavailable=lambda: "needs a GPU", install="make gpu").backend
    return know(monkeypatch, *backends, gpu, math_backend.BACKEND)


@pytest.fixture
def write(tmp_path):
    def write(text, name="attnreg.toml"):
        file = tmp_path / name
        file.write_text(text, encoding="utf-8")
        return file

    return write


# What the tests of the policy "adaptive" share


class Clock:
    """A clock that only kernels move."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    monotonic = perf_counter


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(turns, "time", clock := Clock())
    monkeypatch.setattr(adaptive, "time", clock)
    return clock


@pytest.fixture
def taking(fake, monkeypatch, clock):
    """Know fakes that take so many seconds: `taking(slow=2.0, fast=(1.0, 3.0))`, in the default order."""

    def make(**seconds):
        backends = []
        for place, (name, each) in enumerate(seconds.items()):
            forward, backward = each if isinstance(each, tuple) else (each, each)
            recorder = fake(name, priority=50 - place)
            kernels = recorder.backend.load()

            def slowed(kernel, seconds):
                def run(*arguments):
                    clock.now += seconds
                    return kernel(*arguments)

                return run

            timed = attnreg.Kernels(slowed(kernels.forward, forward), slowed(kernels.backward, backward))
            backends.append(dataclasses.replace(recorder.backend, load=lambda timed=timed: timed))
        return know(monkeypatch, *backends, math_backend.BACKEND)

    return make


@pytest.fixture
def runs(ran):
    """Return a function that makes so many calls and returns which backends ran forwards, in their order."""

    def make(calls, run=attend):
        order = []
        for _ in range(calls):
            ran()
            run()
            order += [name for name, counts in ran().items() for _ in range(counts[0])]
        return order

    return make


@pytest.fixture
def kept(monkeypatch, tmp_path):
    """Keep what is seen, below a folder of the test's; returns what begins a new process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(adaptive, "_keeps", True)

    def begin_anew():
        monkeypatch.setattr(adaptive, "_learned", {})
        registry.changed()
        return list(tmp_path.glob("attnreg/adaptive/*.json"))

    return begin_anew
