"""Promises of the shortest way: which calls take it, and that it changes nothing about them."""

import pytest
import torch

from attnreg import counters, packed, scope
from attnreg.aten import express
from attnreg.planning import Plan
from attnreg.state import State


class Answered(packed.Facts):
    whole = covered = True


@pytest.fixture
def covered(monkeypatch):
    monkeypatch.setattr(express, "facts_of", lambda *_: Answered())
    monkeypatch.setattr(express, "stream_of", lambda tensor: 0)


class Kernel:
    """Torch's own: keeps what it was given."""

    def __init__(self, results):
        self.results, self.calls = results, []

    def __call__(self, *args):
        self.calls.append(args)
        return self.results


def plan(direction):
    return Plan("FA2", None, False, (counters.call_counter("FA2", direction),))


QUERY, KEY, VALUE = (torch.randn(6, 2, 8) for _ in "qkv")
ENDS = torch.tensor([0, 2, 6], dtype=torch.int32)
GIVEN = (QUERY, KEY, VALUE, ENDS, ENDS, 4, 4, 0.0, True, False)
RESULTS = tuple(torch.full((), float(number)) for number in range(5))


def backward_args(pin=scope.OWN, grad_out=QUERY):
    lse, rng_state = torch.zeros(2, 6), torch.zeros(2, dtype=torch.uint64)
    carrier = scope.stamp(pin, QUERY)
    return (grad_out, QUERY, KEY, VALUE, QUERY, lse, ENDS, ENDS, 4, 4, 0.0, True, rng_state, carrier)


def test_a_forward_that_came_before_goes_straight_to_torchs_kernel(covered, ran):
    now, kernel = State(), Kernel(RESULTS)
    assert express.forward(kernel, GIVEN, now, scope.OWN) is None
    express.remember("forward", GIVEN, {}, plan("forward"), now)
    out, lse, rng_state, carrier, debug_mask = express.forward(kernel, GIVEN, now, scope.OWN)
    assert kernel.calls == [GIVEN]
    assert (out, lse, rng_state, debug_mask) == (*RESULTS[:3], RESULTS[4])
    assert scope.read_stamp(carrier) is scope.OWN
    assert ran() == {"FA2": (1, 0)}


def test_a_backward_that_came_before_does_too(covered, ran):
    now, kernel = State(), Kernel(RESULTS[:3])
    args = backward_args()
    assert express.backward(kernel, args, now, None) is None
    express.remember("backward", args, {}, plan("backward"), now)
    assert express.backward(kernel, args, now, None) == RESULTS[:3]
    assert kernel.calls == [args]
    assert ran() == {"FA2": (0, 1)}


@pytest.mark.parametrize(
    "change",
    [
        {0: torch.randn(7, 2, 8)},
        {0: QUERY.half()},
        {5: 5},
        {7: 0.1},
        {8: False},
        {3: torch.tensor([0, 6], dtype=torch.int32)},
        {0: torch.randn(6, 2, 8, requires_grad=True)},
        {0: torch.randn(2, 6, 8).transpose(0, 1)},
        {2: torch.randn(97)[1:].view(6, 2, 8)},
    ],
    ids=["length", "dtype", "max_q", "dropout", "mask", "batch", "gradient", "strides", "alignment"],
)
def test_another_call_goes_the_long_way(covered, change):
    now, kernel = State(), Kernel(RESULTS)
    express.remember("forward", GIVEN, {}, plan("forward"), now)
    other = tuple(change.get(place, value) for place, value in enumerate(GIVEN))
    assert express.forward(kernel, other, now, scope.OWN) is None
    assert kernel.calls == []


def test_rows_that_may_see_no_key_go_the_long_way(monkeypatch):
    monkeypatch.setattr(express, "facts_of", lambda *_: packed.Facts())
    monkeypatch.setattr(express, "stream_of", lambda tensor: 0)
    now, kernel = State(), Kernel(RESULTS)
    express.remember("forward", GIVEN, {}, plan("forward"), now)
    assert express.forward(kernel, GIVEN, now, scope.OWN) is None
    args = backward_args()
    express.remember("backward", args, {}, plan("backward"), now)
    assert express.backward(kernel, args, now, None) is None


def test_whoever_asks_for_a_backend_goes_the_long_way(covered):
    now, kernel = State(), Kernel(RESULTS)
    express.remember("forward", GIVEN, {}, plan("forward"), now)
    other = scope.pin(None, "another")
    assert express.forward(kernel, GIVEN, now, None) is None
    assert express.forward(kernel, GIVEN, now, other) is None
    express.remember("backward", backward_args(), {}, plan("backward"), now)
    assert express.backward(kernel, backward_args(other), now, None) is None
    assert express.backward(kernel, backward_args(None), now, None) is None


def test_a_strided_gradient_goes_the_long_way(covered):
    now, kernel = State(), Kernel(RESULTS[:3])
    express.remember("backward", backward_args(), {}, plan("backward"), now)
    expanded = torch.ones(()).expand(6, 2, 8)
    assert express.backward(kernel, backward_args(grad_out=expanded), now, None) is None


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        (GIVEN, {"scale": 0.3}),
        ((*GIVEN[:5], 1, *GIVEN[6:]), {}),
        ((*GIVEN[:3], None, None, *GIVEN[5:]), {}),
    ],
    ids=["a keyword", "one query per sequence", "dense"],
)
def test_what_the_short_way_is_not_for_is_not_remembered(args, kwargs):
    now = State()
    express.remember("forward", args, kwargs, plan("forward"), now)
    assert now.passes == {}
