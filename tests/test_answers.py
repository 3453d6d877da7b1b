"""What a device says, read without waiting for it; copies here come when they are told to."""

import functools

import pytest
import torch

from attnreg import answers
from attnreg.answers import MANY, UNANSWERED, Answer

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


@pytest.fixture(autouse=True)
def pins(monkeypatch):
    """Count how often memory is pinned, which torch can't do without a GPU."""
    pinned, zeros = [], torch.zeros

    def counted(*shape, pin_memory, **options):
        pinned.append(pin_memory)
        return zeros(*shape, **options)

    monkeypatch.setattr(torch, "zeros", counted)
    yield pinned
    under_way.clear()
    answers._left.clear()


def far(*numbers):
    return torch.tensor(numbers, dtype=torch.uint8).as_subclass(Far)


def arrive():
    while under_way:
        under_way.pop(0)()


def test_a_cpu_has_answered_at_once(pins):
    assert Answer(torch.tensor([True, False])).read() == [1, 0]
    assert Answer(torch.tensor(3)).read() == [3, 3]
    assert pins == []


def test_nothing_is_read_before_the_device_has_answered():
    one, other = Answer(far(1, 0)), Answer(far(3))
    assert [one.read(), other.read()] == [None, None]
    under_way.pop()()
    assert [one.read(), other.read()] == [None, [3, 3]]
    arrive()
    assert one.read() == [1, 0]


def test_a_place_is_taken_again_once_its_answer_is_there(pins):
    places = set()
    for number in range(3 * MANY):
        answer = Answer(far(number % 2))
        assert answer.read() is None
        arrive()
        assert answer.read() == [number % 2] * 2
        places.add(answer._numbers.data_ptr())
    assert len(places) <= MANY
    assert pins == [True]


def test_a_place_that_a_copy_is_on_its_way_to_is_left_alone(pins):
    for _ in range(MANY):
        Answer(far(1))  # left at once
    assert len(pins) == 1
    answer = Answer(far(0))
    assert len(pins) == 2
    *others, last = under_way
    for copy in others:
        copy()
    assert answer.read() is None
    last()
    assert answer.read() == [0, 0]


def test_places_outlast_inference_mode(pins):
    with torch.inference_mode():
        Answer(far(1))
        arrive()
    answer = Answer(far(0))
    arrive()
    assert answer.read() == [0, 0]
    assert len(answers._left) == MANY - 1
    assert pins == [True]


def test_places_lie_on_the_host_whatever_the_default_device_is():
    said = far(1, 0)
    with torch.device("meta"):
        answer = Answer(said)
    assert answer.read() is None
    arrive()
    assert answer.read() == [1, 0]


def test_what_is_unanswered_is_none_of_the_answers():
    assert UNANSWERED not in Answer(torch.tensor([0, 3])).read()
