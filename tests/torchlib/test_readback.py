"""What a device says, read without waiting for it; copies here arrive when they are told to."""

import functools
import gc
import weakref

import pytest
import torch

from attnreg.torchlib import readback
from attnreg.torchlib.readback import MANY, PENDING, AsyncReadback

# Copies to the host that have begun.
under_way = []


class Far(torch.Tensor):
    """A tensor of a device that is slow."""

    is_cpu = False

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is not torch.Tensor.copy_:
            return super().__torch_function__(function, types, args, kwargs or {})
        assert kwargs == {"non_blocking": True}
        place, said = args
        under_way.append(functools.partial(place.copy_, said.as_subclass(torch.Tensor)))
        return place


class Full(Far):
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
    readback._left.clear()
    yield allocated
    under_way.clear()
    readback._left.clear()


class Torch:
    """torch, but for one function."""

    def __init__(self, zeros):
        self.zeros = zeros

    def __getattr__(self, name):
        return getattr(torch, name)


def far(*numbers, kind=Far):
    return torch.tensor(numbers, dtype=torch.uint8).as_subclass(kind)


def arrive():
    while under_way:
        under_way.pop(0)()


def test_a_cpu_has_answered_at_once(blocks):
    assert AsyncReadback(torch.tensor([True, False])).read() == [1, 0]
    assert AsyncReadback(torch.tensor(3)).read() == [3, 3]
    assert blocks == []


def test_nothing_is_read_before_the_device_has_answered():
    one, other = AsyncReadback(far(1, 0)), AsyncReadback(far(3))
    assert [one.read(), other.read()] == [None, None]
    under_way.pop()()
    assert [one.read(), other.read()] == [None, [3, 3]]
    arrive()
    assert one.read() == [1, 0]


@pytest.mark.parametrize("first", [0, 1])
def test_half_an_answer_is_none(first):
    answer = AsyncReadback(far(1, 0))
    answer._numbers[first] = 1
    assert answer.read() is None
    answer._numbers[1 - first] = 0
    assert sorted(answer.read()) == [0, 1]


def test_a_place_is_taken_again_once_its_answer_is_there(blocks):
    places = set()
    for number in range(3 * MANY):
        answer = AsyncReadback(far(number % 2))
        assert answer.read() is None
        arrive()
        assert answer.read() == [number % 2] * 2
        places.add(answer._numbers.data_ptr())
    assert len(places) <= MANY
    assert len(blocks) == 1


def test_a_place_that_a_copy_is_on_its_way_to_is_left_alone(blocks):
    for _ in range(MANY):
        AsyncReadback(far(1))  # left at once
    assert len(blocks) == 1
    answer = AsyncReadback(far(0))
    assert len(blocks) == 2
    *others, last = under_way
    for copy in others:
        copy()
    assert answer.read() is None
    last()
    assert answer.read() == [0, 0]
    del answer
    under_way.clear()
    kept = [AsyncReadback(far(1)) for _ in range(2 * MANY)]
    assert len(blocks) == 2, "places were lost while they were looked at"
    assert len({one._numbers.data_ptr() for one in kept}) == 2 * MANY


def test_a_place_that_could_not_be_copied_to_is_taken_again(blocks):
    for _ in range(2 * MANY):
        with pytest.raises(torch.OutOfMemoryError):
            AsyncReadback(far(1, kind=Full))
    assert len(blocks) == 1
    assert len(readback._left) == MANY


def test_pinned_memory_is_never_given_back(blocks):
    AsyncReadback(far(1))
    block = weakref.ref(blocks.pop())
    under_way.clear()
    readback._left.clear()
    gc.collect()
    assert block() is not None


def test_places_outlast_inference_mode(blocks):
    with torch.inference_mode():
        AsyncReadback(far(1))
        arrive()
    answer = AsyncReadback(far(0))
    arrive()
    assert answer.read() == [0, 0]
    assert len(readback._left) == MANY - 1
    assert len(blocks) == 1


def test_places_lie_on_the_host_whatever_the_default_device_is():
    said = far(1, 0)
    with torch.device("meta"):
        answer = AsyncReadback(said)
        assert torch.zeros(2).device.type == "meta"
    assert answer.read() is None
    arrive()
    assert answer.read() == [1, 0]


def test_what_is_unanswered_is_none_of_the_answers():
    assert PENDING not in AsyncReadback(torch.tensor([0, 3])).read()
