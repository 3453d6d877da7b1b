"""Promises of the timers: a kernel's time is its own, and measurements take turns."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from attnreg.tools.measure import timing
from attnreg.tools.measure.timing import (
    CudaTimer,
    Timer,
    calls_for,
    interleaved,
    median_ratio,
    per_call,
    timer_for,
)


class Gpu:
    """As much of torch.cuda as `CudaTimer` uses, on a clock of its own in microseconds."""

    def __init__(self, gigahertz):
        self.host_at = self.busy_until = self.slept = 0.0
        self.cycles_of_us = gigahertz * 1000

    def enqueue(self, host_us, gpu_us):
        self.host_at += host_us
        self.busy_until = max(self.busy_until, self.host_at) + gpu_us

    def _sleep(self, cycles):
        self.slept += cycles / self.cycles_of_us
        self.busy_until = max(self.busy_until, self.host_at) + cycles / self.cycles_of_us

    def current_stream(self, device):
        return SimpleNamespace(synchronize=self.wait)

    def wait(self):
        self.host_at = max(self.host_at, self.busy_until)

    def Event(self, enable_timing):  # noqa: N802 - torch's name
        event = SimpleNamespace(at=0.0)
        event.record = lambda: setattr(event, "at", max(self.busy_until, self.host_at))
        event.elapsed_time = lambda later: (later.at - event.at) / 1e3
        return event


@pytest.fixture
def timer_of(monkeypatch):
    """Make the timer of such a GPU."""

    def make(gpu):
        for name in ("_sleep", "current_stream", "Event"):
            monkeypatch.setattr(torch.cuda, name, getattr(gpu, name))
        monkeypatch.setattr(timing.time, "perf_counter", lambda: gpu.host_at * 1e-6)
        return timer_for(torch.device("cuda"))

    return make


@pytest.mark.parametrize("gigahertz", [0.345, 1.98, 2.9])
def test_the_time_of_kernels_is_theirs_however_long_the_host_takes_for_the_one_before(timer_of, gigahertz):
    gpu = Gpu(gigahertz)
    timer = timer_of(gpu)
    assert isinstance(timer, CudaTimer)
    backends = {
        host_us: (lambda host_us=host_us: gpu.enqueue(host_us, 9.0), calls)
        for host_us, calls in ((20.0, 50), (150.0, 13), (1500.0, 2), (35000.0, 1), (90.0, 20))
    }
    for _ in range(3):
        gpu.slept = 0.0
        for host_us, (run, calls) in backends.items():
            taken = timer.device_and_host(run, calls)
            assert (taken.device, taken.host) == pytest.approx((9e-6, host_us * 1e-6))
    # Once it knows them, no one waits for as long as another one would need.
    assert gpu.slept * gigahertz / 2 < 2.6 * sum(
        host_us * calls + 100 for host_us, (_, calls) in backends.items()
    )


@pytest.mark.parametrize(("host_us", "gpu_us", "eager_us"), [(50.0, 9.0, 50.0), (5.0, 70.0, 70.0)])
def test_one_call_after_the_other_takes_as_long_as_the_slower_of_gpu_and_host(
    timer_of, host_us, gpu_us, eager_us
):
    gpu = Gpu(2.0)
    timer = timer_of(gpu)
    gpu.enqueue(0.0, 500.0)  # is waited for, and not counted
    assert timer.back_to_back(lambda: gpu.enqueue(host_us, gpu_us), 100) == pytest.approx(
        eager_us * 1e-6, rel=0.2
    )
    assert timer.host(lambda: gpu.enqueue(host_us, gpu_us), 100) == pytest.approx(host_us * 1e-6)
    assert gpu.host_at >= gpu.busy_until and gpu.slept == 0.0


def test_on_a_cpu_all_times_are_those_of_the_wall(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    timer = timer_for(torch.device("cpu"))
    assert type(timer) is Timer
    ran = []
    assert timer.device_and_host(lambda: ran.append(1), 4) == (0.25, 0.0)
    assert timer.back_to_back(lambda: ran.append(1), 2) == timer.host(lambda: ran.append(1), 2) == 0.5
    assert len(ran) == 8


def test_a_round_is_long_enough_for_the_clock_and_never_too_many_calls():
    assert [calls_for(1.0, once) for once in (5.0, 0.1, 1e-9)] == [1, 10, 200]
    assert [calls_for(2e-3, once, 50) for once in (1.0, 2e-3, 999e-6, 0.0)] == [1, 1, 3, 50]


def test_a_call_takes_what_the_clock_says():
    readings, calls = iter((1.0, 7.0)), []
    assert per_call(lambda: calls.append(0), 3, lambda: next(readings)) == 2.0
    assert len(calls) == 3


def test_measurements_take_turns_after_a_warm_up_that_does_not_count():
    order = []
    measures = {name: lambda name=name: order.append(name) or len(order) for name in "abc"}
    found = interleaved(measures, 40)
    assert order[:3] == ["a", "b", "c"]
    rounds = [order[at : at + 3] for at in range(3, len(order), 3)]
    assert [sorted(one) for one in rounds] == [["a", "b", "c"]] * 40
    # None of them always follows the same one, nor has the same place.
    followed = {one + other for one, other in itertools.pairwise(order[3:])}
    assert followed >= {"ab", "ac", "ba", "bc", "ca", "cb"}
    assert all({one.index(name) for one in rounds} == {0, 1, 2} for name in "abc")
    # A case has few rounds: another one has other orders.
    assert len({tuple(order[-3:]) for _ in range(40) if interleaved(measures, 1)}) == 6
    for name, places in found.items():
        assert [order[place - 1] for place in places] == [name] * 40


def test_a_ratio_is_taken_round_by_round():
    assert median_ratio([2.0, 9.0, 4.0], [1.0, 3.0, 4.0]) == 2.0
