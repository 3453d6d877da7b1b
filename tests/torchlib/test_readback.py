"""Promises of asynchronous read-backs; here a copy from the device ends when the test ends it."""

import functools
import gc
import weakref

import pytest
import torch

from attnreg.core.torchlib import readback
from attnreg.core.torchlib.readback import MANY, PENDING, AsyncReadback

# Copies to the host that have begun.
under_way = []


class SlowDeviceTensor(torch.Tensor):
    """A tensor of a device whose copies take a while."""

    is_cpu = False

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is not torch.Tensor.copy_:
            return super().__torch_function__(function, types, args, kwargs or {})
        assert kwargs == {"non_blocking": True}
        place, result = args
        under_way.append(functools.partial(place.copy_, result.as_subclass(torch.Tensor)))
        return place


class FullDeviceTensor(SlowDeviceTensor):
    """A tensor of a device that has no memory for a copy."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.copy_:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().__torch_function__(function, types, args, kwargs)


@pytest.fixture(autouse=True)
def blocks(monkeypatch):
    """Return what was allocated so far: without a GPU torch pins no memory."""
    allocated, zeros = [], torch.zeros

    def unpinned(*shape, pin_memory, **options):
        assert pin_memory
        allocated.append(zeros(*shape, **options))
        return allocated[-1]

    # Of the module alone, as torch keeps a list of the functions that a default device reaches.
    monkeypatch.setattr(readback, "torch", Torch(unpinned))
    readback._free.clear()
    yield allocated
    under_way.clear()
    readback._free.clear()


class Torch:
    """torch, but for one function."""

    def __init__(self, zeros):
        self.zeros = zeros

    def __getattr__(self, name):
        return getattr(torch, name)


def on_device(*numbers, kind=SlowDeviceTensor):
    return torch.tensor(numbers, dtype=torch.uint8).as_subclass(kind)


def finish_copies():
    while under_way:
        under_way.pop(0)()


def test_a_tensor_on_a_cpu_is_read_at_once(blocks):
    assert AsyncReadback(torch.tensor([True, False])).read() == [1, 0]
    assert AsyncReadback(torch.tensor(3)).read() == [3, 3]
    assert PENDING not in (0, 1, 3)
    assert blocks == []


def test_nothing_is_read_before_its_copy_has_ended():
    one, other = AsyncReadback(on_device(1, 0)), AsyncReadback(on_device(3))
    assert [one.read(), other.read()] == [None, None]
    under_way.pop()()
    assert [one.read(), other.read()] == [None, [3, 3]]
    finish_copies()
    assert one.read() == [1, 0]


def test_what_a_kernel_writes_to_the_host_is_read_once_it_is_there(blocks):
    places = []
    pending = AsyncReadback(places.append)
    assert pending.read() is None
    places[0].copy_(torch.tensor([1, 0]))
    assert pending.read() == [1, 0]
    assert under_way == []


def test_a_read_back_keeps_no_memory_of_the_device():
    """In the warm-up of a CUDA graph it would lie in the graph's memory, which graph trees refuse."""
    source, written = on_device(1, 0), on_device(0, 1)
    kept = [weakref.ref(source), weakref.ref(written)]
    pending = AsyncReadback(source), AsyncReadback(lambda place, written=written: written)
    under_way.pop()()
    del source, written
    assert [ref() for ref in kept] == [None, None]
    assert pending[0].read() == [1, 0]


def test_pinned_memory_is_reused_after_a_launch_that_failed(blocks):
    def refused(place):
        raise RuntimeError("CUDA error")

    for _ in range(2 * MANY):
        with pytest.raises(RuntimeError, match="CUDA error"):
            AsyncReadback(refused)
    assert len(blocks) == 1
    assert len(readback._free) == MANY


@pytest.mark.parametrize("first", [0, 1])
def test_half_a_result_is_not_read(first):
    pending = AsyncReadback(on_device(1, 0))
    pending._numbers[first] = 1
    assert pending.read() is None
    pending._numbers[1 - first] = 0
    assert sorted(pending.read()) == [0, 1]


def test_pinned_memory_is_reused_once_its_copy_has_ended(blocks):
    places = set()
    for number in range(3 * MANY):
        pending = AsyncReadback(on_device(number % 2))
        assert pending.read() is None
        finish_copies()
        assert pending.read() == [number % 2] * 2
        places.add(pending._numbers.data_ptr())
    assert len(places) <= MANY
    assert len(blocks) == 1


def test_pinned_memory_is_not_reused_while_a_copy_to_it_is_pending(blocks):
    for _ in range(MANY):
        AsyncReadback(on_device(1))  # dropped at once
    assert len(blocks) == 1
    pending = AsyncReadback(on_device(0))
    assert len(blocks) == 2
    *others, last = under_way
    for copy in others:
        copy()
    assert pending.read() is None
    last()
    assert pending.read() == [0, 0]
    del pending
    under_way.clear()
    kept = [AsyncReadback(on_device(1)) for _ in range(2 * MANY)]
    assert len(blocks) == 2, "places were lost while they were looked at"
    assert len({one._numbers.data_ptr() for one in kept}) == 2 * MANY


def test_pinned_memory_is_reused_after_a_copy_that_failed(blocks):
    for _ in range(2 * MANY):
        with pytest.raises(torch.OutOfMemoryError):
            AsyncReadback(on_device(1, kind=FullDeviceTensor))
    assert len(blocks) == 1
    assert len(readback._free) == MANY


def test_pinned_memory_is_never_given_back(blocks):
    AsyncReadback(on_device(1))
    block = weakref.ref(blocks.pop())
    under_way.clear()
    readback._free.clear()
    gc.collect()
    assert block() is not None


def test_pinned_places_are_used_after_inference_mode_has_ended(blocks):
    with torch.inference_mode():
        AsyncReadback(on_device(1))
        finish_copies()
    pending = AsyncReadback(on_device(0))
    finish_copies()
    assert pending.read() == [0, 0]
    assert len(readback._free) == MANY - 1
    assert len(blocks) == 1


def test_pinned_places_are_on_the_host_whatever_the_default_device_is():
    result = on_device(1, 0)
    with torch.device("meta"):
        pending = AsyncReadback(result)
        assert torch.zeros(2).device.type == "meta"
    assert pending.read() is None
    finish_copies()
    assert pending.read() == [1, 0]
